#pragma once
// The three norms on the GPU, float32 and any width; the arguments are those of the CPU, with pointers of device memory. Null, or a sentence
// about what cannot be served.
#include "k3/ops/norm/norm_kernels.h"

namespace k3::cuda {

enum class Norm { rms, l2, gated };
const char* norm_forward(Norm, const cpu::NormArgs&, void* stream);
const char* norm_backward(Norm, const cpu::NormArgs&, void* stream);

}  // namespace k3::cuda

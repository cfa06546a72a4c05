#pragma once
// The log decays on the GPU, float32; the arguments are those of the CPU, with pointers of device memory. Null, or a sentence about what
// cannot be served.
#include "k3/ops/decay/decay_kernels.h"

namespace k3::cuda {

enum class Decay { bounded, softplus };
const char* decay_forward(Decay, const cpu::DecayArgs&, void* stream);
const char* decay_backward(Decay, const cpu::DecayArgs&, void* stream);

}  // namespace k3::cuda

#pragma once
// depth_mix on the GPU, float32, any width and up to kDepthMixSources sources; the arguments are those of the CPU: the lists of pointers are
// memory of the CPU, what they point at is device memory. Null, or a sentence about what cannot be served.
#include "k3/ops/depth_mix/depth_mix_kernels.h"

namespace k3::cuda {

constexpr int64_t kDepthMixSources = 128;  // what fits among a kernel's parameters
const char* depth_mix_forward(const cpu::DepthMixArgs&, void* stream);
const char* depth_mix_backward(const cpu::DepthMixArgs&, void* stream);

}  // namespace k3::cuda

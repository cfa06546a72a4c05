#pragma once
// depth_mix on the GPU, float32, any width and up to kDepthMixSources sources; the arguments are those of the CPU: the lists of pointers are
// memory of the CPU, what they point at is device memory. Null, or a sentence about what cannot be served.
#include "k3/ops/depth_mix/depth_mix_kernels.h"

namespace k3::cuda {

constexpr int64_t kDepthMixSources = 128;  // what fits among a kernel's parameters
const char* depth_mix_forward(const cpu::DepthMixArgs&, void* stream);
// fresh (n): which gradients of sources are written, not added to; null: none. `partial` has depth_mix_parts(rows) rows here.
const char* depth_mix_backward(const cpu::DepthMixArgs&, const bool* fresh, void* stream);
constexpr int64_t depth_mix_parts(int64_t rows) { return (rows + 15) / 16; }

}  // namespace k3::cuda

#pragma once
// The three norms on the GPU, float32 and any width; the arguments are those of the CPU, with pointers of device memory. Null, or a sentence
// about what cannot be served.
#include "k3/ops/norm/norm_kernels.h"

namespace k3::cuda {

enum class Norm { rms, l2, gated };
const char* norm_forward(Norm, const cpu::NormArgs&, void* narrow, void* stream);  // narrow: y as bfloat16 too, or null
constexpr int64_t kNormPart = 16;  // rows of a block, where rows are short enough; else cpu::kNormBlock
constexpr int64_t norm_parts(int64_t rows) { return (rows + kNormPart - 1) / kNormPart; }            // rows of `partial`
const char* norm_backward(Norm, const cpu::NormArgs&, bool fresh_x, bool fresh_gate, void* stream);  // fresh: written, not added to

}  // namespace k3::cuda

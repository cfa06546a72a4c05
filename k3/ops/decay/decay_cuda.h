#pragma once
// The log decays on the GPU, float32; the arguments are those of the CPU, with pointers of device memory. Null, or a sentence about what
// cannot be served.
#include "k3/ops/decay/decay_kernels.h"

namespace k3::cuda {

enum class Decay { bounded, softplus };
const char* decay_forward(Decay, const cpu::DecayArgs&, void* stream);
// `partial` (decay_chunks(rows), 2, heads * dim) is scratch
constexpr int64_t kDecayChunk = 128;  // rows of one block, and the grain of the fixed-order sums
constexpr int64_t decay_chunks(int64_t rows) { return (rows + kDecayChunk - 1) / kDecayChunk; }
const char* decay_backward(Decay, const cpu::DecayArgs&, float* partial, void* stream);

}  // namespace k3::cuda

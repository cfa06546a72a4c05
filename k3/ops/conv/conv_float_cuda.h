#pragma once
// conv_silu on the GPU, float32 and any width up to kConvMaxWidth; the arguments are those of the CPU, with pointers of device memory. Null,
// or a sentence about what cannot be served.
#include "k3/ops/conv/conv_kernels.h"

namespace k3::cuda {

// Convolutions of one shape over the same taps, side by side in each launch.
constexpr int kMostConvs = 3;
struct Convs {
  cpu::ConvArgs of[kMostConvs];
  bool fresh[kMostConvs];  // dx is written, not added to
  int count;
};
const char* conv_silu_forward(const Convs&, void* stream);
// Scratch: `slopes` (count, rows, channels): dy times SiLU's slope; `readers` (rows, width): which row reads a row as its tap j, -1: none; `partial`
// (count, conv_chunks(rows), channels, width) for dw.
constexpr int64_t kConvChunk = 128;  // rows of one block, and the grain of dw's fixed-order sum
constexpr int64_t conv_chunks(int64_t rows) { return (rows + kConvChunk - 1) / kConvChunk; }
const char* conv_silu_backward(const Convs&, float* slopes, const int32_t* readers, float* partial, void* stream);
// state row moves[2 i] = row moves[2 i + 1] of x, for each of n
const char* conv_remember(const float* x, float* state, int64_t channels, const int32_t* moves, int64_t n, void* stream);

}  // namespace k3::cuda

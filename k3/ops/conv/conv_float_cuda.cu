// Bound by memory; neighbours' rows come from the cache. One chain over the taps, oldest first, as on the CPU. Backward: dy times SiLU's slope
// once; the thread of a row of x gathers from the rows that read it, newest tap first, so dx has one owner. dw: a block sums kConvChunk rows, its eight warps every eighth of them; then the blocks in order.
#include "k3/core/block.cuh"
#include "k3/ops/conv/conv_float_cuda.h"

namespace k3::cuda {
namespace {

using cpu::ConvArgs;
using cpu::kConvMaxWidth;
constexpr int kThreads = 128, kRowLanes = 8;

// What tap j of row n reads in channel c; false for zeros.
__device__ __forceinline__ bool source(const ConvArgs& a, int32_t tap, int64_t c, float& x) {
  if (tap >= 0) x = a.x[tap * a.channels + c];
  else if (tap <= cpu::kConvState) x = a.state[int64_t(cpu::kConvState - tap) * a.channels + c];
  else return false;
  return true;
}

__device__ __forceinline__ float convolved(const ConvArgs& a, const int32_t* taps, int64_t c) {
  float sum = 0.f, x;
  for (int64_t j = 0; j < a.width; ++j)
    if (source(a, taps[j], c, x)) sum = fmaf(a.w[c * a.width + j], x, sum);
  return sum;
}
__device__ __forceinline__ float slope(float sum, float dy) { return dy * exact_sigmoid(sum) * (1.f + sum * exact_sigmoid(-sum)); }

__global__ void __launch_bounds__(kThreads) forward_kernel(const ConvArgs a) {
  const int64_t c = int64_t(blockIdx.y) * kThreads + threadIdx.x, n = blockIdx.x;
  if (c >= a.channels) return;
  const int32_t* taps = a.taps + n * a.width;
  float y = 0.f;
  if (taps[a.width - 1] != cpu::kConvPadding) {
    const float sum = convolved(a, taps, c);
    y = sum * exact_sigmoid(sum);
  }
  a.y[n * a.channels + c] = y;
}

__global__ void __launch_bounds__(kThreads) readers_kernel(const ConvArgs a, int32_t* readers) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= a.rows * a.width) return;
  const int32_t row = a.taps[i];
  if (row >= 0) readers[row * a.width + i % a.width] = int32_t(i / a.width);
}

__global__ void __launch_bounds__(kThreads) slopes_kernel(const ConvArgs a, float* slopes) {
  const int64_t c = int64_t(blockIdx.y) * kThreads + threadIdx.x, n = blockIdx.x;
  if (c >= a.channels) return;
  const int32_t* taps = a.taps + n * a.width;
  slopes[n * a.channels + c] = taps[a.width - 1] == cpu::kConvPadding ? 0.f : slope(convolved(a, taps, c), a.dy[n * a.channels + c]);
}

__global__ void __launch_bounds__(kThreads) dx_kernel(const ConvArgs a, const float* slopes, const int32_t* readers, bool fresh) {
  const int64_t c = int64_t(blockIdx.y) * kThreads + threadIdx.x, r = blockIdx.x;
  if (c >= a.channels) return;
  float dx = fresh ? 0.f : a.dx[r * a.channels + c];
  for (int64_t j = a.width - 1; j >= 0; --j) {
    const int64_t n = readers[r * a.width + j];
    if (n >= 0) dx = fmaf(a.w[c * a.width + j], slopes[n * a.channels + c], dx);
  }
  a.dx[r * a.channels + c] = dx;
}

__global__ void __launch_bounds__(32 * kRowLanes) dw_kernel(const ConvArgs a, const float* slopes, float* partial) {
  __shared__ float part[kRowLanes][kConvMaxWidth][32];
  const int lane = threadIdx.x >> 5, column = threadIdx.x & 31;
  const int64_t c = int64_t(blockIdx.x) * 32 + column;
  float sum[kConvMaxWidth] = {};
  if (c < a.channels)
#pragma unroll 2
    for (int64_t n = int64_t(blockIdx.y) * kConvChunk + lane, end = min(a.rows, (int64_t(blockIdx.y) + 1) * kConvChunk); n < end; n += kRowLanes) {
      const int32_t* taps = a.taps + n * a.width;
      if (taps[a.width - 1] == cpu::kConvPadding) continue;
      const float da = slopes[n * a.channels + c];
      float x;
#pragma unroll
      for (int j = 0; j < kConvMaxWidth; ++j)
        if (j < a.width && source(a, taps[j], c, x)) sum[j] = fmaf(da, x, sum[j]);
    }
#pragma unroll
  for (int j = 0; j < kConvMaxWidth; ++j) part[lane][j][column] = sum[j];
  __syncthreads();
  if (lane || c >= a.channels) return;
  for (int j = 0; j < a.width; ++j) {
    float total = 0.f;
    for (int l = 0; l < kRowLanes; ++l) total += part[l][j][column];
    partial[(int64_t(blockIdx.y) * a.channels + c) * a.width + j] = total;
  }
}
__global__ void __launch_bounds__(kThreads) join_kernel(const float* partial, int64_t chunks, int64_t n, float* dw) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n) return;
  float sum = 0.f;
#pragma unroll 8
  for (int64_t b = 0; b < chunks; ++b) sum += partial[b * n + i];
  dw[i] += sum;
}

__global__ void __launch_bounds__(kThreads) remember_kernel(const float* x, float* state, int64_t channels, const int32_t* moves) {
  const int64_t c = int64_t(blockIdx.y) * kThreads + threadIdx.x, i = blockIdx.x;
  if (c < channels) state[moves[2 * i] * channels + c] = x[moves[2 * i + 1] * channels + c];
}

}  // namespace

const char* conv_silu_forward(const ConvArgs& a, void* stream) {
  if (a.rows == 0 || a.channels == 0) return nullptr;
  forward_kernel<<<dim3(unsigned(a.rows), blocks_for(a.channels, kThreads)), kThreads, 0, stream_of(stream)>>>(a);
  return launched();
}

const char* conv_silu_backward(const ConvArgs& a, float* slopes, int32_t* readers, float* partial, bool fresh, void* stream) {
  if (a.rows == 0 || a.channels == 0) return nullptr;
  const cudaStream_t s = stream_of(stream);
  cudaMemsetAsync(readers, 0xff, size_t(a.rows * a.width) * sizeof(int32_t), s);
  readers_kernel<<<blocks_for(a.rows * a.width, kThreads), kThreads, 0, s>>>(a, readers);
  const dim3 elements(unsigned(a.rows), blocks_for(a.channels, kThreads));
  slopes_kernel<<<elements, kThreads, 0, s>>>(a, slopes);
  dx_kernel<<<elements, kThreads, 0, s>>>(a, slopes, readers, fresh);
  if (a.dw) {
    const int64_t chunks = conv_chunks(a.rows), n = a.channels * a.width;
    dw_kernel<<<dim3(blocks_for(a.channels, 32), unsigned(chunks)), 32 * kRowLanes, 0, s>>>(a, slopes, partial);
    join_kernel<<<blocks_for(n, kThreads), kThreads, 0, s>>>(partial, chunks, n, a.dw);
  }
  return launched();
}

const char* conv_remember(const float* x, float* state, int64_t channels, const int32_t* moves, int64_t n, void* stream) {
  if (n == 0 || channels == 0) return nullptr;
  remember_kernel<<<dim3(unsigned(n), blocks_for(channels, kThreads)), kThreads, 0, stream_of(stream)>>>(x, state, channels, moves);
  return launched();
}

}  // namespace k3::cuda

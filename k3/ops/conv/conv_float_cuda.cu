// Bound by memory; neighbours' rows come from the cache. One chain over the taps, oldest first, as on the CPU. Backward: dy times SiLU's slope
// once; the thread of a row of x gathers from the rows that read it, newest tap first, so dx has one owner. dw: a block sums kConvChunk rows, its eight warps every eighth of them; then the blocks in order.
#include "k3/core/enqueue.cuh"
#include "k3/core/four.cuh"
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

__global__ void __launch_bounds__(kThreads) forward_kernel(const __grid_constant__ Convs all) {
  follow();
  const ConvArgs& a = all.of[blockIdx.z];
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

// ---- width 4, the published one: four channels a thread of kRows rows, whose loads do not wait for stores ---------------------------
constexpr int kRows = 4;
struct Taps4 {
  float4 of[4];  // w of channel i
};
__device__ __forceinline__ Taps4 taps_of(const ConvArgs& a, int64_t c) {
  Taps4 w;
#pragma unroll
  for (int i = 0; i < 4; ++i) w.of[i] = load4(a.w + (c + i) * 4);
  return w;
}
__device__ __forceinline__ float4 source4(const ConvArgs& a, int32_t tap, int64_t c) {  // zeros where there are none
  if (tap >= 0) return load4(a.x + tap * a.channels + c);
  if (tap <= cpu::kConvState) return load4(a.state + int64_t(cpu::kConvState - tap) * a.channels + c);
  return zero4();
}
__device__ __forceinline__ float4 convolved4(const ConvArgs& a, const int4 tap, const Taps4& w, int64_t c) {
  const float4 x[4] = {source4(a, tap.x, c), source4(a, tap.y, c), source4(a, tap.z, c), source4(a, tap.w, c)};
  auto sum = [&](const float4& k, float p, float q, float r, float s) { return fmaf(k.w, s, fmaf(k.z, r, fmaf(k.y, q, fmaf(k.x, p, 0.f)))); };
  return make_float4(sum(w.of[0], x[0].x, x[1].x, x[2].x, x[3].x), sum(w.of[1], x[0].y, x[1].y, x[2].y, x[3].y),
                     sum(w.of[2], x[0].z, x[1].z, x[2].z, x[3].z), sum(w.of[3], x[0].w, x[1].w, x[2].w, x[3].w));
}
struct Share4 {  // a thread's channels and its first row: threads run along the channels, then along the rows
  int64_t c, first;
  __device__ __forceinline__ explicit Share4(const ConvArgs& a) {
    const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x, fours = a.channels / 4;
    c = i % fours * 4, first = i / fours * kRows;
  }
};
unsigned blocks4(const ConvArgs& a) { return blocks_for((a.rows + kRows - 1) / kRows * (a.channels / 4), kThreads); }
template <bool kSlopes>  // y, or dy times the slope
__global__ void __launch_bounds__(kThreads) forward4_kernel(const __grid_constant__ Convs all, float* slopes) {
  follow();
  const ConvArgs& a = all.of[blockIdx.z];
  if (kSlopes) slopes += blockIdx.z * a.rows * a.channels;
  const Share4 t(a);
  const int64_t c = t.c, first = t.first;
  if (first >= a.rows) return;
  const Taps4 w = taps_of(a, c);
  float4 y[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t n = first + r;
    y[r] = zero4();
    if (n >= a.rows) continue;
    const int4 tap = *reinterpret_cast<const int4*>(a.taps + n * 4);
    if (tap.w == cpu::kConvPadding) continue;
    const float4 x = convolved4(a, tap, w, c);
    if constexpr (kSlopes) {
      y[r] = each4(slope, x, load4(a.dy + n * a.channels + c));
    } else {
      y[r] = each4([](float x) { return x * exact_sigmoid(x); }, x);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r)
    if (first + r < a.rows) *reinterpret_cast<float4*>((kSlopes ? slopes : a.y) + (first + r) * a.channels + c) = y[r];
}
__global__ void __launch_bounds__(kThreads) dx4_kernel(const __grid_constant__ Convs all, const float* slopes, const int32_t* readers) {
  follow();
  const ConvArgs& a = all.of[blockIdx.z];
  const bool fresh = all.fresh[blockIdx.z];
  slopes += blockIdx.z * a.rows * a.channels;
  const Share4 t(a);
  const int64_t c = t.c, first = t.first;
  if (first >= a.rows) return;
  const Taps4 w = taps_of(a, c);
  float4 dx[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t n = first + r;
    dx[r] = zero4();
    if (n >= a.rows) continue;
    const int4 reader = *reinterpret_cast<const int4*>(readers + n * 4);
    auto read = [&](int32_t row) { return row >= 0 ? load4(slopes + row * a.channels + c) : zero4(); };
    const float4 d[4] = {read(reader.x), read(reader.y), read(reader.z), read(reader.w)}, old = fresh ? zero4() : load4(a.dx + n * a.channels + c);
    auto sum = [&](const float4& k, float old, float p, float q, float r, float s) { return fmaf(k.x, p, fmaf(k.y, q, fmaf(k.z, r, fmaf(k.w, s, old)))); };
    dx[r] = make_float4(sum(w.of[0], old.x, d[0].x, d[1].x, d[2].x, d[3].x), sum(w.of[1], old.y, d[0].y, d[1].y, d[2].y, d[3].y),
                        sum(w.of[2], old.z, d[0].z, d[1].z, d[2].z, d[3].z), sum(w.of[3], old.w, d[0].w, d[1].w, d[2].w, d[3].w));
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r)
    if (first + r < a.rows) *reinterpret_cast<float4*>(a.dx + (first + r) * a.channels + c) = dx[r];
}
// A block is kConvChunk rows of 128 channels; a warp sums sixteen rows that follow each other.
__global__ void __launch_bounds__(32 * kRowLanes) dw4_kernel(const __grid_constant__ Convs all, const float* slopes, float* partial) {
  follow();
  const ConvArgs& a = all.of[blockIdx.z];
  if (!a.dw) return;
  slopes += blockIdx.z * a.rows * a.channels, partial += blockIdx.z * gridDim.y * a.channels * 4;
  __shared__ float4 part[kRowLanes][4][32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int64_t c = (int64_t(blockIdx.x) * 32 + lane) * 4, begin = int64_t(blockIdx.y) * kConvChunk + warp * (kConvChunk / kRowLanes);
  const int64_t end = min(a.rows, begin + kConvChunk / kRowLanes);
  float4 sum[4] = {};
  if (c < a.channels)
#pragma unroll 2
    for (int64_t n = begin; n < end; ++n) {
      const int4 tap = *reinterpret_cast<const int4*>(a.taps + n * 4);
      const float4 da = load4(slopes + n * a.channels + c);  // zero in padding
      const float4 x[4] = {source4(a, tap.x, c), source4(a, tap.y, c), source4(a, tap.z, c), source4(a, tap.w, c)};
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[j] = fma4(da, x[j], sum[j]);
    }
#pragma unroll
  for (int j = 0; j < 4; ++j) part[warp][j][lane] = sum[j];
  __syncthreads();
  if (warp >= 4 || c >= a.channels) return;  // warp: the tap
  float4 total = part[0][warp][lane];
#pragma unroll
  for (int l = 1; l < kRowLanes; ++l) total = plus4(total, part[l][warp][lane]);
  float* to = partial + (int64_t(blockIdx.y) * a.channels + c) * 4 + warp;
  to[0] = total.x, to[4] = total.y, to[8] = total.z, to[12] = total.w;
}

// Whether they serve: rows of x, w, taps and all others begin at 16 bytes.
bool fours(const ConvArgs& a) { return a.width == 4 && a.channels % 4 == 0; }

__global__ void __launch_bounds__(kThreads) slopes_kernel(const __grid_constant__ Convs all, float* slopes) {
  follow();
  const ConvArgs& a = all.of[blockIdx.z];
  slopes += blockIdx.z * a.rows * a.channels;
  const int64_t c = int64_t(blockIdx.y) * kThreads + threadIdx.x, n = blockIdx.x;
  if (c >= a.channels) return;
  const int32_t* taps = a.taps + n * a.width;
  slopes[n * a.channels + c] = taps[a.width - 1] == cpu::kConvPadding ? 0.f : slope(convolved(a, taps, c), a.dy[n * a.channels + c]);
}

__global__ void __launch_bounds__(kThreads) dx_kernel(const __grid_constant__ Convs all, const float* slopes, const int32_t* readers) {
  follow();
  const ConvArgs& a = all.of[blockIdx.z];
  slopes += blockIdx.z * a.rows * a.channels;
  const int64_t c = int64_t(blockIdx.y) * kThreads + threadIdx.x, r = blockIdx.x;
  if (c >= a.channels) return;
  float dx = all.fresh[blockIdx.z] ? 0.f : a.dx[r * a.channels + c];
  for (int64_t j = a.width - 1; j >= 0; --j) {
    const int64_t n = readers[r * a.width + j];
    if (n >= 0) dx = fmaf(a.w[c * a.width + j], slopes[n * a.channels + c], dx);
  }
  a.dx[r * a.channels + c] = dx;
}

__global__ void __launch_bounds__(32 * kRowLanes) dw_kernel(const __grid_constant__ Convs all, const float* slopes, float* partial) {
  follow();
  const ConvArgs& a = all.of[blockIdx.z];
  if (!a.dw) return;
  slopes += blockIdx.z * a.rows * a.channels, partial += blockIdx.z * gridDim.y * a.channels * a.width;
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
__global__ void __launch_bounds__(kThreads) join_kernel(const __grid_constant__ Convs all, const float* partial, int64_t chunks, int64_t n) {
  follow();
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  float* dw = all.of[blockIdx.z].dw;
  if (i >= n || !dw) return;
  partial += blockIdx.z * chunks * n;
  float sum = 0.f;
#pragma unroll 8
  for (int64_t b = 0; b < chunks; ++b) sum += partial[b * n + i];
  dw[i] += sum;
}

__global__ void __launch_bounds__(kThreads) remember_kernel(const float* x, float* state, int64_t channels, const int32_t* moves) {
  follow();
  const int64_t c = int64_t(blockIdx.y) * kThreads + threadIdx.x, i = blockIdx.x;
  if (c < channels) state[moves[2 * i] * channels + c] = x[moves[2 * i + 1] * channels + c];
}

}  // namespace

const char* conv_silu_forward(const Convs& all, void* stream) {
  const ConvArgs& a = all.of[0];
  if (a.rows == 0 || a.channels == 0) return nullptr;
  const cudaStream_t s = stream_of(stream);
  const unsigned count = unsigned(all.count);
  if (fours(a))
    enqueue(forward4_kernel<false>, dim3(blocks4(a), 1, count), kThreads, 0, s, all, nullptr);
  else
    enqueue(forward_kernel, dim3(unsigned(a.rows), blocks_for(a.channels, kThreads), count), kThreads, 0, s, all);
  return launched();
}

const char* conv_silu_backward(const Convs& all, float* slopes, const int32_t* readers, float* partial, void* stream) {
  const ConvArgs& a = all.of[0];
  if (a.rows == 0 || a.channels == 0) return nullptr;
  const cudaStream_t s = stream_of(stream);
  const unsigned count = unsigned(all.count);
  const int64_t chunks = conv_chunks(a.rows), n = a.channels * a.width;
  if (fours(a)) {
    const dim3 blocks(blocks4(a), 1, count);
    enqueue(forward4_kernel<true>, blocks, kThreads, 0, s, all, slopes);
    enqueue(dx4_kernel, blocks, kThreads, 0, s, all, slopes, readers);
    if (partial) enqueue(dw4_kernel, dim3(blocks_for(a.channels, 128), unsigned(chunks), count), 32 * kRowLanes, 0, s, all, slopes, partial);
  } else {
    const dim3 elements(unsigned(a.rows), blocks_for(a.channels, kThreads), count);
    enqueue(slopes_kernel, elements, kThreads, 0, s, all, slopes);
    enqueue(dx_kernel, elements, kThreads, 0, s, all, slopes, readers);
    if (partial) enqueue(dw_kernel, dim3(blocks_for(a.channels, 32), unsigned(chunks), count), 32 * kRowLanes, 0, s, all, slopes, partial);
  }
  if (partial) enqueue(join_kernel, dim3(blocks_for(n, kThreads), 1, count), kThreads, 0, s, all, partial, chunks, n);
  return launched();
}

const char* conv_remember(const float* x, float* state, int64_t channels, const int32_t* moves, int64_t n, void* stream) {
  if (n == 0 || channels == 0) return nullptr;
  enqueue(remember_kernel, dim3(unsigned(n), blocks_for(channels, kThreads)), kThreads, 0, stream_of(stream), x, state, channels, moves);
  return launched();
}

}  // namespace k3::cuda

// The forward of attention in float32 (attend_float.cuh), and the moves of keys and values into their tiles.
//
// Bound: multiply-adds outside the tensor units. Split: append: 32 tokens of a sequence and a kv head (or the shared channels); forward: 64 query
// rows, or 16 where every sequence has so few (decode), and a kv head; the longest first.
#include <algorithm>

#include "k3/core/enqueue.cuh"
#include "k3/ops/attention/attend_float.cuh"
#include "k3/ops/attention/attention_float_cuda.h"

namespace k3::cuda {
namespace {

using cpu::AttentionArgs;
using cpu::AttentionSequence;
using cpu::kKeyTile;

const char* result() {
  cudaError_t e = cudaGetLastError();
  return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}

// KeyTiles::keys_at and values_at, on the device
__device__ int64_t keys_at(const cpu::KeyTiles& t, int64_t g) { return kKeyTile * (t.shared + g * (t.own + t.value)); }
__device__ int64_t values_at(const cpu::KeyTiles& t, int64_t g) { return keys_at(t, g) + kKeyTile * t.own; }

__global__ void __launch_bounds__(256) append_kernel(const AttentionArgs a) {
  follow();
  __shared__ float x[32][33];
  const AttentionSequence s = a.sequences[blockIdx.y];
  const cpu::KeyTiles t = a.tiles;
  const int64_t first = int64_t(blockIdx.x) * 32;
  const int count = int(min(int64_t(32), s.queries - first)), lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (count <= 0) return;
  const int64_t g = int64_t(blockIdx.z) - 1;  // -1: the shared channels
  const int32_t* rows = a.rows + s.rows_at + first;
  const float* from = g < 0 ? a.shared : a.keys + g * a.key_head_stride;
  const int64_t stride = g < 0 ? a.shared_stride : a.key_stride, channels = g < 0 ? t.shared : t.own, to_at = g < 0 ? 0 : keys_at(t, g);
  auto block = [&](int64_t at) { return a.blocks[s.blocks_at + at / kKeyTile]; };
  for (int64_t c0 = 0; c0 < channels; c0 += 32) {
    __syncthreads();
    for (int r = warp; r < count; r += 8)
      if (c0 + lane < channels) x[r][lane] = from[rows[r] * stride + c0 + lane];
    __syncthreads();
    if (lane < count) {
      const int64_t at = s.first + first + lane;
      float* to = block(at) + to_at + at % kKeyTile;
      for (int c = warp; c < 32 && c0 + c < channels; c += 8) to[(c0 + c) * kKeyTile] = x[lane][c];
    }
  }
  if (g < 0) return;
  for (int r = warp; r < count; r += 8) {
    const int64_t at = s.first + first + r;
    float* to = block(at) + values_at(t, g) + at % kKeyTile * t.value;
    for (int64_t c = lane; c < t.value; c += 32) to[c] = a.values[rows[r] * a.value_stride + g * a.value_head_stride + c];
  }
}

template <int R, int J>
__global__ void __launch_bounds__(kAttendThreads, R* J <= 8 ? 2 : 1) attend_kernel(const AttentionArgs a, const int64_t t0, const int64_t t1) {
  follow();
  extern __shared__ __align__(16) float shared[];
  const cpu::QueryTile item = a.query_tiles[blockIdx.x];
  const AttentionSequence s = a.sequences[item.sequence];
  const cpu::KeyTiles& t = a.tiles;
  const int64_t g = blockIdx.y, heads = t.kv_heads * a.group;
  const int n = int(min(int64_t(16 * R), s.queries * a.group - item.first_row)), tx = threadIdx.x & 15, ty = threadIdx.x >> 4;
  auto token = [&](int r) { return (item.first_row + r) / a.group; };
  auto at = [&](int r) { return int64_t(a.rows[s.rows_at + token(r)]) * heads + g * a.group + (item.first_row + r) % a.group; };
  auto limit = [&](int r) { return s.first + token(r) + 1; };
  if (n <= 0) return;  // a filler row of a decode step
  const int64_t last = limit(n - 1), tiles = (last + kKeyTile - 1) / kKeyTile;
  const int key_dim = int(t.own + t.shared), value_dim = int(t.value);
  if (t0 >= tiles) return;

  Attend<R, J> w;
  w.begin(shared, n, key_dim, value_dim, [&](int r) { return a.q + at(r) * key_dim; });
  if (t0 > 0)
#pragma unroll
    for (int i = 0; i < R; ++i) {
      const int r = ty + 16 * i;
      if (r >= n) continue;
      w.m[i] = a.m[at(r)], w.l[i] = a.l[at(r)];
#pragma unroll
      for (int j = 0; j < J; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (const int c = tx * 4 + 64 * j + e; c < value_dim) w.o[i][j][e] = a.y[at(r) * value_dim + c];
    }
  for (int64_t k = t0; k < min(t1, tiles); ++k) {
    const float* block = a.blocks[s.blocks_at + k];
    const float *own = block + keys_at(t, g), *values = block + values_at(t, g);
    const int own_channels = int(t.own);
    w.template tile<true>(
        int(min(last - k * kKeyTile, kKeyTile)), a.scale, [&](int r) { return r < n ? int(min(limit(r) - k * kKeyTile, kKeyTile)) : 0; },
        [&](int c) { return c < own_channels ? own + c * kKeyTile : block + (c - own_channels) * kKeyTile; },
        [&](int i, int c) { return values[i * value_dim + c]; });
  }
  const bool done = t1 >= tiles;
#pragma unroll
  for (int i = 0; i < R; ++i) {
    const int r = ty + 16 * i;
    if (r >= n) continue;
    const float inverse = 1.f / w.l[i];
    if (tx == 0) a.m[at(r)] = w.m[i], a.l[at(r)] = done ? w.m[i] + logf(w.l[i]) : w.l[i];
#pragma unroll
    for (int j = 0; j < J; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (const int c = tx * 4 + 64 * j + e; c < value_dim) a.y[at(r) * value_dim + c] = done ? w.o[i][j][e] * inverse + 0.f : w.o[i][j][e];
  }
}

__global__ void __launch_bounds__(256) max_logit_kernel(const float* m, const int32_t* rows, int64_t row_count, int64_t heads, float* out) {
  follow();
  __shared__ float part[8];
  float top = -INFINITY;
  for (int64_t r = threadIdx.x; r < row_count; r += 256) top = fmaxf(top, m[rows[r] * heads + blockIdx.x]);
  top = warp_max(top);
  if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = top;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < 8; ++i) top = fmaxf(top, part[i]);
    out[blockIdx.x] = top;
  }
}

__global__ void __launch_bounds__(256) latent_append_kernel(const AttentionArgs a, const float* c, int64_t rank, const float* k_pe, int64_t rope) {
  follow();
  const AttentionSequence s = a.sequences[blockIdx.y];
  const int64_t i = int64_t(blockIdx.x) * 8 + (threadIdx.x >> 5), at = s.first + i;
  if (i >= s.queries) return;
  const int64_t row = a.rows[s.rows_at + i];
  float* to = a.blocks[s.blocks_at + at / kKeyTile] + at % kKeyTile * (rank + rope);
  for (int64_t e = threadIdx.x & 31; e < rank + rope; e += 32) to[e] = e < rank ? c[row * rank + e] : k_pe[row * rope + e - rank];
}

__global__ void __launch_bounds__(256) latent_gather_kernel(float* const* blocks, int64_t first, int64_t n, float* latents, int64_t rank, float* shared,
                                                            int64_t rope) {
  follow();
  const int64_t i = int64_t(blockIdx.x) * 8 + (threadIdx.x >> 5), at = first + i;
  if (i >= n) return;
  const float* from = blocks[at / kKeyTile] + at % kKeyTile * (rank + rope);
  for (int64_t e = threadIdx.x & 31; e < rank + rope; e += 32) (e < rank ? latents[i * rank + e] : shared[i * rope + e - rank]) = from[e];
}

template <int R, int J>
const char* attend(const AttentionArgs& a, int64_t t0, int64_t t1, cudaStream_t stream) {
  const size_t bytes = attend_shared_bytes(16 * R, int(a.tiles.own + a.tiles.shared), J);
  cudaError_t e = cudaFuncSetAttribute(attend_kernel<R, J>, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
  if (e != cudaSuccess) return cudaGetErrorString(e);
  enqueue(attend_kernel<R, J>, dim3(unsigned(a.query_tile_count), unsigned(a.tiles.kv_heads)), kAttendThreads, bytes, stream, a, t0, t1);
  return result();
}

}  // namespace

const char* attention_append(const AttentionArgs& a, int64_t longest, void* stream) {
  if (a.sequence_count > 65535 || a.tiles.kv_heads >= 65535) return "[attention] the GPU takes up to 65535 sequences and kv heads in a call";
  if (longest == 0 || a.sequence_count == 0) return nullptr;
  enqueue(append_kernel, dim3(unsigned((longest + 31) / 32), unsigned(a.sequence_count), unsigned(a.tiles.kv_heads + 1)), 256, 0, cudaStream_t(stream), a);
  return result();
}

const char* attention_forward(const AttentionArgs& a, int64_t longest, int64_t t0, int64_t t1, void* stream) {
  if (a.query_tile_count == 0) return nullptr;
  const cudaStream_t s = cudaStream_t(stream);
  const bool few = longest * a.group <= 16;  // every sequence is one item of at most 16 rows
  switch ((a.tiles.value + 63) / 64) {
    case 1:
      return few ? attend<1, 1>(a, t0, t1, s) : attend<4, 1>(a, t0, t1, s);
    case 2:
      return few ? attend<1, 2>(a, t0, t1, s) : attend<4, 2>(a, t0, t1, s);
    case 3:
    case 4:
      return few ? attend<1, 4>(a, t0, t1, s) : attend<4, 4>(a, t0, t1, s);
  }
  return "[attention] the GPU serves heads of up to 256 channels";
}

const char* attention_max_logit(const AttentionArgs& a, int64_t row_count, float* out, void* stream) {
  const int64_t heads = a.tiles.kv_heads * a.group;
  enqueue(max_logit_kernel, unsigned(heads), 256, 0, cudaStream_t(stream), a.m, a.rows, row_count, heads, out);
  return result();
}

const char* latent_append(const AttentionArgs& a, int64_t longest, const float* c, int64_t rank, const float* k_pe, int64_t rope, void* stream) {
  if (a.sequence_count > 65535) return "[attention] the GPU takes up to 65535 sequences in a call";
  if (longest == 0 || a.sequence_count == 0) return nullptr;
  enqueue(latent_append_kernel, dim3(unsigned((longest + 7) / 8), unsigned(a.sequence_count)), 256, 0, cudaStream_t(stream), a, c, rank, k_pe, rope);
  return result();
}

const char* latent_gather(float* const* blocks, int64_t first, int64_t n, float* latents, int64_t rank, float* shared, int64_t rope, void* stream) {
  if (n == 0) return nullptr;
  enqueue(latent_gather_kernel, unsigned((n + 7) / 8), 256, 0, cudaStream_t(stream), blocks, first, n, latents, rank, shared, rope);
  return result();
}

}  // namespace k3::cuda

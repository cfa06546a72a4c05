// 1 a block a head of a row: W_UK^T q, and the first head's block appends the token to the cache; 2 a block a piece of the context and eight heads, a
// warp a head: 32 tokens at a time in shared memory, a lane a token for the scores, columns for the sums; 3 a block a head of a row: pieces joined in
// order, W_UV, gate. Bound: latency for short contexts, reading the cache once for eight heads for long ones.
#include "k3/ops/step/latent_cuda.h"
#include "k3/ops/step/step.cuh"

namespace k3::cuda {
namespace {

constexpr int kBlock = 128, kTokens = 32, kHeads = 8;

// On their way from memory while the kernel in front ends.
__device__ __forceinline__ void fetch(const void* p, int64_t bytes) {
  for (int64_t i = threadIdx.x * 128; i < bytes; i += blockDim.x * 128) asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(p) + i));
}

__global__ void __launch_bounds__(256) query_kernel(const __grid_constant__ StepLatentArgs a) {  // 1
  __shared__ float q[256];
  const int h = blockIdx.x, row = blockIdx.y, lane = threadIdx.x & 31;
  const int width = a.rank + a.rope, slot = a.step.slots[row];
  const nv_bf16* w = static_cast<const nv_bf16*>(a.kv_b) + int64_t(h) * (a.nope + a.value) * a.rank;
  let_next_kernel_begin();
  if (slot < 0) return;
  fetch(w, int64_t(a.nope + a.value) * a.rank * 2);
  wait_for_kernel_in_front();
  const float* from = a.q + (int64_t(row) * a.heads + h) * (a.nope + a.rope);
  float* to = a.q_latent + (int64_t(row) * a.heads + h) * width;
  for (int i = threadIdx.x; i < a.nope; i += 256) q[i] = from[i];
  for (int i = threadIdx.x; i < a.rope; i += 256) to[a.rank + i] = from[a.nope + i];
  __syncthreads();
  for (int c = threadIdx.x * 2; c < a.rank; c += 512) {
    float x = 0.f, y = 0.f;
#pragma unroll 16
    for (int i = 0; i < a.nope; ++i) {
      const uint32_t two = *reinterpret_cast<const uint32_t*>(w + int64_t(i) * a.rank + c);
      x = fmaf(q[i], low(two), x), y = fmaf(q[i], high(two), y);
    }
    to[c] = x, to[c + 1] = y;
  }
  if (h == 0 && threadIdx.x >= 224) {
    const float* kv = a.kv + int64_t(row) * width;
    const int64_t at = a.step.tokens[row];
    float* cached = a.table[slot * a.table_blocks + at / kBlock] + at % kBlock * width;
    float square = 0.f;
    for (int c = lane; c < a.rank; c += 32) square = fmaf(kv[c], kv[c], square);
    const float r = 1.f / sqrtf(warp_sum(square) / float(a.rank) + a.eps);
    for (int c = lane; c < width; c += 32) cached[c] = c < a.rank ? kv[c] * r * a.gain[c] : kv[c];
  }
}

template <int J>  // up to 32 J columns of the latent
__global__ void __launch_bounds__(kHeads * 32) attend_kernel(const __grid_constant__ StepLatentArgs a) {  // 2
  extern __shared__ __align__(16) float shared[];
  const int piece = blockIdx.x, row = blockIdx.y, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, h = blockIdx.z * kHeads + warp;
  const int width = a.rank + a.rope, stride = width + 1;
  float *rows = shared, *q = rows + kTokens * stride;  // (kTokens, stride), (kHeads, width)
  let_next_kernel_begin();
  const int slot = a.step.slots[row];
  if (slot < 0) return;
  const int64_t all = int64_t(a.step.tokens[row]) + 1, tiles = (all + kTokens - 1) / kTokens, each = (tiles + kStepSplits - 1) / kStepSplits * kTokens;
  const int64_t begin = piece * each, end = min(all, begin + each);
  wait_for_kernel_in_front();
  const bool exists = h < a.heads;
  float* out = a.partial + ((int64_t(row) * a.heads + (exists ? h : 0)) * kStepSplits + piece) * (a.rank + 2);
  if (begin >= end) {
    if (exists && lane == 0) out[a.rank] = -INFINITY, out[a.rank + 1] = 0.f;
    return;
  }
  for (int c = lane; c < width && exists; c += 32) q[warp * width + c] = a.q_latent[(int64_t(row) * a.heads + h) * width + c] * a.scale;
  float o[J] = {}, top = -INFINITY, total = 0.f;
  for (int64_t first = begin; first < end; first += kTokens) {
    const int n = int(min(int64_t(kTokens), end - first));
    const float* block = a.table[slot * a.table_blocks + first / kBlock] + first % kBlock * width;  // 32 tokens lie in one block
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kTokens / kHeads; ++r) {
      const int i = warp + r * kHeads;
#pragma unroll 2
      for (int c = lane * 4; c < width && i < n; c += 128) {
        const float4 x = *reinterpret_cast<const float4*>(block + i * width + c);
        float* to = rows + i * stride + c;
        to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
      }
    }
    __syncthreads();
    if (!exists) continue;
    float score = -INFINITY;
    if (lane < n) {
      float part[4] = {};
      const float *key = rows + lane * stride, *mine = q + warp * width;
#pragma unroll 4
      for (int c = 0; c < width; c += 4)
#pragma unroll
        for (int e = 0; e < 4; ++e) part[e] = fmaf(mine[c + e], key[c + e], part[e]);
      score = (part[0] + part[1]) + (part[2] + part[3]);
    }
    const float higher = fmaxf(top, warp_max(score)), keep = expf(top - higher), p = expf(score - higher);
    top = higher, total = fmaf(total, keep, warp_sum(p));
#pragma unroll
    for (int j = 0; j < J; ++j) o[j] *= keep;
#pragma unroll 4
    for (int i = 0; i < n; ++i) {
      const float weight = __shfl_sync(~0u, p, i);
#pragma unroll
      for (int j = 0; j < J; ++j)
        if (lane + 32 * j < a.rank) o[j] = fmaf(weight, rows[i * stride + lane + 32 * j], o[j]);
    }
  }
  if (!exists) return;
#pragma unroll
  for (int j = 0; j < J; ++j)
    if (const int c = lane + 32 * j; c < a.rank) out[c] = o[j];
  if (lane == 0) out[a.rank] = top, out[a.rank + 1] = total;
}

__global__ void __launch_bounds__(256) value_kernel(const __grid_constant__ StepLatentArgs a) {  // 3
  __shared__ float o[512];
  const int h = blockIdx.x, row = blockIdx.y, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  let_next_kernel_begin();
  if (a.step.slots[row] < 0) return;
  wait_for_kernel_in_front();
  const float* partial = a.partial + (int64_t(row) * a.heads + h) * kStepSplits * (a.rank + 2);
  const float m = partial[lane * (a.rank + 2) + a.rank], l = partial[lane * (a.rank + 2) + a.rank + 1];  // a lane a piece
  const float top = warp_max(m), weight = expf(m - top), total = warp_sum(weight * l);
  const unsigned pieces = __ballot_sync(~0u, l > 0.f);
  for (int c0 = 0; c0 < a.rank; c0 += 256) {
    const int c = c0 + threadIdx.x;
    float sum = 0.f;
    for (int s0 = 0; s0 < kStepSplits && pieces >> s0; s0 += 8) {  // the pieces that hold tokens are the first ones
      float x[8];
#pragma unroll
      for (int s = 0; s < 8; ++s) x[s] = pieces >> (s0 + s) & 1 && c < a.rank ? partial[(s0 + s) * (a.rank + 2) + c] : 0.f;
#pragma unroll
      for (int s = 0; s < 8; ++s) sum = fmaf(__shfl_sync(~0u, weight, s0 + s), x[s], sum);
    }
    if (c < a.rank) o[c] = sum / total;
  }
  __syncthreads();
  const nv_bf16* w = static_cast<const nv_bf16*>(a.kv_b) + (int64_t(h) * (a.nope + a.value) + a.nope) * a.rank;
#pragma unroll 4
  for (int v = warp; v < a.value; v += 8) {
    float sum = 0.f;
#pragma unroll 2
    for (int c = lane * 2; c < a.rank; c += 64) {
      const uint32_t two = *reinterpret_cast<const uint32_t*>(w + int64_t(v) * a.rank + c);
      sum = fmaf(low(two), o[c], fmaf(high(two), o[c + 1], sum));
    }
    sum = warp_sum(sum);
    const int64_t at = (int64_t(row) * a.heads + h) * a.value + v;
    if (lane == 0) a.y[at] = a.gate ? sum * exact_sigmoid(a.gate[at]) : sum;
  }
}

}  // namespace

const char* step_latent(const StepLatentArgs& a, void* stream) {
  if (a.rows == 0) return nullptr;
  if (a.rank > 512 || a.rope > 64 || a.nope > 256 || a.rank % 4 || a.rope % 4) return "[step] latents are of rank up to 512 with up to 64 shared and 256 own channels";
  const dim3 heads(unsigned(a.heads), unsigned(a.rows));
  const size_t bytes = size_t(kTokens * (a.rank + a.rope + 1) + kHeads * (a.rank + a.rope)) * 4;
  if (const char* e = launch_step(query_kernel, heads, 256, 0, stream, a)) return e;
  const dim3 pieces(kStepSplits, unsigned(a.rows), unsigned((a.heads + kHeads - 1) / kHeads));
  const char* e = a.rank <= 128 ? launch_step(attend_kernel<4>, pieces, kHeads * 32, bytes, stream, a) : launch_step(attend_kernel<16>, pieces, kHeads * 32, bytes, stream, a);
  if (e) return e;
  return launch_step(value_kernel, heads, 256, 0, stream, a);
}

}  // namespace k3::cuda

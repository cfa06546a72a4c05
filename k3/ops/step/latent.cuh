#pragma once
// Latent attention in a decode step, within a kernel of 256 threads:
// 1 a block a head of a row: W_UK^T q
// 2 a block a piece of the context and eight heads, a warp two heads and every second token: lanes take columns; the last piece's first block appends
//   the token to the cache
// 3 a block 16 values of a head of a row: pieces joined in order, W_UV, gate.
// What a step does not make (weights, tokens before) is read before the kernels in front have given their part. Bound: latency for short contexts,
// reading the cache once for eight heads for long ones.
#include "k3/ops/step/latent_cuda.h"
#include "k3/ops/step/step.cuh"

namespace k3::cuda {
namespace {

constexpr int kBlock = 128, kTokens = 32, kHeads = 8, kValues = 16, kGroup = 8;

template <bool kStamped>
__device__ __forceinline__ void query_head(const StepLatentArgs& a, int h, int row, Stamp stamp) {  // 1
  __shared__ float q[256];
  __shared__ __align__(16) float part[kThreads * 8];
  const int width = a.rank + a.rope;
  // A thread takes eight columns of every `groups`-th row of the weights, four rows at a time.
  const int eights = (a.rank + 7) / 8, groups = kThreads / eights, group = int(threadIdx.x) / eights, c = int(threadIdx.x) % eights * 8;
  const bool works = group < groups;
  const nv_bf16* w = static_cast<const nv_bf16*>(a.kv_b) + int64_t(h) * (a.nope + a.value) * a.rank + c;
  uint2 low4[4], high4[4];  // columns c to c+3 and c+4 to c+7: the rank is a multiple of 4
  auto load = [&](int i0) {
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      const int i = i0 + u * groups;
      const bool there = works && i < a.nope;
      low4[u] = there ? *reinterpret_cast<const uint2*>(w + int64_t(i) * a.rank) : make_uint2(0, 0);
      high4[u] = there && c + 4 < a.rank ? *reinterpret_cast<const uint2*>(w + int64_t(i) * a.rank + 4) : make_uint2(0, 0);
    }
  };
  load(group);
  meet<kStamped>();
  const int64_t from = (int64_t(row) * a.heads + h) * (a.nope + a.rope), to = (int64_t(row) * a.heads + h) * width;
  for (int i = threadIdx.x; i < a.nope + a.rope; i += kThreads) {
    const float x = take<kStamped>(a.q, from + i, stamp);
    if (i < a.nope)
      q[i] = x;
    else
      give<kStamped>(a.q_latent, to + a.rank + i - a.nope, x, stamp);
  }
  __syncthreads();
  float sum[8] = {};
  for (int i0 = group; i0 < a.nope; i0 += 4 * groups) {
    if (i0 != group) load(i0);
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      const int i = i0 + u * groups;
      if (i >= a.nope) break;
      const float x = q[i];
      const uint32_t two[4] = {low4[u].x, low4[u].y, high4[u].x, high4[u].y};
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[2 * e] = fmaf(x, low(two[e]), sum[2 * e]), sum[2 * e + 1] = fmaf(x, high(two[e]), sum[2 * e + 1]);
    }
  }
  const int padded = eights * 8;
  if (works) {
    *reinterpret_cast<float4*>(part + group * padded + c) = make_float4(sum[0], sum[1], sum[2], sum[3]);
    *reinterpret_cast<float4*>(part + group * padded + c + 4) = make_float4(sum[4], sum[5], sum[6], sum[7]);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < a.rank; i += kThreads) {
    float x = 0.f;
#pragma unroll 8
    for (int g = 0; g < groups; ++g) x += part[g * padded + i];
    give<kStamped>(a.q_latent, to + i, x, stamp);
  }
}

// Tokens of a piece, by the context alone: 16, or a multiple of 32, so that no tile of 32 crosses the border of a block of the cache.
__device__ __forceinline__ int64_t piece_of(int64_t all) {
  return all <= 16 * kStepSplits ? 16 : (all + 32 * kStepSplits - 1) / (32 * kStepSplits) * 32;
}

template <int J, bool kStamped>  // up to 32 J columns of a row of the cache
__device__ __forceinline__ void attend_piece(const StepLatentArgs& a, int piece, int row, int group, Stamp stamp, float* shared) {  // 2
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, pair = warp & 3, half = warp >> 2;
  const int width = a.rank + a.rope, slot = a.step.slots[row], h0 = group * kHeads + pair * 2;
  float *rows = shared, *other = rows + kTokens * width;  // (kTokens, width); (4 pairs, 2, 32 J + 2), of the second half of the warps
  const int64_t last = a.step.tokens[row], all = last + 1, each = piece_of(all), begin = piece * each, end = min(all, begin + each);
  if (slot < 0 || begin >= end) return;  // who joins pieces knows how many there are
  auto fill = [&](int64_t first) {       // but the newest token
    const float* block = a.table[slot * a.table_blocks + first / kBlock] + first % kBlock * width;
    const int quarters = width / 4, n = int(min(int64_t(kTokens), min(end, last) - first)) * quarters;
    for (int i = threadIdx.x; i < n; i += kThreads) copy16(shared_address(rows + i * 4), block + i * 4);
    copy_commit();
  };
  fill(begin);
  float gain[J];
#pragma unroll
  for (int j = 0; j < J; ++j) gain[j] = warp == 7 && end == all && lane + 32 * j < a.rank ? a.gain[lane + 32 * j] : 0.f;
  meet<kStamped>();
  if (end == all && warp == 7) {  // the newest token: normed, into its place here and in the cache
    float* to = rows + (last - begin) % kTokens * width;
    const bool keeps = group == 0, here = last - begin < kTokens;
    float* cached = a.table[slot * a.table_blocks + last / kBlock] + last % kBlock * width;
    float x[J], square = 0.f;
#pragma unroll
    for (int j = 0; j < J; ++j) {
      const int c = lane + 32 * j;
      x[j] = c < width ? take<kStamped>(a.kv, int64_t(row) * width + c, stamp) : 0.f;
      if (c < a.rank) square = fmaf(x[j], x[j], square);
    }
    __syncwarp();
    const float r = rsqrtf(__fdividef(warp_sum(square), float(a.rank)) + a.eps);
#pragma unroll
    for (int j = 0; j < J; ++j)
      if (const int c = lane + 32 * j; c < width) {
        const float y = c < a.rank ? x[j] * r * gain[j] : x[j];
        if (here) to[c] = y;
        if (keeps) cached[c] = y;
        x[j] = y;
      }
    if (!here) {  // a later tile's: kept until it is filled
#pragma unroll
      for (int j = 0; j < J; ++j)
        if (const int c = lane + 32 * j; c < width) other[c] = x[j];
    }
  }
  float q[2 * J];  // of both heads
  take_each<kStamped>(q, stamp, [&](int j) {
    const int h = min(h0 + j / J, a.heads - 1);
    return Element{a.q_latent, (int64_t(row) * a.heads + h) * width + min(lane + 32 * (j % J), width - 1)};
  });
  __syncwarp();
#pragma unroll
  for (int j = 0; j < 2 * J; ++j) q[j] = lane + 32 * (j % J) < width ? q[j] * a.scale : 0.f;
  constexpr int V = J < 6 ? J : 16;                  // up to 512 columns of values
  float o[2][V] = {}, top = -INFINITY, total = 0.f;  // of head (lane / 8) % 2
  for (int64_t first = begin; first < end; first += kTokens) {
    if (first != begin) {
      __syncthreads();
      fill(first);
    }
    copy_wait<0>();
    __syncthreads();
    if (first != begin && last >= first && last < first + kTokens) {
      for (int c = threadIdx.x; c < width; c += kThreads) rows[(last - first) * width + c] = other[c];
      __syncthreads();
    }
    const int n = int(min(int64_t(kTokens), end - first));
    for (int i0 = half; i0 < n; i0 += 2 * kGroup) {  // tokens i0, i0 + 2, ..
      float part[2 * kGroup] = {};
#pragma unroll
      for (int t = 0; t < kGroup; ++t) {
        const float* key = rows + min(i0 + 2 * t, n - 1) * width;
#pragma unroll
        for (int j = 0; j < J; ++j) {
          const float x = lane + 32 * j < width ? key[lane + 32 * j] : 0.f;
          part[t] = fmaf(q[j], x, part[t]), part[kGroup + t] = fmaf(q[J + j], x, part[kGroup + t]);
        }
      }
      float score = warp_sums_complete(part);  // lane l: token l % 8 of head (l / 8) % 2
      if (i0 + 2 * (lane & 7) >= n) score = -INFINITY;
      float higher = score;
#pragma unroll
      for (int d = 4; d > 0; d >>= 1) higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, d));
      higher = fmaxf(top, higher);
      const float keep = __expf(top - higher), p = __expf(score - higher);
      float sum = p;
#pragma unroll
      for (int d = 4; d > 0; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
      top = higher, total = fmaf(total, keep, sum);
      const float keeps[2] = {__shfl_sync(~0u, keep, 0), __shfl_sync(~0u, keep, 8)};
#pragma unroll
      for (int j = 0; j < V; ++j) o[0][j] *= keeps[0], o[1][j] *= keeps[1];
#pragma unroll
      for (int t = 0; t < kGroup; ++t) {
        const float w0 = __shfl_sync(~0u, p, t), w1 = __shfl_sync(~0u, p, 8 + t);
        const float* value = rows + min(i0 + 2 * t, n - 1) * width;
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const float x = lane + 32 * j < width ? value[lane + 32 * j] : 0.f;
          o[0][j] = fmaf(w0, x, o[0][j]), o[1][j] = fmaf(w1, x, o[1][j]);
        }
      }
    }
  }
  // the second half of the warps hand over what they have
  constexpr int kStride = 32 * V + 2;
  __syncthreads();
  if (half == 1) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      float* to = other + (pair * 2 + k) * kStride;
#pragma unroll
      for (int j = 0; j < V; ++j) to[lane + 32 * j] = o[k][j];
      if (lane == 8 * k) to[32 * V] = top, to[32 * V + 1] = total;
    }
  }
  __syncthreads();
  if (half == 0) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (h0 + k >= a.heads) continue;
      const float* from = other + (pair * 2 + k) * kStride;
      const float mine = __shfl_sync(~0u, top, 8 * k), sum = __shfl_sync(~0u, total, 8 * k), theirs = from[32 * V], higher = fmaxf(mine, theirs);
      const float x = __expf(mine - higher), y = __expf(theirs - higher);
      const int64_t out = ((int64_t(row) * a.heads + h0 + k) * kStepSplits + piece) * (a.rank + 2);
      if (lane < 2) give<kStamped>(a.partial, out + a.rank + lane, lane ? fmaf(sum, x, from[32 * V + 1] * y) : higher, stamp);
#pragma unroll
      for (int j = 0; j < V; ++j)
        if (const int c = lane + 32 * j; c < a.rank) give<kStamped>(a.partial, out + c, fmaf(o[k][j], x, from[c] * y), stamp);
    }
  }
}

template <bool kStamped>
__device__ __forceinline__ void values_of_head(const StepLatentArgs& a, int tile, int h, int row, Stamp stamp) {  // 3
  constexpr int kEach = 4, kAtOnce = 8;                                                                           // up to 512 columns
  __shared__ float weights[kStepSplits], o[512];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, v0 = tile * kValues + warp * 2;
  const int slot = a.step.slots[row];
  uint2 w[2][kEach];
#pragma unroll
  for (int k = 0; k < 2; ++k)
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int c = lane * 4 + 128 * j;
      w[k][j] = v0 + k < a.value && c < a.rank ? *reinterpret_cast<const uint2*>(static_cast<const nv_bf16*>(a.kv_b) +
                                                                                 (int64_t(h) * (a.nope + a.value) + a.nope + v0 + k) * a.rank + c)
                                               : make_uint2(0, 0);
    }
  const int64_t at = (int64_t(row) * a.heads + h) * a.value + v0 + lane;  // of lanes 0 and 1
  const bool gives = lane < 2 && v0 + lane < a.value;
  meet<kStamped>();
  if (slot < 0) {
    if (kStamped && gives) give<kStamped>(a.y, at, NAN, stamp);
    return;
  }
  const float gate = gives && a.gate ? take<kStamped>(a.gate, at, stamp) : 0.f;
  __syncwarp();
  const int64_t all = int64_t(a.step.tokens[row]) + 1, each = piece_of(all), stride = a.rank + 2;
  const int pieces = int((all + each - 1) / each);
  const int64_t partial = (int64_t(row) * a.heads + h) * kStepSplits * stride;
  // The columns of this thread are asked for before their weights are known.
  const int c = threadIdx.x;
  float x[kAtOnce];
  auto ask = [&](int s0, int column) {
    take_each<kStamped>(x, stamp, [&](int s) { return Element{a.partial, partial + min(s0 + s, pieces - 1) * stride + min(column, a.rank - 1)}; });
  };
  ask(0, c);
  if (warp == 0) {  // a lane two pieces
    float m[2], l[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int s = lane + 32 * k;
      float two[2] = {-INFINITY, 0.f};
      if (s < pieces) take_each<kStamped>(two, stamp, [&](int e) { return Element{a.partial, partial + s * stride + a.rank + e}; });
      m[k] = two[0], l[k] = two[1];
    }
    __syncwarp();
    const float top = warp_max(fmaxf(m[0], m[1])), e0 = __expf(m[0] - top), e1 = __expf(m[1] - top), r = rcp(warp_sum(fmaf(e0, l[0], e1 * l[1])));
    weights[lane] = e0 * r, weights[lane + 32] = e1 * r;
  }
  __syncthreads();
  for (int column = c; column < a.rank; column += kThreads) {
    float sum = 0.f;
    for (int s0 = 0; s0 < pieces; s0 += kAtOnce) {
      if (s0 > 0 || column != c) ask(s0, column);
#pragma unroll
      for (int s = 0; s < kAtOnce; ++s)
        if (s0 + s < pieces) sum = fmaf(weights[s0 + s], x[s], sum);
    }
    o[column] = sum;
  }
  __syncthreads();
  float sum[2] = {};
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int c4 = lane * 4 + 128 * j;
    if (c4 >= a.rank) break;
    const float4 y = *reinterpret_cast<const float4*>(o + c4);
#pragma unroll
    for (int k = 0; k < 2; ++k)
      sum[k] = fmaf(low(w[k][j].x), y.x, fmaf(high(w[k][j].x), y.y, fmaf(low(w[k][j].y), y.z, fmaf(high(w[k][j].y), y.w, sum[k]))));
  }
  __syncwarp();
  const float y = warp_sums_complete(sum);
  if (gives) give<kStamped>(a.y, at, a.gate ? y * sigmoid(gate) : y, stamp);
}

inline size_t attend_shared(int width) { return size_t(kTokens * width + kHeads * (32 * (width <= 160 ? 5 : 16) + 2)) * 4; }

}  // namespace
}  // namespace k3::cuda

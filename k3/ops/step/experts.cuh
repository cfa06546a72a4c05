#pragma once
// Routed experts in a decode step, within a kernel of 256 threads. Eight warps take every eighth run of columns (32 of bfloat16, 128 of MXFP4); their
// sums are added in order. Every block makes the choice of its row for itself, but that the second
// products are told of choices among many.
#include "k3/core/mxfp4.cuh"
#include "k3/core/order.cuh"
#include "k3/ops/step/experts_cuda.h"
#include "k3/ops/step/step.cuh"

namespace k3::cuda {
namespace {

constexpr int kMostSlots = 64;

// The choice of one row by one warp, of up to 32 experts: a lane an expert. The same rounds as choose() below.
template <bool kStamped>
__device__ void choose_of_few(const StepExpertsArgs& a, int64_t row, Stamp stamp, int* chosen, float* weights) {
  const int lane = threadIdx.x & 31;
  const bool there = lane < a.experts;
  const float bias = there ? a.bias[lane] : 0.f, logit = there ? take<kStamped>(a.logits, row * a.experts + lane, stamp) : -INFINITY;
  __syncwarp();
  const float score = 1.f / (1.f + expf(-logit));
  uint32_t key = there ? choice_key(score + bias) : 0;
  float total = 0.f, mine = 0.f;
  int expert = 0;
  for (int i = 0; i < a.top_k; ++i) {
    const uint32_t top = __reduce_max_sync(~0u, key);
    const int at = __ffs(int(__ballot_sync(~0u, key == top))) - 1;
    const float s = __shfl_sync(~0u, score, at);
    total += s;
    if (lane == i) expert = at, mine = s;
    if (lane == at) key = 0;
  }
  const float r = a.renormalize ? a.scale / (total + 1e-20f) : a.scale;
  if (lane < a.top_k) chosen[lane] = expert, weights[lane] = mine * r;
}

// The choice of one row by one warp: keys and scores (experts) in shared memory; chosen and weights (top_k) there too.
template <bool kStamped>
__device__ void choose(const StepExpertsArgs& a, int64_t row, Stamp stamp, uint32_t* keys, float* scores, int* chosen, float* weights) {
  const int lane = threadIdx.x & 31, E = a.experts;
  for (int j = lane; j < E; j += 32) scores[j] = 1.f / (1.f + expf(-take<kStamped>(a.logits, row * E + j, stamp)));
  __syncwarp();
  for (int j = lane; j < E; j += 32) keys[j] = choice_key(scores[j] + a.bias[j]);
  __syncwarp();
  float total = 0.f;
  for (int i = 0; i < a.top_k; ++i) {
    uint32_t best = 0;
    int at = 0x7fffffff;
    for (int j = lane; j < E; j += 32)
      if (keys[j] > best) best = keys[j], at = j;
    const uint32_t top = __reduce_max_sync(~0u, best);
    at = int(__reduce_min_sync(~0u, best == top ? uint32_t(at) : 0x7fffffffu));
    if (lane == 0) keys[at] = 0, chosen[i] = at, weights[i] = scores[at];
    total += scores[at];
    __syncwarp();
  }
  const float r = a.renormalize ? a.scale / (total + 1e-20f) : a.scale;
  for (int i = lane; i < a.top_k; i += 32) weights[i] *= r;
}

// 16 rows of W, from `row0` on, of the columns of run `run`: on their way, and times x (bfloat16 in shared memory).
struct Run {
  uint4 low = {0, 0, 0, 0}, high = {0, 0, 0, 0};  // rows g and g + 8
  uint32_t low_power = 0, high_power = 0;         // of MXFP4
};
template <bool kCodes>
__device__ __forceinline__ Run load_run(const void* w, const uint8_t* scales, int row0, int out, int in, int run) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, k = kCodes ? run * 128 + t * 32 : run * 32 + t * 8, row = row0 + g;
  const int64_t width = kCodes ? in / 2 : 2 * in;  // bytes
  Run r;
  if (k >= in) return r;
  const char* from = static_cast<const char*>(w) + row * width + (kCodes ? k / 2 : 2 * k);
  if (row < out) r.low = stream16(from);
  if (row + 8 < out) r.high = stream16(from + 8 * width);
  if constexpr (kCodes) {
    const uint8_t* scale = scales + int64_t(row) * (in / 32) + k / 32;
    if (row < out) r.low_power = mxfp4_power(*scale);
    if (row + 8 < out) r.high_power = mxfp4_power(scale[8 * int64_t(in / 32)]);
  }
  return r;
}
template <bool kCodes>
__device__ __forceinline__ void multiply_run(float (&sum)[4], const Run& r, int in, int run, const nv_bf16* x) {
  const int lane = threadIdx.x & 31, t = lane & 3, k = kCodes ? run * 128 + t * 32 : run * 32 + t * 8;
  const bool reads = lane < 4 && k < in;
  if constexpr (kCodes) {
    const uint32_t lows[4] = {r.low.x, r.low.y, r.low.z, r.low.w}, highs[4] = {r.high.x, r.high.y, r.high.z, r.high.w};
#pragma unroll
    for (int s = 0; s < 4; ++s)
      multiply(sum, Eight{mxfp4_eight(lows[s], r.low_power), mxfp4_eight(highs[s], r.high_power)},
               reads ? *reinterpret_cast<const uint4*>(x + k + s * 8) : make_uint4(0, 0, 0, 0));
  } else {
    multiply(sum, Eight{r.low, r.high}, reads ? *reinterpret_cast<const uint4*>(x + k) : make_uint4(0, 0, 0, 0));
  }
}
template <bool kCodes>
constexpr int kRun = kCodes ? 128 : 32;

// This lane's share of the first column of a product's tile into sums[warp].
__device__ __forceinline__ void keep_column(const float (&sum)[4], float* to) {
  const int lane = threadIdx.x & 31;
  if ((lane & 3) == 0) to[lane >> 2] = sum[0], to[(lane >> 2) + 8] = sum[2];
}

// What a block knows of a row's choice.
struct Choice {
  float weights[kMostSlots];
  int chosen[kMostSlots];
  const void* values[3][32];  // addresses of few experts' matrices, for they never change
  const uint8_t* scales[3][32];
};
template <bool kCodes>
__device__ __forceinline__ void know_few(const StepExpertsArgs& a, Choice& c) {
  const int which = threadIdx.x >> 5, lane = threadIdx.x & 31;
  if (a.experts > 32 || which > 2 || lane >= a.experts) return;
  const StepExpertMatrix& w = which == 0 ? a.w1 : which == 1 ? a.w3 : a.w2;
  c.values[which][lane] = w.values[lane];
  if (kCodes) c.scales[which][lane] = w.scales[lane];
}
template <bool kCodes>
__device__ __forceinline__ void matrix_of(const StepExpertsArgs& a, const Choice& c, int which, int e, const void*& values, const uint8_t*& scales) {
  const StepExpertMatrix& w = which == 0 ? a.w1 : which == 1 ? a.w3 : a.w2;
  values = a.experts <= 32 ? c.values[which][e] : w.values[e];
  scales = !kCodes ? nullptr : a.experts <= 32 ? c.scales[which][e] : w.scales[e];
}
// 1: neurons from `row0` on of one (row, slot). `shared` has first_shared() bytes.
template <bool kCodes, bool kStamped>
__device__ __forceinline__ void first_products(const StepExpertsArgs& a, int row0, int64_t pair, Stamp stamp, unsigned char* shared) {
  __shared__ float sums[2][kWarps][kTile];
  __shared__ Choice choice;
  nv_bf16* z = reinterpret_cast<nv_bf16*>(shared);  // (latent)
  uint32_t* room = reinterpret_cast<uint32_t*>(z + (a.latent + 7) / 8 * 8);
  const int64_t row = pair / a.top_k;
  const int slot = int(pair % a.top_k), warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  know_few<kCodes>(a, choice);
  constexpr int kEach = 4;  // up to 512 columns of the latent stay in registers, and their gain
  float4 gain[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (const int c = lane * 4 + 128 * i; warp == 1 && a.z.gain && c < a.latent) gain[i] = load4(a.z.gain + c);
  if (kStamped && a.experts <= 16 && row0 + kTile <= a.inner) {  // the tile of all that may be chosen on its way from memory
    __syncthreads();
    const int bytes = kTile * (kCodes ? a.latent / 2 : a.latent * 2), lines = bytes / 128;
    for (int i = threadIdx.x; i < 2 * a.experts * lines; i += kThreads)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(choice.values[i / lines & 1][i / lines >> 1]) +
                                                    int64_t(row0 / kTile) * bytes + i % lines * 128));
  }
  meet<kStamped>();
  if (a.step.slots[row] < 0) {
    if (kStamped && threadIdx.x < kTile && row0 + threadIdx.x < a.inner) give<kStamped>(a.h, pair * a.inner + row0 + threadIdx.x, NAN, stamp);
    return;
  }
  if (warp == 0) {
    if (kStamped || a.experts <= 32)
      choose_of_few<kStamped>(a, row, stamp, choice.chosen, choice.weights);  // stamped: never more
    else
      choose<kStamped>(a, row, stamp, room, reinterpret_cast<float*>(room + a.experts), choice.chosen, choice.weights);
  } else if (warp == 1) {  // the latent row, normed or not
    const int64_t at = row * a.z.stride;
    float4 x[kEach];
    auto take_from = [&](int c0) {
      take4_each<kStamped>(x, (a.latent - c0 - lane * 4 + 127) / 128, stamp, at + c0 + lane * 4,
                           [&](int i) { return a.z.v[0] + (kStamped ? 256 : 128) * i; });
    };
    float r = 1.f;
    if (a.z.gain) {
      float square = 0.f;
      for (int c0 = 0; c0 < a.latent; c0 += 128 * kEach) {
        take_from(c0);
#pragma unroll
        for (int i = 0; i < kEach; ++i) square = dot4(x[i], x[i], square);
      }
      __syncwarp();
      r = rsqrtf(__fdividef(warp_sum(square), float(a.latent)) + a.z.eps);
    }
    for (int c0 = 0; c0 < a.latent; c0 += 128 * kEach) {
      if (!a.z.gain || a.latent > 128 * kEach) take_from(c0);
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int c = c0 + lane * 4 + 128 * i;
        if (c >= a.latent) continue;
        const float4 y = a.z.gain ? times4(times4(r, x[i]), c0 == 0 ? gain[i] : load4(a.z.gain + c)) : x[i];
        *reinterpret_cast<uint2*>(z + c) = make_uint2(pack(y.x, y.y), pack(y.z, y.w));
      }
    }
  }
  __syncthreads();
  const int e = choice.chosen[slot];
  float gate[4] = {}, up[4] = {};
  const void *gate_values, *up_values, *second;
  const uint8_t *gate_scales, *up_scales, *no;
  matrix_of<kCodes>(a, choice, 0, e, gate_values, gate_scales), matrix_of<kCodes>(a, choice, 1, e, up_values, up_scales);
  matrix_of<kCodes>(a, choice, 2, e, second, no);
#pragma unroll 2
  for (int run = warp; run * kRun<kCodes> < a.latent; run += kWarps) {
    const Run g = load_run<kCodes>(gate_values, gate_scales, row0, a.inner, a.latent, run),
              u = load_run<kCodes>(up_values, up_scales, row0, a.inner, a.latent, run);
    multiply_run<kCodes>(gate, g, a.latent, run, z), multiply_run<kCodes>(up, u, a.latent, run, z);
  }
  keep_column(gate, sums[0][warp]), keep_column(up, sums[1][warp]);
  __syncthreads();
  if (threadIdx.x < kTile && row0 + threadIdx.x < a.inner) {
    float x = 0.f, y = 0.f;
    for (int w = 0; w < kWarps; ++w) x += sums[0][w][threadIdx.x], y += sums[1][w][threadIdx.x];
    give<kStamped>(a.h, pair * a.inner + row0 + threadIdx.x, choice.weights[slot] * gated_unit(a.activation, x, y), stamp);
  }
  if (!kStamped && row0 == 0 && threadIdx.x == 0) a.chosen[pair] = float(e);
  // this tile's share of the second matrix on its way from memory
  const int64_t bytes = kCodes ? int64_t(a.latent) * a.inner / 2 : int64_t(a.latent) * a.inner * 2, share = bytes * kTile / a.inner + 127;
  for (int64_t i = bytes * row0 / a.inner + threadIdx.x * 128; i < min(bytes, bytes * row0 / a.inner + share); i += kThreads * 128)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(second) + i));
}

// 2: outputs from `row0` on of a row, all slots. `shared` has second_shared() bytes.
template <bool kCodes, bool kStamped>
__device__ __forceinline__ void second_products(const StepExpertsArgs& a, int row0, int64_t row, Stamp stamp, unsigned char* shared) {
  __shared__ float sums[kWarps][kTile];
  __shared__ Choice choice;
  const int warp = threadIdx.x >> 5, all = a.top_k * a.inner, runs = (a.inner + kRun<kCodes> - 1) / kRun<kCodes>;
  nv_bf16* h = reinterpret_cast<nv_bf16*>(shared);  // (top_k, inner)
  know_few<kCodes>(a, choice);
  meet<kStamped>();
  const bool mine = threadIdx.x < kTile && row0 + threadIdx.x < a.latent;
  if (a.step.slots[row] < 0) {
    if (kStamped && mine) give<kStamped>(a.u, row * a.latent + row0 + threadIdx.x, NAN, stamp);
    return;
  }
  if (!kStamped && a.experts > 32) {  // many are chosen once
    for (int j = threadIdx.x; j < a.top_k; j += kThreads) choice.chosen[j] = int(a.chosen[row * a.top_k + j]);
  } else if (warp == 0) {
    choose_of_few<kStamped>(a, row, stamp, choice.chosen, choice.weights);
  }
  __syncthreads();
  auto load = [&](int i) {
    const int j = i / runs;
    const void* values;
    const uint8_t* scales;
    matrix_of<kCodes>(a, choice, 2, choice.chosen[j], values, scales);
    return load_run<kCodes>(values, scales, row0, a.latent, a.inner, i - j * runs);
  };
  auto multiply = [&](float(&sum)[4], const Run& r, int i) { multiply_run<kCodes>(sum, r, a.inner, i % runs, h + i / runs * a.inner); };
  constexpr int kEarly = 2;  // on their way before h is there
  const int many = a.top_k * runs;
  Run early[kEarly];
#pragma unroll
  for (int u = 0; u < kEarly; ++u)
    if (warp + kWarps * u < many) early[u] = load(warp + kWarps * u);
  for (int c = threadIdx.x * 4; c < all; c += kThreads * 4) {
    const float4 x = take4<kStamped>(a.h, row * all + c, stamp);
    *reinterpret_cast<uint2*>(h + c) = make_uint2(pack(x.x, x.y), pack(x.z, x.w));
  }
  __syncthreads();
  float sum[4] = {};
#pragma unroll
  for (int u = 0; u < kEarly; ++u)
    if (warp + kWarps * u < many) multiply(sum, early[u], warp + kWarps * u);
#pragma unroll 2
  for (int i = warp + kWarps * kEarly; i < many; i += kWarps) multiply(sum, load(i), i);
  keep_column(sum, sums[warp]);
  __syncthreads();
  if (mine) {
    float x = 0.f;
    for (int w = 0; w < kWarps; ++w) x += sums[w][threadIdx.x];
    give<kStamped>(a.u, row * a.latent + row0 + threadIdx.x, x, stamp);
  }
}

inline size_t first_shared(const StepExpertsArgs& a) { return size_t((a.latent + 7) / 8 * 8) * 2 + size_t(a.experts) * 8; }
inline size_t second_shared(const StepExpertsArgs& a) { return size_t(a.top_k) * size_t(a.inner) * 2; }

}  // namespace
}  // namespace k3::cuda

// Split: first launch: a block is 16 neurons of one (row, slot), and makes the row's choice for itself; second: 16 outputs of a row, all slots. Eight
// warps take every eighth run of columns (32 of bfloat16, 128 of MXFP4); their sums are added in order.
#include "k3/core/mxfp4.cuh"
#include "k3/core/order.cuh"
#include "k3/ops/step/experts_cuda.h"
#include "k3/ops/step/step.cuh"

namespace k3::cuda {
namespace {

constexpr int kThreads = 256, kWarps = 8, kTile = 16, kMostSlots = 64;

// The choice of one row by one warp, of up to 32 experts: a lane an expert. The same rounds as choose() below.
__device__ void choose_of_few(const StepExpertsArgs& a, int64_t row, int* chosen, float* weights) {
  const int lane = threadIdx.x & 31;
  const bool there = lane < a.experts;
  const float logit = there ? a.logits[row * a.experts + lane] : -INFINITY, bias = there ? a.bias[lane] : 0.f;
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
__device__ void choose(const StepExpertsArgs& a, int64_t row, uint32_t* keys, float* scores, int* chosen, float* weights) {
  const int lane = threadIdx.x & 31, E = a.experts;
  const float* logits = a.logits + row * E;
  for (int j = lane; j < E; j += 32) scores[j] = 1.f / (1.f + expf(-logits[j]));
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

// sum += 16 rows of W, from `row0` on, times x (bfloat16 in shared memory) over the columns of run `run`
template <bool kCodes>
__device__ __forceinline__ void run_of(float (&sum)[4], const void* w, const uint8_t* scales, int row0, int out, int in, int run, const nv_bf16* x) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  if constexpr (kCodes) {
    const int k = run * 128 + t * 32;
    uint4 low = make_uint4(0, 0, 0, 0), high = low;
    uint32_t low_power = 0, high_power = 0;
    if (k < in) {
      const uint8_t* from = static_cast<const uint8_t*>(w) + int64_t(row0 + g) * (in / 2) + k / 2;
      const uint8_t* scale = scales + int64_t(row0 + g) * (in / 32) + k / 32;
      if (row0 + g < out) low = stream16(from), low_power = mxfp4_power(*scale);
      if (row0 + g + 8 < out) high = stream16(from + 8 * int64_t(in / 2)), high_power = mxfp4_power(scale[8 * int64_t(in / 32)]);
    }
    const uint32_t lows[4] = {low.x, low.y, low.z, low.w}, highs[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      const Eight w8{mxfp4_eight(lows[s], low_power), mxfp4_eight(highs[s], high_power)};
      multiply(sum, w8, g == 0 && k < in ? *reinterpret_cast<const uint4*>(x + k + s * 8) : make_uint4(0, 0, 0, 0));
    }
  } else {
    const int k = run * 32 + t * 8;
    Eight w8 = no_weights();
    if (k < in) {
      const nv_bf16* from = static_cast<const nv_bf16*>(w) + int64_t(row0 + g) * in + k;
      if (row0 + g < out) w8.low = stream16(from);
      if (row0 + g + 8 < out) w8.high = stream16(from + 8 * int64_t(in));
    }
    multiply(sum, w8, g == 0 && k < in ? *reinterpret_cast<const uint4*>(x + k) : make_uint4(0, 0, 0, 0));
  }
}
template <bool kCodes>
constexpr int kRun = kCodes ? 128 : 32;

// This lane's share of the first column of a product's tile into sums[warp].
__device__ __forceinline__ void keep_column(const float (&sum)[4], float* to) {
  const int lane = threadIdx.x & 31;
  if ((lane & 3) == 0) to[lane >> 2] = sum[0], to[(lane >> 2) + 8] = sum[2];
}

template <bool kCodes>
__global__ void __launch_bounds__(kThreads) first_kernel(const __grid_constant__ StepExpertsArgs a) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ float sums[2][kWarps][kTile], weights[kMostSlots];
  __shared__ int chosen[kMostSlots];
  nv_bf16* z = reinterpret_cast<nv_bf16*>(shared);  // (latent)
  uint32_t* keys = reinterpret_cast<uint32_t*>(z + (a.latent + 7) / 8 * 8);
  float* scores = reinterpret_cast<float*>(keys + a.experts);
  const int64_t pair = blockIdx.y, row = pair / a.top_k;
  const int slot = int(pair % a.top_k), row0 = blockIdx.x * kTile, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  let_next_kernel_begin();
  // addresses of few experts' matrices, for they never change
  __shared__ const void* values[2][32];
  __shared__ const uint8_t* scales_of[2][32];
  const bool few = a.experts <= 32;
  if (few && threadIdx.x < 64 && int(threadIdx.x & 31) < a.experts) {
    const StepExpertMatrix& w = threadIdx.x < 32 ? a.w1 : a.w3;
    values[threadIdx.x >> 5][threadIdx.x & 31] = w.values[threadIdx.x & 31];
    if (kCodes) scales_of[threadIdx.x >> 5][threadIdx.x & 31] = w.scales[threadIdx.x & 31];
  }
  wait_for_kernel_in_front();
  if (a.step.slots[row] < 0) {
    if (threadIdx.x == 0) a.chosen[pair] = -1;
    return;
  }
  if (warp == 0) {
    if (a.experts <= 32) choose_of_few(a, row, chosen, weights);
    else choose(a, row, keys, scores, chosen, weights);
  } else if (warp == 1) {  // the latent row, normed or not
    const float* v = a.z.v[0] + row * a.z.stride;
    float r = 1.f;
    if (a.z.gain) {
      float square = 0.f;
      for (int c = lane; c < a.latent; c += 32) square = fmaf(v[c], v[c], square);
      r = 1.f / sqrtf(warp_sum(square) / float(a.latent) + a.z.eps);
    }
    for (int c = lane * 4; c < a.latent; c += 128) {
      float4 x = *reinterpret_cast<const float4*>(v + c);
      if (a.z.gain) x = make_float4(x.x * r * a.z.gain[c], x.y * r * a.z.gain[c + 1], x.z * r * a.z.gain[c + 2], x.w * r * a.z.gain[c + 3]);
      *reinterpret_cast<uint2*>(z + c) = make_uint2(pack(x.x, x.y), pack(x.z, x.w));
    }
  }
  __syncthreads();
  const int e = chosen[slot];
  float gate[4] = {}, up[4] = {};
  const uint8_t *gate_scales = !kCodes ? nullptr : few ? scales_of[0][e] : a.w1.scales[e];
  const uint8_t* up_scales = !kCodes ? nullptr : few ? scales_of[1][e] : a.w3.scales[e];
  const void *gate_values = few ? values[0][e] : a.w1.values[e], *up_values = few ? values[1][e] : a.w3.values[e];
#pragma unroll 4
  for (int run = warp; run * kRun<kCodes> < a.latent; run += kWarps) {
    run_of<kCodes>(gate, gate_values, gate_scales, row0, a.inner, a.latent, run, z);
    run_of<kCodes>(up, up_values, up_scales, row0, a.inner, a.latent, run, z);
  }
  keep_column(gate, sums[0][warp]), keep_column(up, sums[1][warp]);
  __syncthreads();
  if (threadIdx.x < kTile && row0 + threadIdx.x < a.inner) {
    float x = 0.f, y = 0.f;
    for (int w = 0; w < kWarps; ++w) x += sums[0][w][threadIdx.x], y += sums[1][w][threadIdx.x];
    a.h[pair * a.inner + row0 + threadIdx.x] = weights[slot] * glu_value(a.activation, x, y);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) a.chosen[pair] = e;
  // this block's share of the second matrix on its way from memory
  const int64_t bytes = kCodes ? int64_t(a.latent) * a.inner / 2 : int64_t(a.latent) * a.inner * 2, share = (bytes + gridDim.x - 1) / gridDim.x;
  const char* second = static_cast<const char*>(a.w2.values[e]);
  for (int64_t i = blockIdx.x * share + threadIdx.x * 128; i < min(bytes, (blockIdx.x + 1) * share); i += kThreads * 128)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(second + i));
}

template <bool kCodes>
__global__ void __launch_bounds__(kThreads) second_kernel(const __grid_constant__ StepExpertsArgs a) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ float sums[kWarps][kTile];
  nv_bf16* h = reinterpret_cast<nv_bf16*>(shared);  // (top_k, inner)
  const int64_t row = blockIdx.y;
  const int row0 = blockIdx.x * kTile, warp = threadIdx.x >> 5, all = a.top_k * a.inner, runs = (a.inner + kRun<kCodes> - 1) / kRun<kCodes>;
  let_next_kernel_begin();
  wait_for_kernel_in_front();
  if (a.step.slots[row] < 0) return;
  const int32_t* chosen = a.chosen + row * a.top_k;
  for (int c = threadIdx.x * 4; c < all; c += kThreads * 4) {
    const float4 x = *reinterpret_cast<const float4*>(a.h + row * all + c);
    *reinterpret_cast<uint2*>(h + c) = make_uint2(pack(x.x, x.y), pack(x.z, x.w));
  }
  __syncthreads();
  float sum[4] = {};
#pragma unroll 4
  for (int i = warp; i < a.top_k * runs; i += kWarps) {
    const int j = i / runs, e = chosen[j];
    run_of<kCodes>(sum, a.w2.values[e], kCodes ? a.w2.scales[e] : nullptr, row0, a.latent, a.inner, i % runs, h + j * a.inner);
  }
  keep_column(sum, sums[warp]);
  __syncthreads();
  if (threadIdx.x < kTile && row0 + threadIdx.x < a.latent) {
    float x = 0.f;
    for (int w = 0; w < kWarps; ++w) x += sums[w][threadIdx.x];
    a.u[row * a.latent + row0 + threadIdx.x] = x;
  }
}

template <bool kCodes>
const char* both(const StepExpertsArgs& a, void* stream) {
  auto tiles = [](int n) { return unsigned((n + kTile - 1) / kTile); };
  const size_t first = size_t((a.latent + 7) / 8 * 8) * 2 + size_t(a.experts) * 8, second = size_t(a.top_k) * size_t(a.inner) * 2;
  if (const char* e = launch_step(first_kernel<kCodes>, dim3(tiles(a.inner), unsigned(a.rows * a.top_k)), kThreads, first, stream, a)) return e;
  return launch_step(second_kernel<kCodes>, dim3(tiles(a.latent), unsigned(a.rows)), kThreads, second, stream, a);
}

}  // namespace

const char* step_experts(const StepExpertsArgs& a, void* stream) {
  if (a.rows == 0) return nullptr;
  const bool codes = a.w1.scales != nullptr;
  if (a.top_k > kMostSlots || a.experts > 12000 || a.rows * a.top_k > 65535) return "[step] up to 64 of 12000 experts for a row, and 65535 pairs";
  if (a.latent % (codes ? 32 : 8) || a.inner % (codes ? 32 : 8)) return "[step] experts' widths must be multiples of 8, of 32 with MXFP4";
  return codes ? both<true>(a, stream) : both<false>(a, stream);
}

}  // namespace k3::cuda

// Split: routing: a warp a row, its choices in shared memory, k + 1 rounds of a maximum over (monotone bits of the value, lowest expert). Order: a
// warp takes 256 pairs in order and counts them by expert; running sums over warps and experts; the same walk again places each pair, so the order is
// stable. Moves: a warp a row, bound by bytes. Products: products_cuda.h, from a list that one block makes of the offsets.
#include "k3/core/order.cuh"
#include "k3/core/enqueue.cuh"
#include "k3/core/tile.cuh"
#include "k3/ops/moe/moe_float_cuda.h"

namespace k3::cuda {
namespace {

using cpu::DispatchArgs;
using cpu::PairArgs;
using cpu::RouteArgs;

const char* result() {
  cudaError_t e = cudaGetLastError();
  return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}

// The best of n keys, of equals the first; the warp agrees. Its key becomes 0, which is nothing.
__device__ __forceinline__ int take_best(uint32_t* keys, int n, uint32_t& top) {
  const int lane = threadIdx.x & 31;
  uint32_t best = 0;
  int at = 0x7fffffff;
  for (int i = lane; i < n; i += 32)
    if (keys[i] > best) best = keys[i], at = i;
  top = __reduce_max_sync(~0u, best);
  at = int(__reduce_min_sync(~0u, best == top ? uint32_t(at) : 0x7fffffffu));
  if (top && lane == 0) keys[at] = 0;
  __syncwarp();
  return at;
}

__global__ void __launch_bounds__(32) route_kernel(const RouteArgs a) {
  follow();
  extern __shared__ uint32_t keys[];  // (experts), (groups)
  const int64_t row = blockIdx.x;
  const int lane = threadIdx.x, E = int(a.experts), K = int(a.top_k);
  float *s = a.scores + row * E, *w = a.weights + row * K;
  int32_t* chosen = a.chosen + row * K;
  if (a.padding && a.padding[row]) {
    for (int j = lane; j < E; j += 32) s[j] = 0.f;
    for (int i = lane; i < K; i += 32) chosen[i] = -1, w[i] = 0.f;
    if (lane == 0) a.cutoff[row] = 0.f, a.margin[row] = INFINITY;
    return;
  }
  const float* logits = a.logits + row * E;
  if (a.softmax) {
    float top = -INFINITY, total = 0.f;
    for (int j = lane; j < E; j += 32) top = fmaxf(top, logits[j]);
    top = warp_max(top);
    for (int j = lane; j < E; j += 32) total += s[j] = expf(logits[j] - top);
    const float r = 1.f / warp_sum(total);
    for (int j = lane; j < E; j += 32) s[j] *= r;
  } else {
    for (int j = lane; j < E; j += 32) s[j] = 1.f / (1.f + expf(-logits[j]));
  }
  for (int j = lane; j < E; j += 32) keys[j] = choice_key(s[j] + a.bias[j]);
  __syncwarp();
  if (a.top_groups < a.groups) {
    const int size = int(a.experts / a.groups), G = int(a.groups);
    uint32_t* groups = keys + E;
    for (int g = lane; g < G; g += 32) {
      float first = -INFINITY, second = first;
      for (int j = g * size; j < (g + 1) * size; ++j) {
        const float v = s[j] + a.bias[j];
        if (v > first) second = first, first = v;
        else if (v > second) second = v;
      }
      groups[g] = choice_key(size > 1 ? first + second : first);
    }
    __syncwarp();
    uint32_t top;
    for (int i = 0; i < a.top_groups; ++i) take_best(groups, G, top);  // a group taken has key 0
    for (int j = lane; j < E; j += 32)
      if (groups[j / size]) keys[j] = 0;
    __syncwarp();
  }
  float total = 0.f, last = 0.f, cutoff = -INFINITY;
  for (int i = 0; i <= K; ++i) {
    uint32_t top;
    const int e = take_best(keys, E, top);
    if (i == K) {
      if (top) cutoff = value_of(top);
      break;
    }
    last = value_of(top);
    const int32_t c = a.forced ? a.forced[row * K + i] : e;
    const float v = s[c];
    total += v;
    if (lane == 0) chosen[i] = c, w[i] = v;
  }
  __syncwarp();
  const float r = a.renormalize ? a.scale / (total + 1e-20f) : a.scale;
  for (int i = lane; i < K; i += 32) w[i] *= r;
  if (lane == 0) a.cutoff[row] = cutoff, a.margin[row] = last - cutoff;
}

__global__ void __launch_bounds__(32) route_backward_kernel(const RouteArgs a) {
  follow();
  const int64_t row = blockIdx.x;
  if (a.padding && a.padding[row]) return;
  const int lane = threadIdx.x, K = int(a.top_k);
  const float *s = a.scores + row * a.experts, *dw = a.dweights + row * K;
  const int32_t* chosen = a.chosen + row * K;
  float* dlogits = a.dlogits + row * a.experts;
  float total = 0.f, inner = 0.f, r = a.scale;  // ds_j = r (dw_j - inner)
  if (a.renormalize) {
    for (int i = lane; i < K; i += 32) total += s[chosen[i]], inner += dw[i] * s[chosen[i]];
    total = warp_sum(total) + 1e-20f, inner = warp_sum(inner) / total, r = a.scale / total;
  }
  float across = 0.f;  // softmax: sum of ds s over all experts
  if (a.softmax) {
    for (int i = lane; i < K; i += 32) across += r * (dw[i] - inner) * s[chosen[i]];
    across = warp_sum(across);
    for (int64_t j = lane; j < a.experts; j += 32) dlogits[j] -= across * s[j];
    __syncwarp();
  }
  for (int i = lane; i < K; i += 32) {
    const float v = s[chosen[i]], ds = r * (dw[i] - inner);
    dlogits[chosen[i]] += a.softmax ? ds * v : ds * v * (1.f - v);
  }
}

// counts (groups of 256 pairs, experts): first how many, then where the group's first row of an expert lies
template <bool kPlace>
__global__ void __launch_bounds__(32) pairs_kernel(const DispatchOrderArgs a) {
  follow();
  extern __shared__ int next[];
  int* counts = a.counts + int64_t(blockIdx.x) * a.experts;
  const int lane = threadIdx.x;
  for (int e = lane; e < a.experts; e += 32) next[e] = kPlace ? counts[e] + int(a.offsets[e]) : 0;
  __syncwarp();
  for (int64_t i0 = int64_t(blockIdx.x) * kDispatchGroup, end = i0 + kDispatchGroup; i0 < end && i0 < a.pairs; i0 += 32) {
    const int64_t i = i0 + lane;
    const int chosen = i < a.pairs ? a.chosen[i] : -1;
    const uint32_t same = __match_any_sync(~0u, chosen);
    const int rank = __popc(same & ((1u << lane) - 1));
    if (kPlace && i < a.pairs) {
      const int row = chosen >= 0 ? next[chosen] + rank : -1;
      a.row_of_pair[i] = row;
      if (row >= 0) a.pair_of_row[row] = int(i);
    }
    __syncwarp();
    if (chosen >= 0 && rank == 0) next[chosen] += __popc(same);
    __syncwarp();
  }
  if (!kPlace)
    for (int e = lane; e < a.experts; e += 32) counts[e] = next[e];
}

__device__ __forceinline__ int running_sum(int x) {  // of the lanes up to this one
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const int y = __shfl_up_sync(~0u, x, d);
    if (lane >= d) x += y;
  }
  return x;
}

__global__ void __launch_bounds__(128) groups_kernel(const DispatchOrderArgs a, int64_t groups) {  // a warp an expert: over its groups
  follow();
  const int64_t e = int64_t(blockIdx.x) * 4 + (threadIdx.x >> 5);
  if (e >= a.experts) return;
  int before = 0;
  for (int64_t g0 = 0; g0 < groups; g0 += 32) {
    const int64_t g = g0 + (threadIdx.x & 31);
    const int n = g < groups ? a.counts[g * a.experts + e] : 0, x = running_sum(n);
    if (g < groups) a.counts[g * a.experts + e] = before + x - n;
    before += __shfl_sync(~0u, x, 31);
  }
  if ((threadIdx.x & 31) == 0) a.offsets[e + 1] = before;
}

__global__ void __launch_bounds__(32) offsets_kernel(int64_t* offsets, int64_t experts) {  // offsets[1..] from counts to ends
  follow();
  int before = 0;
  if (threadIdx.x == 0) offsets[0] = 0;
  for (int64_t e0 = 0; e0 < experts; e0 += 32) {
    const int64_t e = e0 + threadIdx.x;
    const int x = running_sum(e < experts ? int(offsets[e + 1]) : 0);
    if (e < experts) offsets[e + 1] = before + x;
    before += __shfl_sync(~0u, x, 31);
  }
}

__global__ void __launch_bounds__(256) gather_kernel(const DispatchArgs a, const int64_t* rows) {
  follow();
  const int64_t r = int64_t(blockIdx.x) * 8 + (threadIdx.x >> 5);
  if (r >= *rows) return;
  const float* from = a.from + a.pair_of_row[r] / a.slots * a.d;
  for (int64_t c = threadIdx.x & 31; c < a.d; c += 32) a.to[r * a.d + c] = from[c];
}

template <bool kAdd, int kEach>  // channels a thread
__global__ void __launch_bounds__(128) combine_kernel(const DispatchArgs a) {
  follow();
  const int64_t t = blockIdx.x, c = (int64_t(blockIdx.y) * 128 + threadIdx.x) * kEach;
  if (c >= a.d) return;
  float u[kEach] = {};
  for (int64_t k = 0; k < a.slots; ++k) {
    const int row = a.row_of_pair[t * a.slots + k];
    if (row < 0) continue;
    const float weight = a.weights ? a.weights[t * a.slots + k] : 1.f;
    float x[kEach];
    if constexpr (kEach == 8) load8(a.from + row * a.d + c, x);
    else x[0] = a.from[row * a.d + c];
#pragma unroll
    for (int i = 0; i < kEach; ++i) u[i] = __fmaf_rn(weight, x[i], u[i]);
  }
  float* to = a.to + t * a.d + c;
  if constexpr (kEach == 8) {
    float old[8] = {};
    if (kAdd) load8(to, old);
#pragma unroll
    for (int i = 0; i < 8; ++i) u[i] = kAdd ? old[i] + u[i] : u[i];
    store8(to, u);
  } else {
    *to = kAdd ? *to + u[0] : u[0];
  }
}

__global__ void __launch_bounds__(256) weigh_kernel(const PairArgs a, const int64_t* rows) {
  follow();
  const int64_t r = int64_t(blockIdx.x) * 8 + (threadIdx.x >> 5);
  if (r >= *rows) return;
  const int pair = a.pair_of_row[r];
  const float p = a.weights[pair];
  float dot = 0.f;
  for (int64_t c = threadIdx.x & 31; c < a.m; c += 32) {
    const float e = a.e[r * a.m + c], h = a.h[r * a.m + c];
    dot = __fmaf_rn(e, h, dot);
    a.e[r * a.m + c] = p * e, a.h[r * a.m + c] = p * h;
  }
  dot = warp_sum(dot);
  if ((threadIdx.x & 31) == 0) a.dweights[pair] += dot;
}

// One warp: expert after expert in the order of their rows.
__global__ void __launch_bounds__(32) list_kernel(const GroupedArgs a) {
  follow();
  const int64_t T = a.narrow ? kProductWideTile : kProductTile;
  int before = 0;
  if (threadIdx.x == 0) a.tile_begins[0] = 0;
  for (int64_t j0 = 0; j0 < a.experts; j0 += 32) {
    const int64_t j = j0 + threadIdx.x;
    int tiles = 0;
    if (j < a.experts) {
      const int64_t at = a.offsets[j], rows = a.offsets[j + 1] - at;
      float* w = static_cast<float*>(a.weights[j]);
      ListedProduct l{};
      l.b_is_bf16 = a.bf16 && a.bf16[j];
      if (a.kind == Grouped::forward) l.p = {rows, a.out, a.in, a.x + at * a.in, a.in, false, w, a.in, true, a.y + at * a.out, a.out, false};
      if (a.kind == Grouped::input) l.p = {rows, a.in, a.out, a.x + at * a.out, a.out, false, w, a.in, false, a.y + at * a.in, a.in, a.accumulate};
      if (a.kind == Grouped::weight_gradient) l.p = {w ? a.out : 0, a.in, rows, a.x + at * a.out, a.out, true, a.z + at * a.in, a.in, false, w, a.in, true};
      a.list[j] = l;
      if (rows > 0) tiles = int((l.p.m + T - 1) / T * ((l.p.n + T - 1) / T));
    }
    const int x = running_sum(tiles);
    if (j < a.experts) a.tile_begins[j + 1] = before + x;
    before += __shfl_sync(~0u, x, 31);
  }
}

__global__ void __launch_bounds__(256) observe_kernel(const ObserveArgs a) {
  follow();
  const int64_t i = int64_t(blockIdx.x) * 256 + threadIdx.x, row = i / a.experts, j = i % a.experts;
  if (row >= a.rows || (a.padding && a.padding[row]) || !isfinite(a.cutoff[row])) return;
  const float at = (a.cutoff[row] - a.scores[i] - a.range[0]) / a.range[1];
  const int64_t bin = !(at < float(a.bins)) ? a.bins - 1 : at > 0.f ? int64_t(at) : 0;  // a NaN score counts as never chosen
  atomicAdd(a.counts + j * a.bins + bin, 1);
}

__global__ void __launch_bounds__(1024) count_kernel(const int32_t* chosen, int64_t n, int32_t* counts) {  // whole numbers: any order
  follow();
  for (int64_t i = int64_t(blockIdx.x) * 1024 + threadIdx.x; i < n; i += int64_t(gridDim.x) * 1024) {
    const int32_t e = chosen[i];
    const unsigned same = __match_any_sync(__activemask(), e);
    if (e >= 0 && (threadIdx.x & 31) == unsigned(__ffs(int(same)) - 1)) atomicAdd(counts + e, __popc(same));
  }
}

}  // namespace

const char* route_forward(const RouteArgs& a, void* stream) {
  const int64_t bytes = 4 * (a.experts + a.groups);
  if (bytes > 200 << 10) return "[route] the GPU serves up to 50000 experts";
  if (a.rows == 0) return nullptr;
  if (bytes > 48 << 10)
    if (cudaError_t e = cudaFuncSetAttribute(route_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)); e != cudaSuccess) return cudaGetErrorString(e);
  enqueue(route_kernel, unsigned(a.rows), 32, size_t(bytes), cudaStream_t(stream), a);
  return result();
}

const char* route_backward(const RouteArgs& a, void* stream) {
  if (a.rows) enqueue(route_backward_kernel, unsigned(a.rows), 32, 0, cudaStream_t(stream), a);
  return result();
}

const char* dispatch_order(const DispatchOrderArgs& a, void* stream) {
  if (a.experts > 12288) return "[experts] the GPU serves up to 12288 experts";
  const cudaStream_t s = cudaStream_t(stream);
  const int64_t groups = (a.pairs + kDispatchGroup - 1) / kDispatchGroup;
  const size_t bytes = size_t(a.experts) * 4;
  if (groups) enqueue(pairs_kernel<false>, unsigned(groups), 32, bytes, s, a);
  enqueue(groups_kernel, unsigned((a.experts + 3) / 4), 128, 0, s, a, groups);
  enqueue(offsets_kernel, 1, 32, 0, s, a.offsets, a.experts);
  if (groups) enqueue(pairs_kernel<true>, unsigned(groups), 32, bytes, s, a);
  return result();
}

const char* gather(const DispatchArgs& a, const int64_t* rows, void* stream) {
  if (a.pairs) enqueue(gather_kernel, unsigned((a.pairs + 7) / 8), 256, 0, cudaStream_t(stream), a, rows);
  return result();
}

const char* combine(const DispatchArgs& a, bool add, void* stream) {
  if (a.tokens * a.d == 0) return nullptr;
  const int64_t each = a.d % 8 == 0 ? 8 : 1;
  const dim3 blocks(unsigned(a.tokens), unsigned((a.d + 128 * each - 1) / (128 * each)));
  auto launch = [&](auto kernel) { enqueue(kernel, blocks, 128, 0, cudaStream_t(stream), a); };
  if (each == 8) launch(add ? combine_kernel<true, 8> : combine_kernel<false, 8>);
  else launch(add ? combine_kernel<true, 1> : combine_kernel<false, 1>);
  return result();
}

const char* weigh_pairs(const PairArgs& a, const int64_t* rows, void* stream) {
  if (a.last) enqueue(weigh_kernel, unsigned((a.last + 7) / 8), 256, 0, cudaStream_t(stream), a, rows);
  return result();
}

const char* grouped_products(const GroupedArgs& a, void* stream) {
  if (a.most_rows == 0 || a.experts == 0) return nullptr;
  const int64_t T = a.narrow ? kProductWideTile : kProductTile;
  auto tiles = [T](int64_t n) { return (n + T - 1) / T; };
  // Most tiles: every expert with rows has one that is not full.
  const int64_t with_rows = a.most_rows < a.experts ? a.most_rows : a.experts, row_tiles = a.most_rows / T + with_rows;
  const int64_t most = a.kind == Grouped::forward ? row_tiles * tiles(a.out) : a.kind == Grouped::input ? row_tiles * tiles(a.in) : with_rows * tiles(a.out) * tiles(a.in);
  enqueue(list_kernel, 1, 32, 0, cudaStream_t(stream), a);
  if (const char* e = result()) return e;
  return products({a.list, a.tile_begins, int(a.experts), most, a.narrow, a.narrow, false}, stream);
}

const char* count_choices(const int32_t* chosen, int64_t n, int64_t, int32_t* counts, void* stream) {
  const int64_t blocks = (n + 1023) / 1024;
  if (blocks) enqueue(count_kernel, unsigned(blocks < 64 ? blocks : 64), 1024, 0, cudaStream_t(stream), chosen, n, counts);
  return result();
}

const char* observe_margins(const ObserveArgs& a, void* stream) {
  const int64_t blocks = (a.rows * a.experts + 255) / 256;
  if (blocks) enqueue(observe_kernel, unsigned(blocks), 256, 0, cudaStream_t(stream), a);
  return result();
}

}  // namespace k3::cuda

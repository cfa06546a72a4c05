// route: a warp a token, up to 32 choices a lane in registers as monotone bits. The (top_k + 1)-th largest of the lanes' maxima is a bound under which
// nothing wanted lies; what reaches it, two dozen of 896, is gathered into one a lane and sorted by (choice, lowest expert). More than 32 reach it only
// with many ties or a lane of many large ones: then top_k + 1 rounds of a maximum. A row's result is the same either way.
// sort_rows: a warp takes 256 pairs in order and counts them by expert; running sums over the warps and the experts; the same walk again places
// each pair. Stable by token, no atomics.
#include "k3/core/tile.cuh"
#include "k3/ops/moe/route_cuda.h"

namespace k3::cuda {
namespace {

// Largest first over the lanes: the bitonic network.
template <class T>
__device__ __forceinline__ T sort_lanes(T x) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int size = 2; size <= 32; size <<= 1)
#pragma unroll
    for (int step = size >> 1; step > 0; step >>= 1) {
      const T other = __shfl_xor_sync(~0u, x, step);
      const bool larger_here = !(lane & step) == !(lane & size);
      if (larger_here ? other > x : other < x) x = other;
    }
  return x;
}

template <int N>  // choices a lane
__global__ void __launch_bounds__(128) route_kernel(const RouteArgs a) {
  __shared__ uint64_t gathered[4][32];
  const int64_t row = int64_t(blockIdx.x) * 4 + (threadIdx.x >> 5);
  const int lane = threadIdx.x & 31;
  if (row >= a.rows) return;
  if (a.padding && a.padding[row]) {
    if (lane < a.top_k) a.chosen[row * a.top_k + lane] = -1, a.weights[row * a.top_k + lane] = 0.f;
    if (a.cutoff && lane == 0) a.cutoff[row] = 0.f;
    return;
  }
  const float* logits = a.logits + row * a.experts;
  auto score = [&](int e) { return 1.f / (1.f + expf(-logits[e])); };
  uint32_t key[N], best = 0;  // larger is better; 0 is nothing
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int e = i * 32 + lane;
    key[i] = 0;
    if (e < a.experts) {
      const uint32_t bits = __float_as_uint(score(e) + a.bias[e]);
      key[i] = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    }
    best = max(best, key[i]);
  }
  const uint32_t bound = __shfl_sync(~0u, sort_lanes(best), a.top_k);
  uint64_t* to = gathered[threadIdx.x >> 5];
  int reached = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const bool mine = key[i] >= bound;
    const uint32_t all = __ballot_sync(~0u, mine);
    const int at = reached + __popc(all & ((1u << lane) - 1));
    if (mine && at < 32) to[at] = uint64_t(key[i]) << 32 | uint32_t(~(i * 32 + lane));
    reached += __popc(all);
  }
  __syncwarp();
  uint64_t chosen = lane < reached ? to[lane] : 0;  // of rank `lane`
  if (reached <= 32) {
    chosen = sort_lanes(chosen);
  } else {
    uint64_t ranked = 0;
    for (int k = 0; k <= a.top_k; ++k) {
      uint32_t most = 0;
      int at = 0;
#pragma unroll
      for (int i = 0; i < N; ++i)
        if (key[i] > most) most = key[i], at = i;
      const uint32_t top = __reduce_max_sync(~0u, most), expert = __reduce_min_sync(~0u, most == top ? uint32_t(at * 32 + lane) : ~0u);
#pragma unroll
      for (int i = 0; i < N; ++i)
        if (uint32_t(i * 32 + lane) == expert) key[i] = 0;
      if (lane == k) ranked = uint64_t(top) << 32 | uint32_t(~expert);
    }
    chosen = ranked;
  }
  const int expert = int(~uint32_t(chosen));
  const float weight = lane < a.top_k ? score(expert) : 0.f, sum = warp_sum(weight);
  if (lane < a.top_k) {
    a.chosen[row * a.top_k + lane] = expert;
    a.weights[row * a.top_k + lane] = (a.renormalize ? weight / (sum + 1e-20f) : weight) * a.scale;
  }
  if (a.cutoff && lane == a.top_k) {
    const uint32_t top = uint32_t(chosen >> 32);
    a.cutoff[row] = __uint_as_float(top & 0x80000000u ? top & 0x7fffffffu : ~top);
  }
}

// counts (groups of 256 pairs, experts): first how many, then where the group's first row of an expert goes
template <bool kPlace>
__global__ void __launch_bounds__(32) rows_kernel(const SortRowsArgs a) {
  extern __shared__ int next[];
  int* counts = a.counts + int64_t(blockIdx.x) * a.experts;
  const int lane = threadIdx.x;
  for (int e = lane; e < a.experts; e += 32) next[e] = kPlace ? counts[e] + a.begins[e] : 0;
  __syncwarp();
  const int64_t pairs = a.tokens * a.top_k, first = int64_t(blockIdx.x) * 256;
  int chosen[8];
#pragma unroll
  for (int x = 0; x < 8; ++x) chosen[x] = first + x * 32 + lane < pairs ? a.chosen[first + x * 32 + lane] : -2;
#pragma unroll
  for (int x = 0; x < 8; ++x) {
    const int64_t i = first + x * 32 + lane;
    const uint32_t same = __match_any_sync(~0u, chosen[x]);
    const int rank = __popc(same & ((1u << lane) - 1));
    if (chosen[x] >= 0) {
      const int row = next[chosen[x]] + rank;
      if (kPlace) a.gather[row] = int(i / a.top_k), a.row_weight[row] = a.weights[i], a.where[i] = row;
    } else if (kPlace && chosen[x] == -1) {
      a.where[i] = -1;
    }
    __syncwarp();
    if (chosen[x] >= 0 && rank == 0) next[chosen[x]] += __popc(same);
    __syncwarp();
  }
  if (!kPlace)
    for (int e = lane; e < a.experts; e += 32) counts[e] = next[e];
}

__global__ void __launch_bounds__(128) groups_kernel(const SortRowsArgs a, int groups) {  // a warp an expert: running sum over the groups
  const int e = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (e >= a.experts) return;
  int before = 0;
  for (int g0 = 0; g0 < groups; g0 += 32) {
    int g = g0 + lane, n = g < groups ? a.counts[int64_t(g) * a.experts + e] : 0, x = n;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      int y = __shfl_up_sync(~0u, x, d);
      if (lane >= d) x += y;
    }
    if (g < groups) a.counts[int64_t(g) * a.experts + e] = before + x - n;
    before += __shfl_sync(~0u, x, 31);
  }
  if (lane == 0) a.begins[e + 1] = before;
}

__global__ void __launch_bounds__(32) running_sum_kernel(int* begins, int n) {  // begins[1..n] from counts to ends
  int before = 0;
  if (threadIdx.x == 0) begins[0] = 0;
  for (int e0 = 0; e0 < n; e0 += 32) {
    int e = e0 + threadIdx.x, x = e < n ? begins[e + 1] : 0;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      int y = __shfl_up_sync(~0u, x, d);
      if (int(threadIdx.x) >= d) x += y;
    }
    if (e < n) begins[e + 1] = before + x;
    before += __shfl_sync(~0u, x, 31);
  }
}

const char* result() {
  cudaError_t e = cudaGetLastError();
  return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}

}  // namespace

const char* route(const RouteArgs& a, void* stream) {
  if (a.experts > 1024 || a.top_k > 31 || a.top_k >= a.experts) return "[route] the GPU serves up to 1024 experts and top_k up to 31, below the number of experts";
  const auto kernel = a.experts <= 64 ? route_kernel<2> : a.experts <= 256 ? route_kernel<8> : a.experts <= 896 ? route_kernel<28> : route_kernel<32>;
  if (a.rows) kernel<<<unsigned((a.rows + 3) / 4), 128, 0, cudaStream_t(stream)>>>(a);
  return result();
}

const char* sort_rows(const SortRowsArgs& a, void* stream) {
  if (a.experts > 8192) return "[route] sort_rows serves up to 8192 experts";
  const int groups = int((a.tokens * a.top_k + 255) / 256), bytes = a.experts * 4;
  if (groups) rows_kernel<false><<<groups, 32, bytes, cudaStream_t(stream)>>>(a);
  groups_kernel<<<(a.experts + 3) / 4, 128, 0, cudaStream_t(stream)>>>(a, groups);
  running_sum_kernel<<<1, 32, 0, cudaStream_t(stream)>>>(a.begins, a.experts);
  if (groups) rows_kernel<true><<<groups, 32, bytes, cudaStream_t(stream)>>>(a);
  return result();
}

}  // namespace k3::cuda

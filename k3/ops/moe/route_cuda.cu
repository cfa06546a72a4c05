// route: a warp a token, up to 32 scores a lane in registers; top_k + 1 rounds of a maximum over (monotone score bits, lowest expert).
// sort_rows: a warp takes 256 pairs in order and counts them by expert; running sums over the warps and the experts; the same walk again places
// each pair. Stable by token, no atomics.
#include "k3/core/tile.cuh"
#include "k3/ops/moe/route_cuda.h"

namespace k3::cuda {
namespace {

__global__ void __launch_bounds__(128) route_kernel(const RouteArgs a) {
  const int64_t row = int64_t(blockIdx.x) * 4 + (threadIdx.x >> 5);
  const int lane = threadIdx.x & 31;
  if (row >= a.rows) return;
  if (a.padding && a.padding[row]) {
    if (lane < a.top_k) a.chosen[row * a.top_k + lane] = -1, a.weights[row * a.top_k + lane] = 0.f;
    if (a.cutoff && lane == 0) a.cutoff[row] = 0.f;
    return;
  }
  float score[32];
  uint32_t key[32];  // larger is better; 0 is nothing
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int e = i * 32 + lane;
    key[i] = 0, score[i] = 0.f;
    if (e < a.experts) {
      score[i] = 1.f / (1.f + expf(-a.logits[row * a.experts + e]));
      uint32_t bits = __float_as_uint(score[i] + a.bias[e]);
      key[i] = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    }
  }
  int mine = -1;
  float weight = 0.f, sum = 0.f;
  for (int k = 0; k <= a.top_k; ++k) {
    uint32_t best = 0;
    int at = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i)
      if (key[i] > best) best = key[i], at = i;
    const uint32_t top = __reduce_max_sync(~0u, best);
    const uint32_t expert = __reduce_min_sync(~0u, best == top ? uint32_t(at * 32 + lane) : ~0u);
    if (k == a.top_k) {
      if (a.cutoff && lane == 0) a.cutoff[row] = __uint_as_float(top & 0x80000000u ? top & 0x7fffffffu : ~top);
      break;
    }
    float s = 0.f;
#pragma unroll
    for (int i = 0; i < 32; ++i)
      if (i * 32 + lane == int(expert)) s = score[i], key[i] = 0;
    s = __shfl_sync(~0u, s, expert & 31);
    sum += s;
    if (lane == k) mine = int(expert), weight = s;
  }
  if (lane < a.top_k) {
    a.chosen[row * a.top_k + lane] = mine;
    a.weights[row * a.top_k + lane] = (a.renormalize ? weight / (sum + 1e-20f) : weight) * a.scale;
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
  if (a.rows) route_kernel<<<unsigned((a.rows + 3) / 4), 128, 0, cudaStream_t(stream)>>>(a);
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

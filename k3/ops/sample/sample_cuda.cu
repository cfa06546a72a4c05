// A cluster of eight blocks a row: a thread has EACH neighbouring logits as monotone keys in registers, their weights lie in shared memory. Every
// sum runs over a thread's own in order of ids, then over warp, block and cluster in one fixed tree.
//
//   1 the best, and whether all are numbers   2 top_k   3 weights exp((l - best) / temperature)   4 top_p   5 min_p   6 the draw   7 counters
//
// Borders of 2 and 4 are found by halving the range of keys, two bits at a time: the largest t with sum over keys >= t of the weight (1 in step 2)
// at least what is wanted; of those equal to t the lowest ids stay.
#include <cooperative_groups.h>

#include "k3/core/block.cuh"
#include "k3/core/order.cuh"
#include "k3/core/rng.h"
#include "k3/ops/sample/sample_cuda.h"

namespace k3::cuda {
namespace {

namespace cg = cooperative_groups;

constexpr int kBlocks = 8, kThreads = 1024;
constexpr uint32_t kMasked = 0, kBroken = 0xffffffffu;

__device__ __forceinline__ uint32_t logit_key(float x) { return x != x || x == INFINITY ? kBroken : x == -INFINITY ? kMasked : key_of(x); }

struct Shared {
  double warps[3][32];
  double sums[2][3];  // of this block, for the others; two, so that one barrier a sum is enough
  unsigned long long warp_best[32], best[2];
};

struct Row {
  Shared& s;
  cg::cluster_group cluster;
  int turn = 0;

  // x = the sum over all threads of the cluster, for all of them.
  template <int N>
  __device__ void sum(double (&x)[N]) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int d = 16; d > 0; d >>= 1) x[n] += __shfl_xor_sync(~0u, x[n], d);
      if (lane == 0) s.warps[n][warp] = x[n];
    }
    __syncthreads();
    if (warp < N) {
      double y = s.warps[warp][lane];
#pragma unroll
      for (int d = 16; d > 0; d >>= 1) y += __shfl_xor_sync(~0u, y, d);
      if (lane == 0) s.sums[turn][warp] = y;
    }
    cluster.sync();
#pragma unroll
    for (int n = 0; n < N; ++n) {
      x[n] = 0;
      for (int b = 0; b < kBlocks; ++b) x[n] += cluster.map_shared_rank(&s.sums[turn][n], b)[0];
    }
    turn ^= 1;
  }
  __device__ double sum(double x) {
    double y[1] = {x};
    sum(y);
    return y[0];
  }
  // The sum over the threads before this one.
  __device__ double before(double x) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    double inclusive = x;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const double y = __shfl_up_sync(~0u, inclusive, d);
      if (lane >= d) inclusive += y;
    }
    double sum = lane ? __shfl_up_sync(~0u, inclusive, 1) : (__shfl_up_sync(~0u, inclusive, 1), 0.0);
    if (lane == 31) s.warps[0][warp] = inclusive;
    __syncthreads();
    double front = 0, all = 0;
    for (int w = 0; w < 32; ++w) {
      if (w == warp) front = all;
      all += s.warps[0][w];
    }
    if (threadIdx.x == 0) s.sums[turn][0] = all;
    cluster.sync();
    double blocks = 0;
    for (int b = 0; b < int(cluster.block_rank()); ++b) blocks += cluster.map_shared_rank(&s.sums[turn][0], b)[0];
    turn ^= 1;
    return blocks + front + sum;
  }
  __device__ unsigned long long largest(unsigned long long x) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) x = max(x, __shfl_xor_sync(~0u, x, d));
    if (lane == 0) s.warp_best[warp] = x;
    __syncthreads();
    if (warp == 0) {
      x = s.warp_best[lane];
#pragma unroll
      for (int d = 16; d > 0; d >>= 1) x = max(x, __shfl_xor_sync(~0u, x, d));
      if (lane == 0) s.best[turn] = x;
    }
    cluster.sync();
    x = 0;
    for (int b = 0; b < kBlocks; ++b) x = max(x, cluster.map_shared_rank(&s.best[turn], b)[0]);
    turn ^= 1;
    return x;
  }
};

// Keeps of the keys the fewest largest whose weights sum to `wanted`; the others become masked.
template <int EACH, class Weight>
__device__ void keep(Row& row, uint32_t (&key)[EACH], double wanted, Weight weight) {
  uint32_t t = 0;
  for (int bit = 30; bit >= 0; bit -= 2) {
    double x[3] = {};
#pragma unroll
    for (int i = 0; i < EACH; ++i)
#pragma unroll
      for (uint32_t n = 0; n < 3; ++n)
        if (key[i] && key[i] >= (t | (n + 1) << bit)) x[n] += weight(i);
    row.sum(x);
    t |= uint32_t((x[0] >= wanted) + (x[1] >= wanted) + (x[2] >= wanted)) << bit;
  }
  double above = 0, equal = 0, one = 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i)
    if (key[i] > t) above += weight(i);
    else if (key[i] && key[i] == t) equal += 1, one = weight(i);
  double both[2] = {above, equal};
  row.sum(both);
  double rank = row.before(equal);
#pragma unroll
  for (int i = 0; i < EACH; ++i)
    if (key[i] < t) key[i] = kMasked;
    else if (key[i] == t && key[i]) {
      if (rank > 0 && both[0] + rank * one >= wanted) key[i] = kMasked;  // enough without it
      rank += 1;
    }
}

template <int EACH>
__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kThreads) sample_kernel(const SampleStepArgs a) {
  extern __shared__ double weights[];  // (EACH, threads): of this block's
  __shared__ Shared shared;
  const int64_t r = blockIdx.x / kBlocks;
  if (a.slots[r] < 0) return;
  asm volatile("griddepcontrol.wait;" ::: "memory");  // launched before the logits are complete
  Row row{shared, cg::this_cluster()};
  const int64_t first = (int64_t(row.cluster.block_rank()) * kThreads + threadIdx.x) * EACH;
  const float* logits = a.logits + r * a.vocabulary;
  const SampleRow o = a.options[r];

  // 1
  uint32_t key[EACH];
  float x[EACH];
  if (EACH % 4 == 0 && first + EACH <= a.vocabulary && a.vocabulary % 4 == 0) {  // all on their way together
#pragma unroll
    for (int i = 0; i < EACH; i += 4) {
      const float4 v = *reinterpret_cast<const float4*>(logits + first + i);
      x[i] = v.x, x[min(i + 1, EACH - 1)] = v.y, x[min(i + 2, EACH - 1)] = v.z, x[min(i + 3, EACH - 1)] = v.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < EACH; ++i) x[i] = first + i < a.vocabulary ? logits[first + i] : -INFINITY;
  }
  unsigned long long best = 0;  // larger is better: what is no number, the value, then the lower id
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    key[i] = logit_key(x[i]);
    if (key[i]) best = max(best, (unsigned long long)key[i] << 32 | (0xffffffffull - (first + i)));
  }
  best = row.largest(best);
  int32_t drawn = best ? int32_t(0xffffffffull - (best & 0xffffffffull)) : -1, where = -1;
  if (best >> 32 == kBroken) where = drawn, drawn = -1;

  if (drawn >= 0 && o.temperature != 0 && o.top_k != 1) {
    if (o.top_k > 0) {  // 2
      double n = 0;
#pragma unroll
      for (int i = 0; i < EACH; ++i) n += key[i] != kMasked;
      if (row.sum(n) > o.top_k) keep(row, key, double(o.top_k), [](int) { return 1.0; });
    }
    const double top = value_of(uint32_t(best >> 32)), temperature = o.temperature;  // 3
    auto weight = [&](int i) -> double& { return weights[i * kThreads + threadIdx.x]; };
    double mine = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      weight(i) = key[i] ? exp((double(value_of(key[i])) - top) / temperature) : 0.0;
      mine += weight(i);
    }
    if (o.top_p < 1) keep(row, key, double(o.top_p) * row.sum(mine), weight);  // 4
    mine = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {  // 5
      if (!key[i] || (o.min_p > 0 && weight(i) < double(o.min_p))) weight(i) = 0;
      mine += weight(i);
    }
    const double front = row.before(mine), total = row.sum(mine);  // 6
    double left = Rng{o.seed, 0x73616d706c65}.uniform(uint64_t(a.tokens[r] + a.has_read)) * total - front;
    int64_t here = -1, last = -1;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      if (weight(i) == 0) continue;
      last = first + i;
      if (here < 0 && (left -= weight(i)) < 0) here = last;
    }
    // the first thread whose share ends beyond the draw; when rounding leaves a rest, the last token that has a weight
    const unsigned long long found = row.largest(here < 0 ? 0 : 0xffffffffull - here), rest = row.largest((unsigned long long)(last + 1));
    drawn = found ? int32_t(0xffffffffull - found) : int32_t(rest) - 1;
  }

  // 7
  row.cluster.sync();  // nobody reads this block's sums any more, nor the counters
  if (row.cluster.block_rank() || threadIdx.x) return;
  a.ids[r] = drawn;
  if (a.has_read) {
    ++a.tokens[r];
    a.open[r] = a.open[r] == a.chunk ? 1 : a.open[r] + 1;
  }
  const uint32_t step = a.steps[r]++;
  SampleResult* to = a.results + (step % a.ring) * a.rows + r;
  to->id = drawn, to->where = where, to->value = where >= 0 ? logits[where] : 0.f;
  __threadfence_system();
  *reinterpret_cast<volatile uint32_t*>(&to->stamp) = step + 1;
}

template <int EACH>
cudaError_t run(const SampleStepArgs& a, cudaStream_t s) {
  constexpr int bytes = EACH * kThreads * int(sizeof(double));
  if (cudaError_t e = cudaFuncSetAttribute(sample_kernel<EACH>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes); e != cudaSuccess) return e;
  cudaLaunchAttribute early{cudaLaunchAttributeProgrammaticStreamSerialization, {}, {}};
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{dim3(unsigned(a.rows * kBlocks)), dim3(kThreads), bytes, s, &early, 1};
  return cudaLaunchKernelEx(&config, sample_kernel<EACH>, a);
}

}  // namespace

const char* sample_step(const SampleStepArgs& a, void* stream) {
  if (a.vocabulary > kSampleVocabulary) return "[sample] the GPU serves vocabularies of up to 196608 tokens";
  if (a.rows == 0) return nullptr;
  const cudaStream_t s = stream_of(stream);
  const int64_t each = (a.vocabulary + kBlocks * kThreads - 1) / (kBlocks * kThreads);
  const cudaError_t e = each <= 1 ? run<1>(a, s) : each <= 4 ? run<4>(a, s) : each <= 12 ? run<12>(a, s) : each <= 20 ? run<20>(a, s) : run<24>(a, s);
  return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}

}  // namespace k3::cuda

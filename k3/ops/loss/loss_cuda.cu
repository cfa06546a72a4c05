// One block a row of logits: maximum and sum in one read (the running form), the gradient in a second that the L2 cache serves in part. Rows of 32,768
// to 225,280: a cluster of four blocks keeps its row in shared memory.
// Bound: bytes, read and write. Statistics float32; partial sums of 512 threads joined in order.
#include "k3/core/enqueue.cuh"
#include "k3/core/tile.cuh"
#include "k3/ops/loss/loss_cuda.h"

namespace k3::cuda {
namespace {

__global__ void __launch_bounds__(512) cross_entropy_kernel(const CrossEntropyArgs a) {
  follow();
  __shared__ float tops[16], sums[16];
  nv_bf16* x = static_cast<nv_bf16*>(a.logits) + int64_t(blockIdx.x) * a.vocabulary;
  const int target = a.targets[blockIdx.x];
  if (target < 0) {
    for (int i = threadIdx.x; i < a.vocabulary / 8; i += 512) reinterpret_cast<uint4*>(x)[i] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x == 0) a.loss[blockIdx.x] = 0.f;
    return;
  }
  const float wanted = to_f32(x[target]);
  float top = -INFINITY, sum = 0.f;
#pragma unroll 4
  for (int i = threadIdx.x; i < a.vocabulary / 8; i += 512) {
    float v[8], m = top;
    load8(x + i * 8, v);
#pragma unroll
    for (int e = 0; e < 8; ++e) m = fmaxf(m, v[e]);
    const float from = m == -INFINITY ? 0.f : m;  // nothing but minus infinities so far
    sum *= ex2(kLog2e * (top - from));
#pragma unroll
    for (int e = 0; e < 8; ++e) sum += ex2(kLog2e * (v[e] - from));
    top = m;
  }
  const float most = warp_max(top);
  sum = warp_sum(top == -INFINITY ? 0.f : sum * ex2(kLog2e * (top - most)));
  if ((threadIdx.x & 31) == 0) tops[threadIdx.x >> 5] = most, sums[threadIdx.x >> 5] = sum;
  __syncthreads();
  top = tops[0], sum = 0.f;
  for (int w = 1; w < 16; ++w) top = fmaxf(top, tops[w]);
  for (int w = 0; w < 16; ++w) sum += tops[w] == -INFINITY ? 0.f : sums[w] * ex2(kLog2e * (tops[w] - top));
  const float r = a.scale / sum;
  if (threadIdx.x == 0) a.loss[blockIdx.x] = logf(sum) + top - wanted;
#pragma unroll 4
  for (int i = threadIdx.x; i < a.vocabulary / 8; i += 512) {
    float v[8];
    load8(x + i * 8, v);
#pragma unroll
    for (int e = 0; e < 8; ++e) v[e] = ex2(kLog2e * (v[e] - top)) * r - (i * 8 + e == target ? a.scale : 0.f);
    store8(x + i * 8, v);
  }
}

// The same with a row in the shared memory of a cluster of kShare blocks: read once, written once. A cluster walks its rows; while one is computed with, a
// warp of its own has the one before written and the next but one read.
constexpr int kShare = 4, kWorkers = 640, kStages = 2;
constexpr int64_t share_bytes(int64_t vocabulary) { return (vocabulary / 8 + kShare - 1) / kShare * 16; }

__device__ __forceinline__ float2 remote(const float2* p, uint32_t rank) {
  uint32_t there;
  float2 x;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(p)), "r"(rank));
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(there) : "memory");
  return x;
}
__device__ __forceinline__ float2 joined(float2 a, float2 b) {  // (top, sum of exp(x - top))
  const float t = fmaxf(a.x, b.x);
  return t == -INFINITY ? make_float2(t, 0.f) : make_float2(t, a.y * ex2(kLog2e * (a.x - t)) + b.y * ex2(kLog2e * (b.x - t)));
}

__global__ void __cluster_dims__(kShare, 1, 1) __launch_bounds__(kWorkers + 32) streamed_kernel(const CrossEntropyArgs a) {
  follow();
  extern __shared__ __align__(128) uint4 held[];
  __shared__ float2 part[kWorkers / 32], mine[2];
  __shared__ __align__(8) uint64_t barriers[2 * kStages];  // of each stage: the row is there; its gradient is there
  const int all = a.vocabulary / 8, each = (all + kShare - 1) / kShare, first = min(all, int(blockIdx.x) * each), n = min(all, first + each) - first;
  const uint32_t stage_bytes = uint32_t(each) * 16, there = shared_address(barriers), done = there + 8 * kStages;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  auto row_at = [&](int64_t row) { return reinterpret_cast<uint4*>(static_cast<nv_bf16*>(a.logits) + row * a.vocabulary) + first; };
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) barrier_init(there + 8 * s, 1), barrier_init(done + 8 * s, kWorkers / 32 * kWarpArrivals);
    barrier_init_done();
  }
  __syncthreads();
  const int64_t step = gridDim.y;
  if (warp == kWorkers / 32) {
    auto load = [&](int64_t row, int s) {
      if (row >= a.rows) return;
      arrive_expect(there + 8 * s, uint32_t(n) * 16);
      bulk_load(shared_address(held) + s * stage_bytes, row_at(row), uint32_t(n) * 16, there + 8 * s);
    };
    if (lane == 0)
      for (int s = 0; s < kStages; ++s) load(blockIdx.y + s * step, s);
    int i = 0;
    for (int64_t row = blockIdx.y; row < a.rows; row += step, ++i) {
      const int s = i % kStages;
      __syncwarp();
      cluster_sync();
      if (lane) continue;
      wait(done + 8 * s, i / kStages & 1);
      bulk_store(row_at(row), shared_address(held) + s * stage_bytes, uint32_t(n) * 16);
      bulk_commit();
      bulk_wait_read();
      load(row + kStages * step, s);
    }
    if (lane == 0) bulk_wait();
    __syncwarp();
    cluster_sync();
    return;
  }
  int i = 0;
  for (int64_t row = blockIdx.y; row < a.rows; row += step, ++i) {
    const int s = i % kStages, target = a.targets[row];
    uint4* x = held + int64_t(s) * each;
    wait(there + 8 * s, i / kStages & 1);
    const bool has_target = target >= 0 && target / 8 >= first && target / 8 < first + n;
    const float wanted = has_target ? to_f32(reinterpret_cast<const nv_bf16*>(x)[target - first * 8]) : 0.f;
    float top = -INFINITY, sum = 0.f;
#pragma unroll 4
    for (int j = threadIdx.x; j < n; j += kWorkers) {
      const uint4 u = x[j];
      const float v[8] = {low(u.x), high(u.x), low(u.y), high(u.y), low(u.z), high(u.z), low(u.w), high(u.w)};
      float m = top;
#pragma unroll
      for (int e = 0; e < 8; ++e) m = fmaxf(m, v[e]);
      const float base = m == -INFINITY ? 0.f : m;
      sum *= ex2(kLog2e * (top - base));
#pragma unroll
      for (int e = 0; e < 8; ++e) sum += ex2(kLog2e * (v[e] - base));
      top = m;
    }
    const float most = warp_max(top);
    sum = warp_sum(top == -INFINITY ? 0.f : sum * ex2(kLog2e * (top - most)));
    if (lane == 0) part[warp] = make_float2(most, sum);
    named_barrier(1, kWorkers);
    if (warp == 0) {
      const float2 p = lane < kWorkers / 32 ? part[lane] : make_float2(-INFINITY, 0.f);
      const float t = warp_max(p.x), all_of = warp_sum(p.x == -INFINITY ? 0.f : p.y * ex2(kLog2e * (p.x - t)));
      if (lane == 0) mine[i & 1] = make_float2(t, all_of);
    }
    cluster_sync();  // what is read now is written again two rows on, behind the next of these
    float2 whole = remote(&mine[i & 1], 0);
#pragma unroll
    for (uint32_t r = 1; r < kShare; ++r) whole = joined(whole, remote(&mine[i & 1], r));
    top = whole.x;
    const float r = a.scale / whole.y;
    if (target < 0) {
      if (threadIdx.x == 0 && blockIdx.x == 0) a.loss[row] = 0.f;
    } else if (has_target && threadIdx.x == 0) {
      a.loss[row] = logf(whole.y) + top - wanted;
    }
#pragma unroll 4
    for (int j = threadIdx.x; j < n; j += kWorkers) {
      const uint4 u = x[j];
      float v[8] = {low(u.x), high(u.x), low(u.y), high(u.y), low(u.z), high(u.z), low(u.w), high(u.w)};
#pragma unroll
      for (int e = 0; e < 8; ++e) v[e] = target < 0 ? 0.f : ex2(kLog2e * (v[e] - top)) * r - ((first + j) * 8 + e == target ? a.scale : 0.f);
      x[j] = make_uint4(pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
    }
    publish();
    __syncwarp();
    arrive_warp(done + 8 * s);
  }
  cluster_sync();  // nobody leaves while others read
}

// As many clusters as run at a time; a row's bits do not depend on it.
int clusters(int bytes) {
  static int known_bytes = -1, known = 1;
  if (known_bytes != bytes) {
    cudaLaunchAttribute cluster{cudaLaunchAttributeClusterDimension, {}, {}};
    cluster.val.clusterDim = {kShare, 1, 1};
    cudaLaunchConfig_t config{dim3(kShare, 64), dim3(kWorkers + 32), size_t(bytes), nullptr, &cluster, 1};
    if (cudaOccupancyMaxActiveClusters(&known, streamed_kernel, &config) != cudaSuccess || known < 1) cudaGetLastError(), known = 1;
    known_bytes = bytes;
  }
  return known;
}

}  // namespace

const char* cross_entropy(const CrossEntropyArgs& a, void* stream) {
  if (a.vocabulary % 8) return "[loss] the GPU serves vocabularies that are multiples of 8; pad the logits with -infinity";
  const int64_t bytes = kStages * share_bytes(a.vocabulary);
  if (a.rows && a.vocabulary >= 32768 && bytes <= 220 << 10) {
    if (cudaError_t e = cudaFuncSetAttribute(streamed_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)); e != cudaSuccess) return cudaGetErrorString(e);
    const int64_t most = clusters(int(bytes));
    enqueue(streamed_kernel, dim3(kShare, unsigned(a.rows < most ? a.rows : most)), kWorkers + 32, size_t(bytes), cudaStream_t(stream), a);
    cudaError_t e = cudaGetLastError();
    return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
  }
  if (a.rows) enqueue(cross_entropy_kernel, unsigned(a.rows), 512, 0, cudaStream_t(stream), a);
  cudaError_t e = cudaGetLastError();
  return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}

}  // namespace k3::cuda

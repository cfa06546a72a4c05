// One block a row of logits: maximum and sum in one read (the running form), the gradient in a second that the L2 cache serves in part. Rows of 32,768
// and more: a cluster of four blocks keeps its row in shared memory.
// Bound: bytes, read and write. Statistics float32; partial sums of 512 threads joined in order.
#include "k3/core/tile.cuh"
#include "k3/ops/loss/loss_cuda.h"

namespace k3::cuda {
namespace {

__global__ void __launch_bounds__(512) cross_entropy_kernel(const CrossEntropyArgs a) {
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

// The same with a row in the shared memory of a cluster of kShare blocks: read once, written once.
constexpr int kShare = 4, kHeldThreads = 512;
constexpr int64_t held_bytes(int64_t vocabulary) { return (vocabulary / 8 + kShare - 1) / kShare * 16; }

__device__ __forceinline__ float2 remote(const float2* p, uint32_t rank) {
  uint32_t there;
  float2 x;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(p)), "r"(rank));
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(there) : "memory");
  return x;
}

__global__ void __cluster_dims__(kShare, 1, 1) __launch_bounds__(kHeldThreads) cross_entropy_held_kernel(const CrossEntropyArgs a) {
  extern __shared__ uint4 held[];
  __shared__ float2 part[kHeldThreads / 32], mine;
  __shared__ float wanted;
  const int64_t row = blockIdx.y;
  nv_bf16* x = static_cast<nv_bf16*>(a.logits) + row * a.vocabulary;
  const int target = a.targets[row], all = a.vocabulary / 8, each = (all + kShare - 1) / kShare, first = min(all, int(blockIdx.x) * each), n = min(all, first + each) - first;
  uint4* from = reinterpret_cast<uint4*>(x) + first;
  if (target < 0) {
    for (int i = threadIdx.x; i < n; i += kHeldThreads) from[i] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x == 0 && blockIdx.x == 0) a.loss[row] = 0.f;
    return;  // the whole cluster
  }
  if (threadIdx.x == 0) wanted = to_f32(x[target]);
  float top = -INFINITY, sum = 0.f;
#pragma unroll 4
  for (int i = threadIdx.x; i < n; i += kHeldThreads) {
    const uint4 u = from[i];
    held[i] = u;
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
  auto joined = [](float2 a, float2 b) {  // (top, sum)
    const float t = fmaxf(a.x, b.x);
    return t == -INFINITY ? make_float2(t, 0.f) : make_float2(t, a.y * ex2(kLog2e * (a.x - t)) + b.y * ex2(kLog2e * (b.x - t)));
  };
  const float most = warp_max(top);
  sum = warp_sum(top == -INFINITY ? 0.f : sum * ex2(kLog2e * (top - most)));
  if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = make_float2(most, sum);
  __syncthreads();
  if (threadIdx.x == 0) {
    float2 y = part[0];
    for (int w = 1; w < kHeldThreads / 32; ++w) y = joined(y, part[w]);
    mine = y;
  }
  cluster_sync();
  float2 whole = remote(&mine, 0);
#pragma unroll
  for (uint32_t r = 1; r < kShare; ++r) whole = joined(whole, remote(&mine, r));
  cluster_sync();  // nobody leaves while others read
  top = whole.x;
  const float r = a.scale / whole.y;
  if (threadIdx.x == 0 && blockIdx.x == 0) a.loss[row] = logf(whole.y) + top - wanted;
#pragma unroll 4
  for (int i = threadIdx.x; i < n; i += kHeldThreads) {
    const uint4 u = held[i];
    float v[8] = {low(u.x), high(u.x), low(u.y), high(u.y), low(u.z), high(u.z), low(u.w), high(u.w)};
#pragma unroll
    for (int e = 0; e < 8; ++e) v[e] = ex2(kLog2e * (v[e] - top)) * r - ((first + i) * 8 + e == target ? a.scale : 0.f);
    from[i] = make_uint4(pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
  }
}

}  // namespace

const char* cross_entropy(const CrossEntropyArgs& a, void* stream) {
  if (a.vocabulary % 8) return "[loss] the GPU serves vocabularies that are multiples of 8; pad the logits with -infinity";
  const int64_t bytes = held_bytes(a.vocabulary);
  if (a.rows && a.rows <= 65535 && a.vocabulary >= 32768 && bytes <= 200 << 10) {
    cudaError_t e = cudaFuncSetAttribute(cross_entropy_held_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
    if (e == cudaSuccess) cross_entropy_held_kernel<<<dim3(kShare, unsigned(a.rows)), kHeldThreads, size_t(bytes), cudaStream_t(stream)>>>(a), e = cudaGetLastError();
    return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
  }
  if (a.rows) cross_entropy_kernel<<<unsigned(a.rows), 512, 0, cudaStream_t(stream)>>>(a);
  cudaError_t e = cudaGetLastError();
  return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}

}  // namespace k3::cuda

// One block a row of logits: maximum and sum in one read (the running form), the gradient in a second that the L2 cache serves in part.
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

}  // namespace

const char* cross_entropy(const CrossEntropyArgs& a, void* stream) {
  if (a.vocabulary % 8) return "[loss] the GPU serves vocabularies that are multiples of 8; pad the logits with -infinity";
  if (a.rows) cross_entropy_kernel<<<unsigned(a.rows), 512, 0, cudaStream_t(stream)>>>(a);
  cudaError_t e = cudaGetLastError();
  return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}

}  // namespace k3::cuda

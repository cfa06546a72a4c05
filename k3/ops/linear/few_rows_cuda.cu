// Split: a block has 128 rows of B, or 32 where there are few, a thread one of them and up to 8 rows of A: a chain over k for each. Slices of 128
// bytes of every row of B are on their way through shared memory, three or seven at a time.
#include "k3/core/block.cuh"
#include "k3/core/tile.cuh"
#include "k3/ops/linear/product_cuda.h"

namespace k3::cuda {
namespace {

constexpr int kSlice = 128, kStride = kSlice + 16;  // bytes; rows of a slice spread over the banks

template <class TB, int kRows, int kThreads, int kStages>
__global__ void __launch_bounds__(kThreads) few_rows_kernel(const Product p, const TB* b) {
  constexpr int kDepth = kSlice / int(sizeof(TB)), kEach = 16 / int(sizeof(TB));
  extern __shared__ __align__(16) unsigned char shared[];
  unsigned char* sb = shared;                                                   // (kStages, kThreads, kStride)
  float* sa = reinterpret_cast<float*>(shared + kStages * kThreads * kStride);  // (kStages, kRows, kDepth)
  const int64_t n0 = int64_t(blockIdx.x) * kThreads, m0 = int64_t(blockIdx.y) * kRows;
  const int slices = int((p.k + kDepth - 1) / kDepth);
  auto load = [&](int s) {
    if (s < slices) {
      const int64_t k0 = int64_t(s) * kDepth;
#pragma unroll
      for (int i = 0; i < kSlice / 16; ++i) {  // eight threads to a row
        const int at = threadIdx.x + i * kThreads, row = at / (kSlice / 16), c = at % (kSlice / 16);
        const int64_t k = k0 + c * kEach;
        const bool there = n0 + row < p.n && k < p.k;
        copy16(shared_address(sb + (s % kStages * kThreads + row) * kStride + c * 16), there ? b + (n0 + row) * p.ldb + k : b, there);
      }
      for (int i = threadIdx.x; i < kRows * kDepth / 4; i += kThreads) {
        const int row = i / (kDepth / 4);
        const int64_t k = k0 + i % (kDepth / 4) * 4;
        const bool there = m0 + row < p.m && k < p.k;
        copy16(shared_address(sa + s % kStages * kRows * kDepth + i * 4), there ? p.a + (m0 + row) * p.lda + k : p.a, there);
      }
    }
    copy_commit();
  };
  for (int s = 0; s + 1 < kStages; ++s) load(s);
  float sum[kRows] = {};
  for (int s = 0; s < slices; ++s) {
    copy_wait<kStages - 2>();
    __syncthreads();
    load(s + kStages - 1);
    const unsigned char* mine = sb + (s % kStages * kThreads + threadIdx.x) * kStride;
    const float* x = sa + s % kStages * kRows * kDepth;
    const int many = int(min(int64_t(kDepth), p.k - int64_t(s) * kDepth));
#pragma unroll 2
    for (int k = 0; k < many; k += kEach) {
      float w[kEach];
      if constexpr (sizeof(TB) == 2) {
        load8(reinterpret_cast<const nv_bf16*>(mine) + k, w);
      } else {
        const float4 v = *reinterpret_cast<const float4*>(mine + k * 4);
        w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int e = 0; e < kEach; e += 4) {
          const float4 v = *reinterpret_cast<const float4*>(x + r * kDepth + k + e);
          sum[r] = fmaf(v.w, w[e + 3], fmaf(v.z, w[e + 2], fmaf(v.y, w[e + 1], fmaf(v.x, w[e], sum[r]))));
        }
    }
  }
  const int64_t column = n0 + threadIdx.x;
  if (column >= p.n) return;
#pragma unroll
  for (int r = 0; r < kRows; ++r)
    if (m0 + r < p.m) {
      float* to = p.c + (m0 + r) * p.ldc + column;
      *to = p.accumulate ? *to + sum[r] : sum[r];
    }
}

template <class TB, int kRows, int kThreads, int kStages>
const char* launch(const Product& p, const TB* b, void* stream) {
  constexpr size_t bytes = kStages * (kThreads * kStride + kRows * kSlice / sizeof(TB) * 4);
  auto kernel = few_rows_kernel<TB, kRows, kThreads, kStages>;
  if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)); e != cudaSuccess)
    return cudaGetErrorString(e);
  kernel<<<dim3(blocks_for(p.n, kThreads), blocks_for(p.m, kRows)), kThreads, bytes, stream_of(stream)>>>(p, b);
  return launched();
}
template <class TB, int kRows>
const char* by_columns(const Product& p, const TB* b, void* stream) {
  return p.n >= 132 * 128 ? launch<TB, kRows, 128, 4>(p, b, stream) : launch<TB, kRows, 32, 8>(p, b, stream);
}
template <class TB>
const char* by_rows(const Product& p, const TB* b, void* stream) {
  return p.m <= 1   ? by_columns<TB, 1>(p, b, stream)
         : p.m <= 2 ? by_columns<TB, 2>(p, b, stream)
         : p.m <= 4 ? by_columns<TB, 4>(p, b, stream)
                    : by_columns<TB, 8>(p, b, stream);
}

}  // namespace

bool serves_few_rows(const Product& p, const void* b, bool bf16) {
  const uintptr_t lies = reinterpret_cast<uintptr_t>(p.a) | reinterpret_cast<uintptr_t>(b);
  return p.m <= kFewRowsMost && p.n >= 64 && !p.a_transposed && p.b_transposed && p.k % 8 == 0 && p.ldb % (bf16 ? 8 : 4) == 0 && p.lda % 4 == 0 &&
         lies % 16 == 0;
}
const char* few_rows(const Product& p, const void* b, bool bf16, void* stream) {
  return bf16 ? by_rows(p, static_cast<const nv_bf16*>(b), stream) : by_rows(p, static_cast<const float*>(b), stream);
}

}  // namespace k3::cuda

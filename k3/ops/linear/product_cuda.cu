// C = op(A) op(B), float32 on the CUDA cores: exact products, one rounding an addition. Bound: arithmetic for large products, reading B for
// few rows, latency for small ones. A block of 256 threads has a tile of C; slices of k of both operands lie in shared memory, transposed so
// that k is outermost, the next slice on its way in registers while this one is used.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "k3/ops/linear/product_cuda.h"

namespace k3::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
struct Operand {
  const T* p;
  int64_t outer, along;  // strides of the row (of C's m or n) and of k
};
__device__ __forceinline__ float widened(float x) { return x; }
__device__ __forceinline__ float widened(__nv_bfloat16 x) { return __bfloat162float(x); }

// A slice (kOuter, kDepth) of an operand through registers into shared memory. Threads run along k where k is contiguous, else along rows.
template <class T, int kOuter, int kDepth>
struct Slice {
  static constexpr int kEach = (kOuter * kDepth + kThreads - 1) / kThreads;
  float r[kEach];
  __device__ __forceinline__ static void place(int i, bool along_k, int& o, int& k) {
    if (along_k) o = i / kDepth, k = i % kDepth;
    else o = i % kOuter, k = i / kOuter;
  }
  __device__ __forceinline__ void load(const Operand<T>& x, int64_t o0, int64_t k0, int64_t rows, int64_t depth) {
    const bool along_k = x.along == 1;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      int o, k;
      place(threadIdx.x + j * kThreads, along_k, o, k);
      r[j] = o < kOuter && k < kDepth && o0 + o < rows && k0 + k < depth ? widened(x.p[(o0 + o) * x.outer + (k0 + k) * x.along]) : 0.f;
    }
  }
  __device__ __forceinline__ void store(float (*s)[kOuter + 1], bool along_k) const {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      int o, k;
      place(threadIdx.x + j * kThreads, along_k, o, k);
      if (o < kOuter && k < kDepth) s[k][o] = r[j];
    }
  }
};

// Thread (tm, tn) has rows tm, tm + kTm, ... and columns tn, tn + kTn, ... of the tile: neighbours read neighbouring words.
template <class TB, int kM, int kN, int kDepth, int kTm>
__global__ void __launch_bounds__(kThreads) product_kernel(Operand<float> a, Operand<TB> b, float* c, int64_t ldc, int64_t m, int64_t n, int64_t k, bool accumulate) {
  constexpr int kTn = kThreads / kTm, kR = kM / kTm, kC = kN / kTn;
  __shared__ float sa[2][kDepth][kM + 1], sb[2][kDepth][kN + 1];
  const int64_t m0 = int64_t(blockIdx.y) * kM, n0 = int64_t(blockIdx.x) * kN;
  const int tm = threadIdx.x / kTn, tn = threadIdx.x % kTn;
  Slice<float, kM, kDepth> ra;
  Slice<TB, kN, kDepth> rb;
  float sum[kR][kC] = {};
  ra.load(a, m0, 0, m, k), rb.load(b, n0, 0, n, k);
  ra.store(sa[0], a.along == 1), rb.store(sb[0], b.along == 1);
  __syncthreads();
  int now = 0;
  for (int64_t k0 = 0; k0 < k; k0 += kDepth, now ^= 1) {
    const bool more = k0 + kDepth < k;
    if (more) ra.load(a, m0, k0 + kDepth, m, k), rb.load(b, n0, k0 + kDepth, n, k);
#pragma unroll
    for (int q = 0; q < kDepth; ++q) {  // past k: zeros times zeros, which change no bit
      float x[kR], y[kC];
#pragma unroll
      for (int i = 0; i < kR; ++i) x[i] = sa[now][q][tm + i * kTm];
#pragma unroll
      for (int j = 0; j < kC; ++j) y[j] = sb[now][q][tn + j * kTn];
#pragma unroll
      for (int i = 0; i < kR; ++i)
#pragma unroll
        for (int j = 0; j < kC; ++j) sum[i][j] = fmaf(x[i], y[j], sum[i][j]);
    }
    if (more) ra.store(sa[now ^ 1], a.along == 1), rb.store(sb[now ^ 1], b.along == 1);
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kR; ++i)
#pragma unroll
    for (int j = 0; j < kC; ++j) {
      const int64_t row = m0 + tm + i * kTm, column = n0 + tn + j * kTn;
      if (row >= m || column >= n) continue;
      float* to = c + row * ldc + column;
      *to = accumulate ? *to + sum[i][j] : sum[i][j];
    }
}

template <class TB, int kM, int kN, int kDepth, int kTm>
void launch(const Product& p, const TB* b, cudaStream_t stream) {
  const Operand<float> oa{p.a, p.a_transposed ? 1 : p.lda, p.a_transposed ? p.lda : 1};
  const Operand<TB> ob{b, p.b_transposed ? p.ldb : 1, p.b_transposed ? 1 : p.ldb};
  const dim3 grid(unsigned((p.n + kN - 1) / kN), unsigned((p.m + kM - 1) / kM));
  product_kernel<TB, kM, kN, kDepth, kTm><<<grid, kThreads, 0, stream>>>(oa, ob, p.c, p.ldc, p.m, p.n, p.k, p.accumulate);
}

template <class TB>
const char* product_of(Product p, const TB* b, void* stream) {
  if (p.m <= 0 || p.n <= 0) return nullptr;
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  auto blocks = [&](int64_t m, int64_t n) { return (p.m + m - 1) / m * ((p.n + n - 1) / n); };
  if (p.m <= 16) launch<TB, 8, 32, 64, 8>(p, b, s);
  else if (blocks(128, 128) >= 132) launch<TB, 128, 128, 8, 16>(p, b, s);
  else if (blocks(64, 64) >= 100) launch<TB, 64, 64, 16, 16>(p, b, s);
  else launch<TB, 32, 32, 32, 16>(p, b, s);
  const cudaError_t e = cudaGetLastError();
  return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}

}  // namespace

const char* product(const Product& p, void* stream) { return product_of(p, p.b, stream); }
const char* product_bf16(const Product& p, const void* b, void* stream) { return product_of(p, static_cast<const __nv_bfloat16*>(b), stream); }

}  // namespace k3::cuda

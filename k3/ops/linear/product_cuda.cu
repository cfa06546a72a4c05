// C = op(A) op(B), float32 on the CUDA cores: exact products, one rounding an addition. Bound: arithmetic for large products, reading B for
// few rows, latency for small ones. A block of 256 threads has a tile of C; slices of k of both operands lie in shared memory, transposed so
// that k is outermost, the next slice on its way in registers while this one is used.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "k3/core/enqueue.cuh"
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
  template <int kStride>
  __device__ __forceinline__ void store(float (*s)[kStride], bool along_k) const {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      int o, k;
      place(threadIdx.x + j * kThreads, along_k, o, k);
      if (o < kOuter && k < kDepth) s[k][o] = r[j];
    }
  }
};

// A thread's share of one side of a tile: runs of kRun neighbours, read from shared memory at once, the runs of all threads side by side.
template <int kSide, int kThreadsOfSide>
struct Share {
  static constexpr int kEach = kSide / kThreadsOfSide, kRun = kEach < 4 ? kEach : 4;
  static constexpr int kStride = kSide + kRun;  // of a row in shared memory: keeps runs aligned and spreads columns over the banks
  __device__ __forceinline__ static int at(int thread, int i) { return i / kRun * kThreadsOfSide * kRun + thread * kRun + i % kRun; }
  __device__ __forceinline__ static void read(const float* s, int thread, float (&x)[kEach]) {
#pragma unroll
    for (int i = 0; i < kEach; i += kRun) {
      const float* p = s + at(thread, i);
      if constexpr (kRun == 4) {
        const float4 v = *reinterpret_cast<const float4*>(p);
        x[i] = v.x, x[i + 1] = v.y, x[i + 2] = v.z, x[i + 3] = v.w;
      } else if constexpr (kRun == 2) {
        const float2 v = *reinterpret_cast<const float2*>(p);
        x[i] = v.x, x[i + 1] = v.y;
      } else {
        x[i] = *p;
      }
    }
  }
};

template <class TB, int kM, int kN, int kDepth, int kTm>
__global__ void __launch_bounds__(kThreads, kM == 64 || kM == 32 ? 2 : 1) product_kernel(Operand<float> a, Operand<TB> b, float* c, int64_t ldc, int64_t m, int64_t n, int64_t k, bool accumulate) {
  follow();
  using Rows = Share<kM, kTm>;
  using Columns = Share<kN, kThreads / kTm>;
  constexpr int kTn = kThreads / kTm, kR = Rows::kEach, kC = Columns::kEach;
  __shared__ __align__(16) float sa[2][kDepth][Rows::kStride], sb[2][kDepth][Columns::kStride];
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
      Rows::read(sa[now][q], tm, x);
      Columns::read(sb[now][q], tn, y);
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
      const int64_t row = m0 + Rows::at(tm, i), column = n0 + Columns::at(tn, j);
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
  enqueue(product_kernel<TB, kM, kN, kDepth, kTm>, grid, kThreads, 0, stream, oa, ob, p.c, p.ldc, p.m, p.n, p.k, p.accumulate);
}

template <class TB>
const char* product_of(Product p, const TB* b, void* stream) {
  if (p.m <= 0 || p.n <= 0) return nullptr;
  if (serves_few_rows(p, b, sizeof(TB) == 2)) return few_rows(p, b, sizeof(TB) == 2, stream);
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

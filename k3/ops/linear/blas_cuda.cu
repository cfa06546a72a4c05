// cuBLASLt thinks in columns: C^T = op(B)^T op(A)^T, so its first matrix is our B and its second our A, each as it lies. The algorithm of a
// shape is asked for once.
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <tuple>

#include "k3/core/block.cuh"
#include "k3/core/tile.cuh"
#include "k3/ops/linear/blas_cuda.h"

namespace k3::cuda {
namespace {

constexpr size_t kWorkspace = size_t(32) << 20;

struct Plan {
  cublasLtMatmulDesc_t product = nullptr;
  cublasLtMatrixLayout_t first = nullptr, second = nullptr, result = nullptr;
  cublasLtMatmulAlgo_t algorithm;
  bool found = false;
};

struct Library {
  cublasLtHandle_t handle = nullptr;
  std::map<void*, void*> workspaces;  // of each stream: their products run side by side
  const char* problem = nullptr;
  std::mutex mutex;
  using Key = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, bool, bool, bool, int64_t, int64_t, int64_t, int64_t>;
  std::map<Key, Plan> plans;
  Library() {
    if (cublasLtCreate(&handle) != CUBLAS_STATUS_SUCCESS) problem = "[linear] cuBLASLt does not start";
  }
  void* workspace(void* stream) {
    std::lock_guard lock(mutex);
    void*& w = workspaces[stream];
    if (!w && cudaMalloc(&w, kWorkspace) != cudaSuccess) cudaGetLastError(), w = nullptr;
    return w;
  }
  Plan& plan(const BlasProducts& w) {
    std::lock_guard lock(mutex);
    const Product& p = w.p;
    auto [at, fresh] = plans.try_emplace({p.m, p.n, p.k, p.lda, p.ldb, p.ldc, p.a_transposed, p.b_transposed, w.beta != 0, w.bf16_result, w.count, w.a_step,
                                          w.b_step, w.c_step});
    Plan& q = at->second;
    if (!fresh) return q;
    const cublasOperation_t of_first = p.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N, of_second = p.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasLtMatmulDescCreate(&q.product, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    cublasLtMatmulDescSetAttribute(q.product, CUBLASLT_MATMUL_DESC_TRANSA, &of_first, sizeof of_first);
    cublasLtMatmulDescSetAttribute(q.product, CUBLASLT_MATMUL_DESC_TRANSB, &of_second, sizeof of_second);
    cublasLtMatrixLayoutCreate(&q.first, CUDA_R_16BF, uint64_t(p.b_transposed ? p.k : p.n), uint64_t(p.b_transposed ? p.n : p.k), p.ldb);
    cublasLtMatrixLayoutCreate(&q.second, CUDA_R_16BF, uint64_t(p.a_transposed ? p.m : p.k), uint64_t(p.a_transposed ? p.k : p.m), p.lda);
    cublasLtMatrixLayoutCreate(&q.result, w.bf16_result ? CUDA_R_16BF : CUDA_R_32F, uint64_t(p.n), uint64_t(p.m), p.ldc);
    const int32_t batch = int32_t(w.count);
    for (auto [layout, step] : {std::pair{q.first, w.b_step}, {q.second, w.a_step}, {q.result, w.c_step}}) {
      cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof batch);
      cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &step, sizeof step);
    }
    cublasLtMatmulPreference_t wish;
    cublasLtMatmulPreferenceCreate(&wish);
    const size_t room = kWorkspace;
    cublasLtMatmulPreferenceSetAttribute(wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &room, sizeof room);
    const uint32_t align = 16;
    for (auto which : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                       CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
      cublasLtMatmulPreferenceSetAttribute(wish, which, &align, sizeof align);
    cublasLtMatmulHeuristicResult_t best;
    int count = 0;
    const auto status = cublasLtMatmulAlgoGetHeuristic(handle, q.product, q.first, q.second, q.result, q.result, wish, 1, &best, &count);
    cublasLtMatmulPreferenceDestroy(wish);
    q.found = status == CUBLAS_STATUS_SUCCESS && count > 0;
    if (q.found) q.algorithm = best.algo;
    return q;
  }
};

__global__ void __launch_bounds__(256) narrow_kernel(const float* from, __nv_bfloat16* to, int64_t n) {
  const int64_t i = (int64_t(blockIdx.x) * 256 + threadIdx.x) * 4;
  if (i + 4 <= n) {
    const float4 x = *reinterpret_cast<const float4*>(from + i);
    __nv_bfloat162 low = __floats2bfloat162_rn(x.x, x.y), high = __floats2bfloat162_rn(x.z, x.w);
    uint2 y;
    memcpy(&y.x, &low, 4), memcpy(&y.y, &high, 4);
    *reinterpret_cast<uint2*>(to + i) = y;
  } else {
    for (int64_t j = i; j < n; ++j) to[j] = __float2bfloat16_rn(from[j]);
  }
}

__global__ void __launch_bounds__(256) sides_kernel(const Sides from, int64_t count, int64_t rows, int64_t n, nv_bf16* to) {
  const int64_t i = (int64_t(blockIdx.x) * 256 + threadIdx.x) * 8, width = count * n;
  if (i >= rows * width) return;
  const int64_t r = i / width, c = i % width;
  const float* side = from.from[0];
#pragma unroll
  for (int j = 1; j < kMostSides; ++j)
    if (c / n == j) side = from.from[j];
  float x[8];
  load8(side + r * n + c % n, x);
  store8(to + i, x);
}

}  // namespace

const char* blas_products(const BlasProducts& w, void* stream) {
  if (w.p.m <= 0 || w.p.n <= 0 || w.count <= 0) return nullptr;
  static Library library;
  if (library.problem) return library.problem;
  const Plan& q = library.plan(w);
  if (!q.found) return "[linear] cuBLASLt has no product of this shape; leave out --bf16";
  void* workspace = library.workspace(stream);
  if (!workspace) return "[linear] no room for 32 MB of cuBLASLt's workspace";
  const auto status = cublasLtMatmul(library.handle, q.product, &w.alpha, w.b, q.first, w.a, q.second, &w.beta, w.c, q.result, w.result, q.result, &q.algorithm,
                                     workspace, kWorkspace, stream_of(stream));
  return status == CUBLAS_STATUS_SUCCESS ? nullptr : cublasLtGetStatusString(status);
}

const char* blas_product(const Product& p, const void* a, const void* b, void* stream) {
  return blas_products({p, a, b, p.c, p.c, false, 1, p.accumulate ? 1.f : 0.f}, stream);
}

const char* narrow_side_by_side(const Sides& from, int64_t count, int64_t rows, int64_t n, void* to, void* stream) {
  if (rows) sides_kernel<<<blocks_for(rows * count * n, 2048), 256, 0, stream_of(stream)>>>(from, count, rows, n, static_cast<nv_bf16*>(to));
  return launched();
}
const char* narrow(const float* from, void* to, int64_t n, void* stream) {
  if (n == 0) return nullptr;
  narrow_kernel<<<blocks_for(n, 1024), 256, 0, stream_of(stream)>>>(from, static_cast<__nv_bfloat16*>(to), n);
  return launched();
}

}  // namespace k3::cuda

// cuBLASLt thinks in columns: C^T = op(B)^T op(A)^T, so its first matrix is our B and its second our A, each as it lies. The algorithm of a
// shape is asked for once, and once more when the shape comes often.
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <map>
#include <mutex>
#include <tuple>

#include "k3/core/enqueue.cuh"
#include "k3/core/tile.cuh"
#include "k3/ops/linear/blas_cuda.h"

namespace k3::cuda {
namespace {

constexpr size_t kWorkspace = size_t(32) << 20;
constexpr int kAlgorithms = 8;  // among which a shape that comes often chooses

struct Plan {
  cublasLtMatmulDesc_t product = nullptr;
  cublasLtMatrixLayout_t first = nullptr, second = nullptr, result = nullptr;
  cublasLtMatmulAlgo_t algorithms[kAlgorithms];
  int found = 0, chosen = 0;
  int64_t uses = 0;
};

__global__ void __launch_bounds__(256) random_kernel(nv_bf16* to, int64_t n, uint32_t seed) {
  for (int64_t i = int64_t(blockIdx.x) * 256 + threadIdx.x; i < n; i += int64_t(gridDim.x) * 256) {
    uint32_t x = uint32_t(i) * 2654435761u + seed;
    x ^= x >> 15, x *= 2246822519u, x ^= x >> 13, x *= 3266489917u, x ^= x >> 16;
    to[i] = __float2bfloat16_rn(float(x & 0xffff) / 32768.f - 1.f);
  }
}
__global__ void __launch_bounds__(256) differences_kernel(const uint32_t* a, const uint32_t* b, int64_t n, uint32_t* any) {
  bool differ = false;
  for (int64_t i = int64_t(blockIdx.x) * 256 + threadIdx.x; i < n; i += int64_t(gridDim.x) * 256) differ |= a[i] != b[i];
  if (differ) *any = 1;
}

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
    cublasLtMatmulHeuristicResult_t list[kAlgorithms];
    int count = 0;
    const auto status = cublasLtMatmulAlgoGetHeuristic(handle, q.product, q.first, q.second, q.result, q.result, wish, kAlgorithms, list, &count);
    cublasLtMatmulPreferenceDestroy(wish);
    if (status == CUBLAS_STATUS_SUCCESS)
      for (int i = 0; i < count; ++i) q.algorithms[q.found++] = list[i].algo;
    return q;
  }
  cublasStatus_t run(const Plan& q, int algorithm, const BlasProducts& w, void* room, cudaStream_t stream) {
    return cublasLtMatmul(handle, q.product, &w.alpha, w.b, q.first, w.a, q.second, &w.beta, w.c, q.result, w.result, q.result, &q.algorithms[algorithm], room, kWorkspace,
                          stream);
  }
  // On a stream and matrices of its own, so it may run while a graph is captured. Where there is no room, the first algorithm stays.
  void choose(Plan& q, BlasProducts w) {
    static cudaStream_t stream = nullptr;
    static cudaEvent_t begin, end;
    if (!stream && (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess || cudaEventCreate(&begin) != cudaSuccess || cudaEventCreate(&end) != cudaSuccess)) return;
    const Product& p = w.p;
    auto extent = [&](int64_t rows, int64_t ld, int64_t step) { return ((w.count - 1) * step + rows * ld + 127) / 128 * 128; };
    const int64_t a = extent(p.a_transposed ? p.k : p.m, p.lda, w.a_step), b = extent(p.b_transposed ? p.n : p.k, p.ldb, w.b_step);
    const size_t result = size_t(extent(p.m, p.ldc, w.c_step)) * (w.bf16_result ? 2 : 4);
    char* room = nullptr;
    void* work = workspace(stream);
    if (!work || cudaMallocAsync(reinterpret_cast<void**>(&room), size_t(2 * (a + b)) + 2 * result + 256, stream) != cudaSuccess) {
      cudaGetLastError();
      return;
    }
    nv_bf16 *as = reinterpret_cast<nv_bf16*>(room), *bs = as + a;
    char *first = reinterpret_cast<char*>(bs + b), *other = first + result;
    uint32_t* any = reinterpret_cast<uint32_t*>(other + result);
    random_kernel<<<528, 256, 0, stream>>>(as, a, 1), random_kernel<<<528, 256, 0, stream>>>(bs, b, 77);
    w.a = as, w.b = bs;
    const int times = 2.0 * double(p.m) * double(p.n) * double(p.k) * double(w.count) > 1e11 ? 2 : 12;
    float best = INFINITY;
    for (int i = 0; i < q.found; ++i) {
      w.c = w.result = i ? other : first;
      cudaMemsetAsync(w.result, 0, result, stream), cudaMemsetAsync(any, 0, 4, stream);
      uint32_t differ = 0;
      bool fails = run(q, i, w, work, stream) != CUBLAS_STATUS_SUCCESS;
      if (i) differences_kernel<<<528, 256, 0, stream>>>(reinterpret_cast<uint32_t*>(first), reinterpret_cast<uint32_t*>(other), int64_t(result / 4), any);
      fails |= cudaMemcpyAsync(&differ, any, 4, cudaMemcpyDeviceToHost, stream) != cudaSuccess || cudaStreamSynchronize(stream) != cudaSuccess;
      if (fails || differ) continue;
      if (i == 0) w.c = w.result = other;  // `first` stays
      for (int t = 0; t < 3; ++t) {
        cudaEventRecord(begin, stream);
        for (int j = 0; j < times; ++j) run(q, i, w, work, stream);
        cudaEventRecord(end, stream);
        float ms = INFINITY;
        if (cudaEventSynchronize(end) == cudaSuccess) cudaEventElapsedTime(&ms, begin, end);
        if (ms < 0.99f * best || (ms < best && q.chosen == i)) best = ms, q.chosen = i;
      }
    }
    cudaFreeAsync(room, stream), cudaStreamSynchronize(stream);
    cudaGetLastError();
  }
};

__global__ void __launch_bounds__(256) narrow_kernel(const float* from, __nv_bfloat16* to, int64_t n) {
  follow();
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
  follow();
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
  Plan& q = library.plan(w);
  if (!q.found) return "[linear] cuBLASLt has no product of this shape; leave out --bf16";
  if (w.often && ++q.uses == 2) library.choose(q, w);
  void* workspace = library.workspace(stream);
  if (!workspace) return "[linear] no room for 32 MB of cuBLASLt's workspace";
  const auto status = library.run(q, q.chosen, w, workspace, stream_of(stream));
  return status == CUBLAS_STATUS_SUCCESS ? nullptr : cublasLtGetStatusString(status);
}

const char* blas_product(const Product& p, const void* a, const void* b, void* stream, bool often) {
  return blas_products({p, a, b, p.c, p.c, false, 1, p.accumulate ? 1.f : 0.f, 1, 0, 0, 0, often}, stream);
}

const char* narrow_side_by_side(const Sides& from, int64_t count, int64_t rows, int64_t n, void* to, void* stream) {
  if (rows) enqueue(sides_kernel, blocks_for(rows * count * n, 2048), 256, 0, stream_of(stream), from, count, rows, n, static_cast<nv_bf16*>(to));
  return launched();
}
const char* narrow(const float* from, void* to, int64_t n, void* stream) {
  if (n == 0) return nullptr;
  enqueue(narrow_kernel, blocks_for(n, 1024), 256, 0, stream_of(stream), from, static_cast<__nv_bfloat16*>(to), n);
  return launched();
}

}  // namespace k3::cuda

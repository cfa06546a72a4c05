// A block a row, three reads: maximum, sum of exponentials, gradient. Every thread sums its columns in order, then lanes in a tree and warps
// in order: 163,840 columns are 160 terms a thread. -log p is (max - l) + log(sum e^{l - max}): exact zeros and small losses keep their digits.
#include "k3/core/enqueue.cuh"
#include "k3/core/tile.cuh"
#include "k3/ops/loss/loss_float_cuda.h"

namespace k3::cuda {
namespace {

constexpr int kThreads = 1024;

__device__ __forceinline__ float row_max(const float* l, int64_t n, float* part) {
  float top = -INFINITY;
  for (int64_t i = threadIdx.x; i < n; i += kThreads) top = fmaxf(top, l[i]);
  return block_max_f32(top, part);
}
__device__ __forceinline__ float row_sum(const float* l, int64_t n, float top, float* part) {
  float sum = 0.f;
  for (int64_t i = threadIdx.x; i < n; i += kThreads) sum += expf(l[i] - top);
  return block_sum_f32(sum, part);
}

__global__ void __launch_bounds__(kThreads) cross_entropy_kernel(const cpu::CrossEntropyArgs a) {
  follow();
  __shared__ float part[33];
  float* l = a.logits + int64_t(blockIdx.x) * a.vocabulary;
  const int32_t target = a.targets[blockIdx.x];
  const float top = row_max(l, a.vocabulary, part), gap = top - l[target], sum = row_sum(l, a.vocabulary, top, part);
  if (threadIdx.x == 0) a.loss[blockIdx.x] = gap + logf(sum);
  if (!a.gradient) return;
  const float scale = a.weight / sum;
  for (int64_t i = threadIdx.x; i < a.vocabulary; i += kThreads) l[i] = expf(l[i] - top) * scale - (i == target ? a.weight : 0.f);
}

__global__ void __launch_bounds__(kThreads) log_softmax_kernel(const cpu::LogSoftmaxArgs a) {
  follow();
  __shared__ float part[33];
  const float* l = a.logits + int64_t(blockIdx.x) * a.vocabulary;
  float* out = a.out + int64_t(blockIdx.x) * a.vocabulary;
  const float top = row_max(l, a.vocabulary, part), log_sum = logf(row_sum(l, a.vocabulary, top, part));
  for (int64_t i = threadIdx.x; i < a.vocabulary; i += kThreads) out[i] = -((top - l[i]) + log_sum);
}

__global__ void __launch_bounds__(256) gather_kernel(const float* from, const int32_t* row, float* to, int64_t d) {
  follow();
  for (int64_t i = threadIdx.x; i < d; i += 256) to[blockIdx.x * d + i] = from[row[blockIdx.x] * d + i];
}
__global__ void __launch_bounds__(256) gather_bf16_kernel(const float* from, const int32_t* row, nv_bf16* to, int64_t d) {
  follow();
  for (int64_t i = threadIdx.x * 8; i < d; i += 2048) {
    float x[8];
    load8(from + row[blockIdx.x] * d + i, x);
    store8(to + blockIdx.x * d + i, x);
  }
}
__global__ void __launch_bounds__(256) scatter_kernel(const float* from, const int32_t* row, float* to, int64_t d, bool add) {
  follow();
  for (int64_t i = threadIdx.x; i < d; i += 256) {
    float* at = to + row[blockIdx.x] * d + i;
    *at = add ? *at + from[blockIdx.x * d + i] : from[blockIdx.x * d + i];
  }
}

}  // namespace

const char* cross_entropy(const cpu::CrossEntropyArgs& a, void* stream) {
  if (a.rows) enqueue(cross_entropy_kernel, unsigned(a.rows), kThreads, 0, stream_of(stream), a);
  return launched();
}
const char* log_softmax(const cpu::LogSoftmaxArgs& a, void* stream) {
  if (a.rows) enqueue(log_softmax_kernel, unsigned(a.rows), kThreads, 0, stream_of(stream), a);
  return launched();
}
const char* gather_rows(const float* from, const int32_t* row, float* to, int64_t n, int64_t d, void* stream) {
  if (n) enqueue(gather_kernel, unsigned(n), 256, 0, stream_of(stream), from, row, to, d);
  return launched();
}
const char* gather_rows_bf16(const float* from, const int32_t* row, void* to, int64_t n, int64_t d, void* stream) {
  if (n) enqueue(gather_bf16_kernel, unsigned(n), 256, 0, stream_of(stream), from, row, static_cast<nv_bf16*>(to), d);
  return launched();
}
const char* scatter_rows(const float* from, const int32_t* row, float* to, int64_t n, int64_t d, bool add, void* stream) {
  if (n) enqueue(scatter_kernel, unsigned(n), 256, 0, stream_of(stream), from, row, to, d, add);
  return launched();
}

}  // namespace k3::cuda

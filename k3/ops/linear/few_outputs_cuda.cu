// Bound by memory. dx: a block has 64 rows, a thread columns of all of them, its column of W in registers. dW: the same, a chain over the rows for each
// output; then the blocks' sums in order.
#include "k3/core/block.cuh"
#include "k3/ops/linear/few_outputs_cuda.h"

namespace k3::cuda {
namespace {

constexpr int kThreads = 128, kMost = int(kFewOutputs), kRows = int(kFewRows);

// dy (rows, N) of this block's rows; zeros behind the outputs and the rows; how many rows there are
template <int N>
__device__ __forceinline__ int gather(const FewOutputs& a, int64_t r0, float (&dy)[kRows][N]) {
  const int rows = int(min(int64_t(kRows), a.rows - r0)), out = int(a.out);
  for (int i = threadIdx.x; i < kRows * N; i += kThreads) dy[i / N][i % N] = i / N < rows && i % N < out ? a.dy[(r0 + i / N) * a.out + i % N] : 0.f;
  __syncthreads();
  return rows;
}

template <int N>  // at least the outputs
__global__ void __launch_bounds__(kThreads) dx_kernel(const FewOutputs a, bool accumulate) {
  __shared__ float dy[kRows][N];
  const int64_t r0 = int64_t(blockIdx.x) * kRows, c = int64_t(blockIdx.y) * kThreads + threadIdx.x;
  const int rows = gather(a, r0, dy), out = int(a.out);
  if (c >= a.in) return;
  float w[N];
#pragma unroll
  for (int o = 0; o < N; ++o) w[o] = o < out ? a.w[o * a.in + c] : 0.f;
#pragma unroll 4
  for (int r = 0; r < rows; ++r) {
    float sum = 0.f;
#pragma unroll
    for (int o = 0; o < N; ++o) sum = fmaf(dy[r][o], w[o], sum);
    float* to = a.dx + (r0 + r) * a.in + c;
    *to = accumulate ? *to + sum : sum;
  }
}

template <int N>
__global__ void __launch_bounds__(kThreads) dw_kernel(const FewOutputs a) {
  __shared__ float dy[kRows][N];
  const int64_t r0 = int64_t(blockIdx.x) * kRows, c = int64_t(blockIdx.y) * kThreads + threadIdx.x;
  const int rows = gather(a, r0, dy), out = int(a.out);
  if (c >= a.in) return;
  float sum[N] = {};
#pragma unroll 8
  for (int r = 0; r < rows; ++r) {
    const float x = a.x[(r0 + r) * a.in + c];
#pragma unroll
    for (int o = 0; o < N; ++o) sum[o] = fmaf(dy[r][o], x, sum[o]);
  }
#pragma unroll
  for (int o = 0; o < N; ++o)
    if (o < out) a.partial[(int64_t(blockIdx.x) * a.out + o) * a.in + c] = sum[o];
}
__global__ void __launch_bounds__(kThreads) join_kernel(const FewOutputs a, int64_t parts) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x, n = a.out * a.in;
  if (i >= n) return;
  float sum = 0.f;
#pragma unroll 8
  for (int64_t p = 0; p < parts; ++p) sum += a.partial[p * n + i];
  a.dw[i] += sum;
}

template <class F>
void with_outputs(int64_t out, F f) {
  if (out <= 8) f.template operator()<8>();
  else if (out <= 16) f.template operator()<16>();
  else f.template operator()<kMost>();
}
dim3 grid_of(const FewOutputs& a) { return dim3(unsigned(few_outputs_parts(a.rows)), blocks_for(a.in, kThreads)); }
const char* refuse(const FewOutputs& a) { return a.out > kFewOutputs ? "[linear] the kernels for few outputs serve up to 32" : nullptr; }

}  // namespace

const char* few_outputs_dx(const FewOutputs& a, bool accumulate, void* stream) {
  if (const char* e = refuse(a)) return e;
  if (a.rows) with_outputs(a.out, [&]<int N>() { dx_kernel<N><<<grid_of(a), kThreads, 0, stream_of(stream)>>>(a, accumulate); });
  return launched();
}
const char* few_outputs_dw(const FewOutputs& a, void* stream) {
  if (const char* e = refuse(a)) return e;
  if (a.rows == 0 || a.out == 0) return nullptr;
  with_outputs(a.out, [&]<int N>() { dw_kernel<N><<<grid_of(a), kThreads, 0, stream_of(stream)>>>(a); });
  join_kernel<<<blocks_for(a.out * a.in, kThreads), kThreads, 0, stream_of(stream)>>>(a, few_outputs_parts(a.rows));
  return launched();
}

}  // namespace k3::cuda

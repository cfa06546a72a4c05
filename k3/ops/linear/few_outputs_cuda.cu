// Bound by memory. y: a warp has a few rows, its lanes every 32nd four of them, and their sums are joined in a tree: a row's bits are its own. dx: a
// block has 64 rows, a thread columns of all of them, its column of W in registers. dW: the same, a chain over the rows for each output; then the
// blocks' sums in order.
#include "k3/core/enqueue.cuh"
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
__global__ void __launch_bounds__(kThreads) forward_kernel(const FewOutputs a) {
  follow();
  constexpr int R = kMost / N;  // rows of a warp
  const int lane = threadIdx.x & 31, out = int(a.out);
  const int64_t r0 = (int64_t(blockIdx.x) * (kThreads / 32) + (threadIdx.x >> 5)) * R, fours = a.in / 4;
  float sum[R][N] = {};
#pragma unroll 2
  for (int64_t i = lane; i < fours; i += 32) {
    float4 x[R];
#pragma unroll
    for (int r = 0; r < R; ++r) x[r] = r0 + r < a.rows ? reinterpret_cast<const float4*>(a.x + (r0 + r) * a.in)[i] : make_float4(0, 0, 0, 0);
#pragma unroll
    for (int o = 0; o < N; ++o) {
      const float4 w = o < out ? reinterpret_cast<const float4*>(a.w + o * a.in)[i] : make_float4(0, 0, 0, 0);
#pragma unroll
      for (int r = 0; r < R; ++r) sum[r][o] = fmaf(x[r].x, w.x, fmaf(x[r].y, w.y, fmaf(x[r].z, w.z, fmaf(x[r].w, w.w, sum[r][o]))));
    }
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
    float mine = 0.f;  // lane o has output o
#pragma unroll
    for (int o = 0; o < N; ++o) {
      float x = sum[r][o];
#pragma unroll
      for (int s = 16; s > 0; s >>= 1) x += __shfl_xor_sync(~0u, x, s);
      if (lane == o) mine = x;
    }
    if (r0 + r < a.rows && lane < out) a.y[(r0 + r) * a.out + lane] = mine;
  }
}

template <int N>
__global__ void __launch_bounds__(kThreads) dx_kernel(const FewOutputs a, bool accumulate) {
  follow();
  __shared__ float dy[kRows][N];
  const int64_t r0 = int64_t(blockIdx.x) * kRows, c = int64_t(blockIdx.y) * kThreads + threadIdx.x;
  const int rows = gather(a, r0, dy), out = int(a.out);
  if (c >= a.in) return;
  float w[N];
#pragma unroll
  for (int o = 0; o < N; ++o) w[o] = o < out ? a.w[o * a.in + c] : 0.f;
  constexpr int kBatch = 8;  // rows whose loads are on their way before the first is stored
  float* to = a.dx + r0 * a.in + c;
  for (int r1 = 0; r1 < rows; r1 += kBatch) {
    float sum[kBatch], before[kBatch] = {};
    if (accumulate)
#pragma unroll
      for (int r = 0; r < kBatch; ++r)
        if (r1 + r < rows) before[r] = to[(r1 + r) * a.in];
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
      sum[r] = 0.f;
#pragma unroll
      for (int o = 0; o < N; ++o) sum[r] = fmaf(dy[r1 + r][o], w[o], sum[r]);
    }
#pragma unroll
    for (int r = 0; r < kBatch; ++r)
      if (r1 + r < rows) to[(r1 + r) * a.in] = accumulate ? before[r] + sum[r] : sum[r];
  }
}

template <int N>
__global__ void __launch_bounds__(kThreads) dw_kernel(const FewOutputs a) {
  follow();
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
  follow();
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

const char* few_outputs_forward(const FewOutputs& a, void* stream) {
  if (const char* e = refuse(a)) return e;
  if (a.in % 4) return "[linear] the kernel for few outputs reads four inputs at a time";
  if (a.rows == 0 || a.out == 0) return nullptr;
  with_outputs(a.out, [&]<int N>() { enqueue(forward_kernel<N>, blocks_for(a.rows, kThreads / 32 * (kMost / N)), kThreads, 0, stream_of(stream), a); });
  return launched();
}
const char* few_outputs_dx(const FewOutputs& a, bool accumulate, void* stream) {
  if (const char* e = refuse(a)) return e;
  if (a.rows) with_outputs(a.out, [&]<int N>() { enqueue(dx_kernel<N>, grid_of(a), kThreads, 0, stream_of(stream), a, accumulate); });
  return launched();
}
const char* few_outputs_dw(const FewOutputs& a, void* stream) {
  if (const char* e = refuse(a)) return e;
  if (a.rows == 0 || a.out == 0) return nullptr;
  with_outputs(a.out, [&]<int N>() { enqueue(dw_kernel<N>, grid_of(a), kThreads, 0, stream_of(stream), a); });
  enqueue(join_kernel, blocks_for(a.out * a.in, kThreads), kThreads, 0, stream_of(stream), a, few_outputs_parts(a.rows));
  return launched();
}

}  // namespace k3::cuda

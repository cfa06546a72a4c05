// Bound: bytes. Split: a tensor of the list is a row of the grid, kSumParts blocks walk over it.
#include "k3/core/tile.cuh"
#include "k3/ops/update/update_float_cuda.h"

namespace k3::cuda {
namespace {

constexpr int kThreads = 256;

const char* result() {
  cudaError_t e = cudaGetLastError();
  return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}
dim3 grid_of(int64_t count) { return dim3(unsigned(kSumParts), unsigned(count)); }
const char* too_many(int64_t count) { return count > 65535 ? "[update] a list has more than 65535 tensors" : nullptr; }

template <class F>
__device__ __forceinline__ void each(int64_t n, F f) {
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < n; i += kSumParts * kThreads) f(i);
}

// The threads' values in order of a fixed tree.
__device__ double block_sum(double x) {
  __shared__ double part[kThreads];
  part[threadIdx.x] = x;
  for (int s = kThreads / 2; s > 0; s >>= 1) {
    __syncthreads();
    if (int(threadIdx.x) < s) part[threadIdx.x] += part[threadIdx.x + s];
  }
  __syncthreads();
  return part[0];
}

__global__ void __launch_bounds__(kThreads) squares_kernel(const Listed* list, double* partial) {
  const Listed t = list[blockIdx.y];
  double sum = 0;
  each(t.n, [&](int64_t i) { sum += double(t.x[i]) * double(t.x[i]); });
  sum = block_sum(sum);
  if (threadIdx.x == 0) partial[int64_t(blockIdx.y) * kSumParts + blockIdx.x] = sum;
}
__global__ void __launch_bounds__(kThreads) total_kernel(const double* partial, double* sums) {
  const double sum = block_sum(threadIdx.x < kSumParts ? partial[int64_t(blockIdx.x) * kSumParts + threadIdx.x] : 0.0);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}
__global__ void __launch_bounds__(kThreads) divide_kernel(const Listed* list, const double* sums, double eps) {
  const Listed t = list[blockIdx.y];
  const float factor = float(1 / (sqrt(sums[blockIdx.y]) + eps));
  each(t.n, [&](int64_t i) { t.x[i] = factor * t.x[i]; });
}

__global__ void __launch_bounds__(kThreads) momentum_kernel(const MuonPiece* list, float mu, float s, bool nesterov, const StepGate* gate) {
  const MuonPiece p = list[blockIdx.y];
  if (gate && !gate->finite) return;
  if (gate) s = gate->scale;
  each(p.n, [&](int64_t i) {
    const float g = s * p.grad[i], m = __fmaf_rn(mu, p.momentum[i], g);
    p.momentum[i] = m;
    p.x[i] = nesterov ? __fmaf_rn(mu, m, g) : m;
  });
}
__global__ void __launch_bounds__(kThreads) apply_kernel(const MuonPiece* list, float lr, float decay, const StepGate* gate) {
  const MuonPiece p = list[blockIdx.y];
  if (gate && !gate->finite) return;
  if (gate) lr = gate->rates.muon_lr;
  const float step = lr * p.step, shrink = lr * decay;
  each(p.n, [&](int64_t i) { p.weight[i] = p.weight[i] - __fmaf_rn(step, p.x[i], shrink * p.weight[i]); });
}

__global__ void __launch_bounds__(kThreads) combine_kernel(const SquareMatrix* list, float a, float b, float c) {
  const SquareMatrix q = list[blockIdx.y];
  each(q.m * q.m, [&](int64_t i) {
    const float z = __fmaf_rn(b, q.s[i], c * q.z[i]);
    q.z[i] = i % (q.m + 1) == 0 ? z + a : z;
  });
}
__global__ void __launch_bounds__(kThreads) mirror_kernel(const SquareMatrix* list) {  // a block: tiles of 32 x 32 through shared memory
  __shared__ float x[32][33];
  const SquareMatrix q = list[blockIdx.y];
  const int64_t side = (q.m + 31) / 32, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (int64_t t = blockIdx.x; t < side * side; t += kSumParts) {
    const int64_t i0 = t / side * 32, j0 = t % side * 32;  // from rows i, columns j <= i
    if (j0 > i0) continue;
    __syncthreads();
    for (int64_t r = warp; r < 32; r += 8)
      if (i0 + r < q.m && j0 + lane < q.m) x[r][lane] = q.z[(i0 + r) * q.m + j0 + lane];
    __syncthreads();
    for (int64_t r = warp; r < 32; r += 8)
      if (j0 + r < q.m && i0 + lane < q.m && i0 + lane > j0 + r) q.z[(j0 + r) * q.m + i0 + lane] = x[lane][r];
  }
}

__global__ void __launch_bounds__(kThreads) scale_kernel(float* x, float s, int64_t n) {
  each(n, [&](int64_t i) { x[i] = s * x[i]; });
}

}  // namespace

const char* sums_of_squares(const Listed* list, int64_t count, double* partial, double* sums, void* stream) {
  if (count == 0) return nullptr;
  if (const char* e = too_many(count)) return e;
  squares_kernel<<<grid_of(count), kThreads, 0, cudaStream_t(stream)>>>(list, partial);
  total_kernel<<<unsigned(count), kThreads, 0, cudaStream_t(stream)>>>(partial, sums);
  return result();
}
const char* divide_by_norms(const Listed* list, int64_t count, const double* sums, double eps, void* stream) {
  if (const char* e = too_many(count)) return e;
  if (count) divide_kernel<<<grid_of(count), kThreads, 0, cudaStream_t(stream)>>>(list, sums, eps);
  return result();
}
const char* muon_momentum(const MuonPiece* list, int64_t count, float mu, float s, bool nesterov, const StepGate* gate, void* stream) {
  if (const char* e = too_many(count)) return e;
  if (count) momentum_kernel<<<grid_of(count), kThreads, 0, cudaStream_t(stream)>>>(list, mu, s, nesterov, gate);
  return result();
}
const char* muon_apply(const MuonPiece* list, int64_t count, float lr, float decay, const StepGate* gate, void* stream) {
  if (const char* e = too_many(count)) return e;
  if (count) apply_kernel<<<grid_of(count), kThreads, 0, cudaStream_t(stream)>>>(list, lr, decay, gate);
  return result();
}
const char* combine(const SquareMatrix* list, int64_t count, float a, float b, float c, void* stream) {
  if (const char* e = too_many(count)) return e;
  if (count) combine_kernel<<<grid_of(count), kThreads, 0, cudaStream_t(stream)>>>(list, a, b, c);
  return result();
}
const char* mirror(const SquareMatrix* list, int64_t count, void* stream) {
  if (const char* e = too_many(count)) return e;
  if (count) mirror_kernel<<<grid_of(count), kThreads, 0, cudaStream_t(stream)>>>(list);
  return result();
}
const char* scale(float* x, float s, int64_t n, void* stream) {
  if (n) scale_kernel<<<unsigned(kSumParts), kThreads, 0, cudaStream_t(stream)>>>(x, s, n);
  return result();
}

}  // namespace k3::cuda

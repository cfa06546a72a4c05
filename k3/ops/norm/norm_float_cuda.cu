// Bound by memory. A row's sums are made by a warp (narrow rows) or a block, in an order that its width alone decides. dw: the rows of a
// block of kNormBlock are walked in order by the threads that own columns, and then the blocks' sums are added in order.
#include "k3/core/block.cuh"
#include "k3/ops/norm/norm_float_cuda.h"

namespace k3::cuda {
namespace {

constexpr int kWide = 256, kNarrow = 32;  // threads of a row
constexpr int64_t kNarrowWidth = 256;

template <int kThreads>
__device__ __forceinline__ float row_sum(float x, float* part) {
  if constexpr (kThreads > 32) {
    return block_sum_f32(x, part);
  } else {
#pragma unroll
    for (int s = 16; s > 0; s >>= 1) x += __shfl_xor_sync(~0u, x, s);
    return x;
  }
}

// 256 threads; a row has kThreads of them
template <Norm kind, int kThreads>
__global__ void __launch_bounds__(256) forward_kernel(const cpu::NormArgs a) {
  __shared__ float part[33];
  const int t = threadIdx.x % kThreads;
  const int64_t n = int64_t(blockIdx.x) * (256 / kThreads) + threadIdx.x / kThreads;
  if (n >= a.rows) return;  // whole warps, and blocks where a row is a block
  const float* x = a.x + n * a.d;
  float square = 0.f;
  for (int64_t i = t; i < a.d; i += kThreads) square = fmaf(x[i], x[i], square);
  square = row_sum<kThreads>(square, part);
  const float r = 1.f / sqrtf((kind == Norm::l2 ? square : square / float(a.d)) + a.eps);
  if (a.r && t == 0) a.r[n] = r;
  for (int64_t i = t; i < a.d; i += kThreads) {
    float v = x[i] * r;
    if (kind != Norm::l2) v *= a.w[i];
    if (kind == Norm::gated) v *= exact_sigmoid(a.gate[n * a.d + i]);
    a.y[n * a.d + i] = v;
  }
}

template <Norm kind, int kThreads>
__global__ void __launch_bounds__(256) backward_kernel(const cpu::NormArgs a) {
  __shared__ float part[33];
  const int t = threadIdx.x % kThreads;
  const int64_t n = int64_t(blockIdx.x) * (256 / kThreads) + threadIdx.x / kThreads;
  if (n >= a.rows) return;
  const int64_t row = n * a.d;
  const float r = a.r[n];
  float sum = 0.f;
  for (int64_t i = t; i < a.d; i += kThreads) {
    const float dn = kind == Norm::gated ? a.dy[row + i] * exact_sigmoid(a.gate[row + i]) : a.dy[row + i];
    sum = fmaf((kind == Norm::l2 ? dn : a.w[i] * dn), a.x[row + i] * r, sum);
  }
  sum = row_sum<kThreads>(sum, part);
  const float mean = kind == Norm::l2 ? sum : sum / float(a.d);
  for (int64_t i = t; i < a.d; i += kThreads) {
    const float xhat = a.x[row + i] * r, gain = kind == Norm::l2 ? 1.f : a.w[i];
    float dn = a.dy[row + i];
    if (kind == Norm::gated) {
      const float s = exact_sigmoid(a.gate[row + i]);
      dn *= s;
      if (a.dgate) a.dgate[row + i] += dn * xhat * gain * (1.f - s);
    }
    if (a.dx) a.dx[row + i] += r * (gain * dn - xhat * mean);
  }
}

// partial (block, column) = sum over the block's rows of dn xhat
template <Norm kind>
__global__ void __launch_bounds__(128) gain_kernel(const cpu::NormArgs a) {
  const int64_t i = int64_t(blockIdx.y) * 128 + threadIdx.x, first = int64_t(blockIdx.x) * cpu::kNormBlock;
  if (i >= a.d) return;
  const int64_t end = min(a.rows, first + cpu::kNormBlock);
  float sum = 0.f;
  for (int64_t n = first; n < end; ++n) {
    const int64_t at = n * a.d + i;
    const float dn = kind == Norm::gated ? a.dy[at] * exact_sigmoid(a.gate[at]) : a.dy[at];
    sum += dn * (a.x[at] * a.r[n]);
  }
  a.partial[int64_t(blockIdx.x) * a.d + i] = sum;
}

// dw += the blocks' sums: eight threads a column take every eighth block in order, and are added in order
__global__ void __launch_bounds__(256) join_kernel(const float* partial, int64_t blocks, int64_t d, float* dw) {
  __shared__ float part[8][33];
  const int c = threadIdx.x & 31, lane = threadIdx.x >> 5;
  const int64_t i = int64_t(blockIdx.x) * 32 + c;
  float sum = 0.f;
  if (i < d)
    for (int64_t b = lane; b < blocks; b += 8) sum += partial[b * d + i];
  part[lane][c] = sum;
  __syncthreads();
  if (lane || i >= d) return;
  for (int l = 1; l < 8; ++l) sum += part[l][c];
  dw[i] += sum;
}

template <Norm kind>
void forward(const cpu::NormArgs& a, cudaStream_t s) {
  if (a.d <= kNarrowWidth) forward_kernel<kind, kNarrow><<<blocks_for(a.rows, 256 / kNarrow), 256, 0, s>>>(a);
  else forward_kernel<kind, kWide><<<unsigned(a.rows), 256, 0, s>>>(a);
}
template <Norm kind>
void backward(const cpu::NormArgs& a, cudaStream_t s) {
  if (a.d <= kNarrowWidth) backward_kernel<kind, kNarrow><<<blocks_for(a.rows, 256 / kNarrow), 256, 0, s>>>(a);
  else backward_kernel<kind, kWide><<<unsigned(a.rows), 256, 0, s>>>(a);
  if (!a.dw) return;
  const int64_t blocks = cpu::norm_row_blocks(a.rows);
  gain_kernel<kind><<<dim3(unsigned(blocks), blocks_for(a.d, 128)), 128, 0, s>>>(a);
  join_kernel<<<blocks_for(a.d, 32), 256, 0, s>>>(a.partial, blocks, a.d, a.dw);
}

}  // namespace

const char* norm_forward(Norm kind, const cpu::NormArgs& a, void* stream) {
  if (a.rows == 0 || a.d == 0) return nullptr;
  switch (kind) {
    case Norm::rms: forward<Norm::rms>(a, stream_of(stream)); break;
    case Norm::l2: forward<Norm::l2>(a, stream_of(stream)); break;
    case Norm::gated: forward<Norm::gated>(a, stream_of(stream)); break;
  }
  return launched();
}
const char* norm_backward(Norm kind, const cpu::NormArgs& a, void* stream) {
  if (a.rows == 0 || a.d == 0) return nullptr;
  switch (kind) {
    case Norm::rms: backward<Norm::rms>(a, stream_of(stream)); break;
    case Norm::l2: backward<Norm::l2>(a, stream_of(stream)); break;
    case Norm::gated: backward<Norm::gated>(a, stream_of(stream)); break;
  }
  return launched();
}

}  // namespace k3::cuda

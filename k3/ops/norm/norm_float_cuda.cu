// Bound by memory. A row's sums are made by a warp (narrow rows) or a block, in an order that its width alone decides. dw: the rows of a
// block of kNormBlock are walked in order by the threads that own columns, and then the blocks' sums are added in order.
#include "k3/core/enqueue.cuh"
#include "k3/core/four.cuh"
#include "k3/core/tile.cuh"
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

__device__ __forceinline__ void put(float* to, float x, bool fresh) { *to = fresh ? x : *to + x; }

// 256 threads; a row has kThreads of them
template <Norm kind, int kThreads>
__global__ void __launch_bounds__(256) forward_kernel(const cpu::NormArgs a, nv_bf16* narrow) {
  follow();
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
    if (narrow) narrow[n * a.d + i] = __float2bfloat16_rn(v);
  }
}
// RMS rows of up to 128 Q channels, a multiple of 4: a warp a row.
template <int Q>
__global__ void __launch_bounds__(256) rows_forward_kernel(const cpu::NormArgs a, nv_bf16* narrow) {
  follow();
  const int64_t n = int64_t(blockIdx.x) * 8 + (threadIdx.x >> 5);
  if (n >= a.rows) return;
  const int lane = threadIdx.x & 31, quads = int(a.d / 4);
  float4 v[Q];
  float square = 0.f;
#pragma unroll
  for (int j = 0; j < Q; ++j) v[j] = four_of(a.x + n * a.d, j * 32 + lane, quads);
#pragma unroll
  for (int j = 0; j < Q; ++j) square = dot4(v[j], v[j], square);
  const float r = 1.f / sqrtf(row_sum<32>(square, nullptr) / float(a.d) + a.eps);
  if (a.r && lane == 0) a.r[n] = r;
#pragma unroll
  for (int j = 0; j < Q; ++j) {
    const int i = j * 32 + lane;
    if (i >= quads) continue;
    const float4 y = each4([r](float v, float w) { return v * r * w; }, v[j], reinterpret_cast<const float4*>(a.w)[i]);
    reinterpret_cast<float4*>(a.y + n * a.d)[i] = y;
    if (narrow) reinterpret_cast<uint2*>(narrow + n * a.d)[i] = make_uint2(pack(y.x, y.y), pack(y.z, y.w));
  }
}

template <Norm kind, int kThreads>
__global__ void __launch_bounds__(256) backward_kernel(const cpu::NormArgs a, bool fresh_x, bool fresh_gate) {
  follow();
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
      if (a.dgate) put(a.dgate + row + i, dn * xhat * gain * (1.f - s), fresh_gate);
    }
    if (a.dx) put(a.dx + row + i, r * (gain * dn - xhat * mean), fresh_x);
  }
}

// RMS rows of up to 4 Q kThreads channels, a multiple of 4: kThreads threads have a row, all of it in registers, and their columns' sums for dw of the
// rows that they walk. t: which of them; gain(j): its j-th four of the gain.
template <int Q, int kThreads, class Gain>
__device__ __forceinline__ void backward_row(const cpu::NormArgs& a, int64_t n, int t, bool fresh, Gain gain, float4 (&dw)[Q], float* part) {
  const int quads = int(a.d / 4);
  float4 h[Q], g[Q];
#pragma unroll
  for (int j = 0; j < Q; ++j) h[j] = four_of(a.x + n * a.d, j * kThreads + t, quads), g[j] = four_of(a.dy + n * a.d, j * kThreads + t, quads);
  const float r = a.r[n];
  float sum = 0.f;
#pragma unroll
  for (int j = 0; j < Q; ++j) {
    h[j] = times4(r, h[j]), dw[j] = fma4(g[j], h[j], dw[j]), g[j] = times4(g[j], gain(j));
    sum = dot4(g[j], h[j], sum);
  }
  const float mean = row_sum<kThreads>(sum, part) / float(a.d);
  float4* dx = reinterpret_cast<float4*>(a.dx + n * a.d);
#pragma unroll
  for (int j = 0; j < Q; ++j) h[j] = each4([&](float g, float h) { return r * (g - h * mean); }, g[j], h[j]);
#pragma unroll
  for (int j = 0; j < Q; ++j) g[j] = fresh ? zero4() : four_of(a.dx + n * a.d, j * kThreads + t, quads);  // all before the first is stored
#pragma unroll
  for (int j = 0; j < Q; ++j)
    if (const int i = j * kThreads + t; i < quads) dx[i] = plus4(h[j], g[j]);
}

// A warp a row, the gain in registers. A block walks kNormPart rows; its warps' sums are added in order.
template <int Q>
__global__ void __launch_bounds__(256) rows_backward_kernel(const cpu::NormArgs a, bool fresh) {
  follow();
  extern __shared__ float4 sums[];  // (8, d / 4)
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quads = int(a.d / 4);
  const int64_t first = int64_t(blockIdx.x) * kNormPart, end = min(a.rows, first + kNormPart);
  float4 gain[Q], dw[Q] = {};
#pragma unroll
  for (int j = 0; j < Q; ++j) gain[j] = four_of(a.w, j * 32 + lane, quads);
  for (int64_t n = first + warp; n < end; n += 8) backward_row<Q, 32>(a, n, lane, fresh, [&](int j) { return gain[j]; }, dw, nullptr);
  if (!a.dw) return;
#pragma unroll
  for (int j = 0; j < Q; ++j)
    if (j * 32 + lane < quads) sums[warp * quads + j * 32 + lane] = dw[j];
  __syncthreads();
  const float* all = reinterpret_cast<const float*>(sums);
  for (int64_t i = threadIdx.x; i < a.d; i += 256) {
    float sum = 0.f;
    for (int w = 0; w < 8; ++w) sum += all[w * a.d + i];
    a.partial[int64_t(blockIdx.x) * a.d + i] = sum;
  }
}

// A block a row, kNormPart one after another.
template <int Q>
__global__ void __launch_bounds__(256, 2) wide_backward_kernel(const cpu::NormArgs a, bool fresh) {
  follow();
  __shared__ float part[33];
  const int t = threadIdx.x, quads = int(a.d / 4);
  const int64_t first = int64_t(blockIdx.x) * kNormPart, end = min(a.rows, first + kNormPart);
  float4 dw[Q] = {};
  for (int64_t n = first; n < end; ++n) backward_row<Q, 256>(a, n, t, fresh, [&](int j) { return four_of(a.w, j * 256 + t, quads); }, dw, part);
  if (!a.dw) return;
#pragma unroll
  for (int j = 0; j < Q; ++j)
    if (j * 256 + t < quads) reinterpret_cast<float4*>(a.partial + int64_t(blockIdx.x) * a.d)[j * 256 + t] = dw[j];
}

// partial (block, column) = sum over the block's rows of dn xhat
template <Norm kind>
__global__ void __launch_bounds__(128) gain_kernel(const cpu::NormArgs a) {
  follow();
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
  follow();
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

bool by_rows(const cpu::NormArgs& a) { return a.d % 4 == 0 && a.d > 128 && a.d <= 1024; }
bool by_wide_rows(const cpu::NormArgs& a) { return a.d % 4 == 0 && a.d > 1024 && a.d <= 8192; }
template <Norm kind>
void forward(const cpu::NormArgs& a, nv_bf16* narrow, cudaStream_t s) {
  if (kind == Norm::rms && by_rows(a)) {
    if (a.d <= 512) enqueue(rows_forward_kernel<4>, blocks_for(a.rows, 8), 256, 0, s, a, narrow);
    else enqueue(rows_forward_kernel<8>, blocks_for(a.rows, 8), 256, 0, s, a, narrow);
    return;
  }
  if (a.d <= kNarrowWidth) enqueue(forward_kernel<kind, kNarrow>, blocks_for(a.rows, 256 / kNarrow), 256, 0, s, a, narrow);
  else enqueue(forward_kernel<kind, kWide>, unsigned(a.rows), 256, 0, s, a, narrow);
}
template <Norm kind>
void backward(const cpu::NormArgs& a, bool fresh_x, bool fresh_gate, cudaStream_t s) {
  const int64_t blocks = cpu::norm_row_blocks(a.rows);
  if (kind == Norm::rms && a.dx && (by_rows(a) || by_wide_rows(a))) {
    const int64_t blocks = norm_parts(a.rows);
    const size_t bytes = size_t(32 * a.d);
    if (a.d > 3072) enqueue(wide_backward_kernel<8>, unsigned(blocks), 256, 0, s, a, fresh_x);
    else if (a.d > 1024) enqueue(wide_backward_kernel<3>, unsigned(blocks), 256, 0, s, a, fresh_x);
    else if (a.d <= 512) enqueue(rows_backward_kernel<4>, unsigned(blocks), 256, bytes, s, a, fresh_x);
    else enqueue(rows_backward_kernel<8>, unsigned(blocks), 256, bytes, s, a, fresh_x);
    if (a.dw) enqueue(join_kernel, blocks_for(a.d, 32), 256, 0, s, a.partial, blocks, a.d, a.dw);
    return;
  }
  if (a.d <= kNarrowWidth) enqueue(backward_kernel<kind, kNarrow>, blocks_for(a.rows, 256 / kNarrow), 256, 0, s, a, fresh_x, fresh_gate);
  else enqueue(backward_kernel<kind, kWide>, unsigned(a.rows), 256, 0, s, a, fresh_x, fresh_gate);
  if (!a.dw) return;
  enqueue(gain_kernel<kind>, dim3(unsigned(blocks), blocks_for(a.d, 128)), 128, 0, s, a);
  enqueue(join_kernel, blocks_for(a.d, 32), 256, 0, s, a.partial, blocks, a.d, a.dw);
}

}  // namespace

const char* norm_forward(Norm kind, const cpu::NormArgs& a, void* to_bf16, void* stream) {
  nv_bf16* narrow = static_cast<nv_bf16*>(to_bf16);
  if (a.rows == 0 || a.d == 0) return nullptr;
  switch (kind) {
    case Norm::rms: forward<Norm::rms>(a, narrow, stream_of(stream)); break;
    case Norm::l2: forward<Norm::l2>(a, narrow, stream_of(stream)); break;
    case Norm::gated: forward<Norm::gated>(a, narrow, stream_of(stream)); break;
  }
  return launched();
}
const char* norm_backward(Norm kind, const cpu::NormArgs& a, bool fresh_x, bool fresh_gate, void* stream) {
  if (a.rows == 0 || a.d == 0) return nullptr;
  switch (kind) {
    case Norm::rms: backward<Norm::rms>(a, fresh_x, fresh_gate, stream_of(stream)); break;
    case Norm::l2: backward<Norm::l2>(a, fresh_x, fresh_gate, stream_of(stream)); break;
    case Norm::gated: backward<Norm::gated>(a, fresh_x, fresh_gate, stream_of(stream)); break;
  }
  return launched();
}

}  // namespace k3::cuda

// Bound by memory. Backward: a block has 32 channels of kDecayChunk rows, of which its eight warps take every eighth; then the blocks' sums are
// added in order, and the heads add their channels in order.
#include "k3/core/enqueue.cuh"
#include "k3/ops/decay/decay_cuda.h"

namespace k3::cuda {
namespace {

constexpr int kThreads = 256, kRowLanes = 8;

// Beyond e^60 every gate is saturated, and infinity times zero is near.
__device__ __forceinline__ float rate_of(const cpu::DecayArgs& a, int64_t channel) {
  const float A = a.A_log[channel / a.dim];
  return expf(A > 60.f ? 60.f : A);
}
__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))); }

template <Decay kind>
__device__ __forceinline__ float gate(const cpu::DecayArgs& a, float rate, float v) {
  if constexpr (kind == Decay::bounded) return a.lower_bound * exact_sigmoid(rate * v);
  const float g = -rate * (v != v ? v : softplus(v));
  return g < -1e30f ? -1e30f : g;
}

template <Decay kind>
__global__ void __launch_bounds__(kThreads) forward_kernel(const cpu::DecayArgs a) {
  follow();
  const int64_t width = a.heads * a.dim, i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= a.rows * width) return;
  const int64_t channel = i % width;
  a.g[i] = gate<kind>(a, rate_of(a, channel), a.z[i] + a.bias[channel]);
}

template <Decay kind>
__global__ void __launch_bounds__(kThreads) backward_kernel(const cpu::DecayArgs a, float* partial) {
  follow();
  __shared__ float part[2][kRowLanes][33];
  const int c = threadIdx.x & 31, lane = threadIdx.x >> 5;
  const int64_t width = a.heads * a.dim, i = int64_t(blockIdx.x) * 32 + c;
  float dbias = 0.f, dA = 0.f;
  if (i < width) {
    const float rate = rate_of(a, i), bias = a.bias[i];
    for (int64_t n = int64_t(blockIdx.y) * kDecayChunk + lane, end = min(a.rows, (int64_t(blockIdx.y) + 1) * kDecayChunk); n < end; n += kRowLanes) {
      const int64_t at = n * width + i;
      const float v = a.z[at] + bias, dg = a.dg[at];
      float dz, dA_row;
      if constexpr (kind == Decay::bounded) {
        dz = dg * a.lower_bound * exact_sigmoid(rate * v) * exact_sigmoid(-(rate * v)) * rate;
        dA_row = dz * v;
      } else {
        dz = -dg * rate * exact_sigmoid(v);
        dA_row = dg * gate<kind>(a, rate, v);
      }
      a.dz[at] += dz;
      dbias += dz, dA += dA_row;
    }
  }
  part[0][lane][c] = dbias, part[1][lane][c] = dA;
  __syncthreads();
  if (lane || i >= width) return;
  for (int l = 1; l < kRowLanes; ++l) dbias += part[0][l][c], dA += part[1][l][c];
  partial[int64_t(blockIdx.y) * 2 * width + i] = dbias, partial[(int64_t(blockIdx.y) * 2 + 1) * width + i] = dA;
}

__global__ void __launch_bounds__(128) join_kernel(const cpu::DecayArgs a, const float* partial, int64_t chunks) {
  follow();
  const int64_t width = a.heads * a.dim, i = int64_t(blockIdx.x) * 128 + threadIdx.x;
  if (i >= width) return;
  float dbias = 0.f, dA = 0.f;
#pragma unroll 8
  for (int64_t b = 0; b < chunks; ++b) dbias += partial[b * 2 * width + i], dA += partial[(b * 2 + 1) * width + i];
  if (a.dbias) a.dbias[i] += dbias;
  a.dA_channel[i] = dA;
}

__global__ void __launch_bounds__(128) head_kernel(const cpu::DecayArgs a) {
  follow();
  const int64_t h = int64_t(blockIdx.x) * 128 + threadIdx.x;
  if (h >= a.heads) return;
  float sum = 0.f;
  for (int64_t i = h * a.dim; i < (h + 1) * a.dim; ++i) sum += a.dA_channel[i];
  a.dA_log[h] += sum;
}

}  // namespace

const char* decay_forward(Decay kind, const cpu::DecayArgs& a, void* stream) {
  const int64_t n = a.rows * a.heads * a.dim;
  if (n == 0) return nullptr;
  if (kind == Decay::bounded) enqueue(forward_kernel<Decay::bounded>, blocks_for(n, kThreads), kThreads, 0, stream_of(stream), a);
  else enqueue(forward_kernel<Decay::softplus>, blocks_for(n, kThreads), kThreads, 0, stream_of(stream), a);
  return launched();
}
const char* decay_backward(Decay kind, const cpu::DecayArgs& a, float* partial, void* stream) {
  const int64_t width = a.heads * a.dim;
  if (width == 0 || a.rows == 0) return nullptr;
  const int64_t chunks = decay_chunks(a.rows);
  const dim3 grid(blocks_for(width, 32), unsigned(chunks));
  if (kind == Decay::bounded) enqueue(backward_kernel<Decay::bounded>, grid, kThreads, 0, stream_of(stream), a, partial);
  else enqueue(backward_kernel<Decay::softplus>, grid, kThreads, 0, stream_of(stream), a, partial);
  enqueue(join_kernel, blocks_for(width, 128), 128, 0, stream_of(stream), a, partial, chunks);
  if (a.dA_log) enqueue(head_kernel, blocks_for(a.heads, 128), 128, 0, stream_of(stream), a);
  return launched();
}

}  // namespace k3::cuda

// y = x w / sqrt(mean x^2 + eps);   dx = r (dy w - x r^2 mean(dy w x)),  dw = sum over rows of dy x r
//
// Bound: bytes (8192 x 7168 bf16: forward 55 us). Split: forward one block a row; backward 264 blocks that walk over rows, so that dw is summed in
// registers; then the blocks in order. Statistics float32.
#include "k3/core/tile.cuh"
#include "k3/ops/norm/norm_cuda.h"

namespace k3::cuda {
namespace {

constexpr int kThreads = 256, kParts = 4, kBlocks = 264;  // kParts chunks of 8 values a thread

__device__ __forceinline__ float block_sum(float x, float* part) {
  x = warp_sum(x);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = x;
  __syncthreads();
  return ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
}

template <class T>
__global__ void __launch_bounds__(kThreads) rms_norm_kernel(const RmsNormArgs a) {
  __shared__ float part[8];
  const int64_t row = int64_t(blockIdx.x) * a.d;
  float x[kParts][8], square = 0.f;
#pragma unroll
  for (int j = 0; j < kParts; ++j) {
    const int c = (threadIdx.x + j * kThreads) * 8;
    if (c < a.d) {
      load8(static_cast<const T*>(a.x) + row + c, x[j]);
      if (a.add) {
        float y[8];
        load8(static_cast<const T*>(a.add) + row + c, y);
#pragma unroll
        for (int e = 0; e < 8; ++e) x[j][e] = to_f32(from_f32<T>(x[j][e] + y[e]));
        store8(static_cast<T*>(a.sum) + row + c, x[j]);
      }
#pragma unroll
      for (int e = 0; e < 8; ++e) square += x[j][e] * x[j][e];
    }
  }
  const float r = rsqrtf(block_sum(square, part) / a.d + a.eps);
#pragma unroll
  for (int j = 0; j < kParts; ++j) {
    const int c = (threadIdx.x + j * kThreads) * 8;
    if (c < a.d) {
      float w[8];
      load8(a.w + c, w);
#pragma unroll
      for (int e = 0; e < 8; ++e) x[j][e] *= r * w[e];
      store8(static_cast<T*>(a.y) + row + c, x[j]);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) rms_norm_backward_kernel(const RmsNormArgs a) {
  __shared__ float part[8];
  float dw[kParts][8] = {};
  for (int64_t n = blockIdx.x; n < a.rows; n += gridDim.x) {
    const int64_t row = n * a.d;
    float x[kParts][8], g[kParts][8], square = 0.f, dot = 0.f;
#pragma unroll
    for (int j = 0; j < kParts; ++j) {
      const int c = (threadIdx.x + j * kThreads) * 8;
      if (c < a.d) {
        float w[8];
        load8(static_cast<const T*>(a.x) + row + c, x[j]), load8(static_cast<const T*>(a.dy) + row + c, g[j]), load8(a.w + c, w);
#pragma unroll
        for (int e = 0; e < 8; ++e) square += x[j][e] * x[j][e], dot += x[j][e] * g[j][e] * w[e];
      }
    }
    const float r = rsqrtf(block_sum(square, part) / a.d + a.eps), mean = block_sum(dot, part) / a.d * r * r;
#pragma unroll
    for (int j = 0; j < kParts; ++j) {
      const int c = (threadIdx.x + j * kThreads) * 8;
      if (c < a.d) {
        float w[8];
        load8(a.w + c, w);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          dw[j][e] += g[j][e] * x[j][e] * r;
          x[j][e] = r * (g[j][e] * w[e] - x[j][e] * mean);
        }
        store8(static_cast<T*>(a.dx) + row + c, x[j]);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kParts; ++j) {
    const int c = (threadIdx.x + j * kThreads) * 8;
    if (c < a.d) store8(a.partial + int64_t(blockIdx.x) * a.d + c, dw[j]);
  }
}

__global__ void __launch_bounds__(128) column_sum_kernel(const float* partial, int blocks, int d, float* dw) {
  const int c = blockIdx.x * 128 + threadIdx.x;
  if (c >= d) return;
  float s = 0.f;
#pragma unroll 8
  for (int b = 0; b < blocks; ++b) s += partial[int64_t(b) * d + c];
  dw[c] += s;
}

const char* refuse(const RmsNormArgs& a) { return a.d % 8 || a.d > kParts * kThreads * 8 ? "[rms_norm] the GPU serves widths that are multiples of 8 up to 8192" : nullptr; }
const char* result() {
  cudaError_t e = cudaGetLastError();
  return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}

}  // namespace

const char* rms_norm_forward(const RmsNormArgs& a, void* stream) {
  if (const char* e = refuse(a)) return e;
  if (a.rows == 0) return nullptr;
  if (a.wide) rms_norm_kernel<float><<<unsigned(a.rows), kThreads, 0, cudaStream_t(stream)>>>(a);
  else rms_norm_kernel<nv_bf16><<<unsigned(a.rows), kThreads, 0, cudaStream_t(stream)>>>(a);
  return result();
}

const char* rms_norm_backward(const RmsNormArgs& a, void* stream) {
  if (const char* e = refuse(a)) return e;
  if (a.rows == 0) return nullptr;
  const int blocks = int(a.rows < kBlocks ? a.rows : kBlocks);
  if (a.wide) rms_norm_backward_kernel<float><<<blocks, kThreads, 0, cudaStream_t(stream)>>>(a);
  else rms_norm_backward_kernel<nv_bf16><<<blocks, kThreads, 0, cudaStream_t(stream)>>>(a);
  column_sum_kernel<<<(a.d + 127) / 128, 128, 0, cudaStream_t(stream)>>>(a.partial, blocks, a.d, a.dw);
  return result();
}

}  // namespace k3::cuda

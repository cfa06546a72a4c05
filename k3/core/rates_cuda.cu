// What the GPU itself can do, for `k3 bench`: a copy through device memory, and fused multiply-adds from registers.
#include "k3/core/block.cuh"
#include "k3/core/rates_cuda.h"

namespace k3::cuda {
namespace {

__global__ void __launch_bounds__(512) copy_kernel(const float4* from, float4* to, int64_t n) {
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += 4 * step) {
    float4 v[4];
#pragma unroll
    for (int k = 0; k < 4; ++k)
      if (i + k * step < n) v[k] = __ldcs(from + i + k * step);
#pragma unroll
    for (int k = 0; k < 4; ++k)
      if (i + k * step < n) __stcs(to + i + k * step, v[k]);
  }
}

__global__ void __launch_bounds__(256) multiply_add_kernel(float* out, int rounds, float a) {
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = float(threadIdx.x + i);
  for (int r = 0; r < rounds; ++r)
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] = fmaf(x[i], a, 1.f);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) sum += x[i];
  if (sum == 0.5f) out[0] = sum;  // never, which the compiler cannot know
}

}  // namespace

const char* copy_through_memory(const void* from, void* to, int64_t bytes, void* stream) {
  copy_kernel<<<132 * 8, 512, 0, stream_of(stream)>>>(static_cast<const float4*>(from), static_cast<float4*>(to), bytes / 16);
  return launched();
}
const char* multiply_adds(float* out, int blocks, int rounds, void* stream) {
  multiply_add_kernel<<<blocks, 256, 0, stream_of(stream)>>>(out, rounds, 0.5f);
  return launched();
}

}  // namespace k3::cuda

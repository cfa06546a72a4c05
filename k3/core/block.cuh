#pragma once
// What float32 kernels of many operators share: exact scalar functions and a sum over a block in a fixed order.
#include <cuda_runtime.h>

#include <cstdint>

namespace k3 {

inline const char* launched() {
  const cudaError_t e = cudaGetLastError();
  return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}
inline cudaStream_t stream_of(void* s) { return static_cast<cudaStream_t>(s); }
inline unsigned blocks_for(int64_t n, int64_t each) { return unsigned((n + each - 1) / each); }

__device__ __forceinline__ float exact_sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

// The sum over all threads of the block, for every thread: lanes in a tree, then warps in order. `part` has room for 33 floats.
__device__ __forceinline__ float block_sum_f32(float x, float* part) {
#pragma unroll
  for (int s = 16; s > 0; s >>= 1) x += __shfl_xor_sync(~0u, x, s);
  const int warps = (blockDim.x + 31) >> 5;
  __syncthreads();  // part may still be read by the sum before
  if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = x;
  __syncthreads();
  x = part[0];
  for (int w = 1; w < warps; ++w) x += part[w];
  return x;
}
__device__ __forceinline__ float block_max_f32(float x, float* part) {
#pragma unroll
  for (int s = 16; s > 0; s >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, s));
  const int warps = (blockDim.x + 31) >> 5;
  __syncthreads();
  if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = x;
  __syncthreads();
  x = part[0];
  for (int w = 1; w < warps; ++w) x = fmaxf(x, part[w]);
  return x;
}

}  // namespace k3

#pragma once
// Four neighbouring floats at once in float32 kernels: one access of 16 bytes, and arithmetic that rounds each of the four as scalars would.
#include <cuda_runtime.h>

namespace k3 {

__device__ __forceinline__ float4 zero4() { return make_float4(0.f, 0.f, 0.f, 0.f); }
__device__ __forceinline__ float4 load4(const float* p) { return *reinterpret_cast<const float4*>(p); }
// The i-th of a row of `fours`; zeros behind its end.
__device__ __forceinline__ float4 four_of(const float* row, int i, int fours) {
  return i < fours ? reinterpret_cast<const float4*>(row)[i] : zero4();
}

template <class F, class... X>
__device__ __forceinline__ float4 each4(F f, const X&... x) { return make_float4(f(x.x...), f(x.y...), f(x.z...), f(x.w...)); }
__device__ __forceinline__ float4 plus4(const float4& x, const float4& y) { return make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w); }
__device__ __forceinline__ float4 times4(const float4& x, const float4& y) { return make_float4(x.x * y.x, x.y * y.y, x.z * y.z, x.w * y.w); }
__device__ __forceinline__ float4 times4(float s, const float4& y) { return make_float4(s * y.x, s * y.y, s * y.z, s * y.w); }
__device__ __forceinline__ float4 fma4(const float4& x, const float4& y, const float4& z) {
  return make_float4(fmaf(x.x, y.x, z.x), fmaf(x.y, y.y, z.y), fmaf(x.z, y.z, z.z), fmaf(x.w, y.w, z.w));
}
__device__ __forceinline__ float4 fma4(float s, const float4& y, const float4& z) {
  return make_float4(fmaf(s, y.x, z.x), fmaf(s, y.y, z.y), fmaf(s, y.z, z.z), fmaf(s, y.w, z.w));
}
// sum + x . y, the first channel first
__device__ __forceinline__ float dot4(const float4& x, const float4& y, float sum) {
  return fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, fmaf(x.x, y.x, sum))));
}

}  // namespace k3

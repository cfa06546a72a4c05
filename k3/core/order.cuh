#pragma once
// Floats as unsigned numbers of the same order, so that the largest of a warp is one instruction. -0 equals 0; minus infinity has the least key of a
// number, above 0; NaN is for the caller to decide.
#include <cuda_runtime.h>

#include <cstdint>

namespace k3 {

__device__ __forceinline__ uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(x + 0.f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(uint32_t key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }
// A NaN counts as minus infinity: never preferred, but a valid choice.
__device__ __forceinline__ uint32_t choice_key(float x) { return key_of(x != x ? -INFINITY : x); }

}  // namespace k3

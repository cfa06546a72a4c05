#pragma once
// MXFP4 to bfloat16: codes of four bits, low nibble first, 32 of a row to a scale 2^(s - 127). Exact but where a scale times a code is beyond bfloat16.
#include <cuda_runtime.h>

#include <cstdint>

namespace k3 {

__device__ __forceinline__ uint32_t mxfp4_power(uint32_t scale) {  // 2^(scale - 127) as two bfloat16; 255 is not a number
  const uint32_t one = scale == 0 ? 0x40u : scale << 7;
  return one | one << 16;
}
// Eight codes as eight bfloat16. A code's bits as a bfloat16's lowest exponent and highest fraction bits are the value times 2^-126.
__device__ __forceinline__ uint4 mxfp4_eight(uint32_t codes, uint32_t power) {
  auto times = [](uint32_t x, uint32_t y) {
    uint32_t z;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
  };
  uint32_t r[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t b = codes >> (8 * i);  // codes 2 i and 2 i + 1
    const uint32_t low = (b & 7) << 6 | (b & 8) << 12, high = (b & 0x70) << 18 | (b & 0x80) << 24;
    r[i] = times(times(low | high, 0x7e807e80u), power);  // 2^126
  }
  return make_uint4(r[0], r[1], r[2], r[3]);
}

}  // namespace k3

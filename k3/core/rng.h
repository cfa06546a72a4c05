#pragma once
// Counter-based random numbers: a value is a pure function of (seed, stream, index), so it is the same on any thread, in any order and on
// any device, and nothing needs saving but the counters. Philox 4x32-10 (Salmon et al., 2011).
#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define K3_HOST_DEVICE __host__ __device__
#else
#define K3_HOST_DEVICE
#endif

namespace k3 {

struct Rng {
  uint64_t seed = 0, stream = 0;

  struct Bits {
    uint32_t word[4];
    K3_HOST_DEVICE uint32_t operator[](int i) const { return word[i]; }
  };
  K3_HOST_DEVICE Bits bits(uint64_t index) const {
    uint32_t c[4] = {uint32_t(index), uint32_t(index >> 32), uint32_t(stream), uint32_t(stream >> 32)};
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
    for (int round = 0; round < 10; ++round) {
      uint64_t p0 = uint64_t(0xD2511F53u) * c[0], p1 = uint64_t(0xCD9E8D57u) * c[2];
      uint32_t n0 = uint32_t(p1 >> 32) ^ c[1] ^ k0, n2 = uint32_t(p0 >> 32) ^ c[3] ^ k1;
      c[1] = uint32_t(p1), c[3] = uint32_t(p0), c[0] = n0, c[2] = n2;
      k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return {c[0], c[1], c[2], c[3]};
  }
  // (0, 1), never an end point.
  K3_HOST_DEVICE double uniform(uint64_t index) const {
    auto b = bits(index);
    return (static_cast<double>((uint64_t(b[0]) << 21) | (b[1] >> 11)) + 0.5) * (1.0 / 9007199254740992.0);
  }
  double normal(uint64_t index) const {
    auto b = bits(index);
    double u = (double(b[0]) + 0.5) / 4294967296.0, v = (double(b[1]) + 0.5) / 4294967296.0;
    return std::sqrt(-2.0 * std::log(u)) * std::cos(6.283185307179586 * v);
  }
  // 0 .. n-1
  uint64_t below(uint64_t n, uint64_t index) const { return uint64_t(uniform(index) * double(n)); }
};

}  // namespace k3

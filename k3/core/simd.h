#pragma once
// vec: sixteen floats, whatever the machine. The compiler splits it into the registers that the level has, so every level adds in the same
// order; only the fusing of multiply and add differs (plain has none). Everything is forced inline: see isa.h for why.
#include <cstdint>

#pragma GCC diagnostic ignored "-Wpsabi"
#define K3_INLINE static inline __attribute__((always_inline))

namespace k3::simd {

inline constexpr int kLanes = 16;
typedef float vec __attribute__((vector_size(64)));
typedef int32_t ivec __attribute__((vector_size(64)));
typedef uint32_t uvec __attribute__((vector_size(64)));  // for sums of bits that may wrap
typedef float vec_mem __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t ivec_mem __attribute__((vector_size(64), aligned(4), may_alias));

K3_INLINE vec splat(float x) { return vec{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
K3_INLINE ivec isplat(int32_t x) { return ivec{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
K3_INLINE vec zero() { return vec{}; }
K3_INLINE vec load(const float* p) { return *reinterpret_cast<const vec_mem*>(p); }
K3_INLINE void store(float* p, vec v) { *reinterpret_cast<vec_mem*>(p) = v; }
// The first n lanes (0 < n <= 16); the others are 0.
K3_INLINE vec load_n(const float* p, int64_t n) {
  if (n >= kLanes) return load(p);
  vec v{};
  for (int64_t i = 0; i < n; ++i) v[i] = p[i];
  return v;
}
K3_INLINE void store_n(float* p, vec v, int64_t n) {
  if (n >= kLanes) return store(p, v);
  for (int64_t i = 0; i < n; ++i) p[i] = v[i];
}
K3_INLINE vec fma(vec a, vec b, vec c) { return a * b + c; }  // contracted where the level has FMA
K3_INLINE vec select(ivec mask, vec a, vec b) { return vec((ivec(a) & mask) | (ivec(b) & ~mask)); }
K3_INLINE vec max(vec a, vec b) { return select(a > b, a, b); }
K3_INLINE vec min(vec a, vec b) { return select(a < b, a, b); }
K3_INLINE vec abs(vec a) { return vec(ivec(a) & isplat(0x7fffffff)); }

// Sum of the lanes, always as the same tree.
K3_INLINE float sum(vec v) {
  float a[16];
  store(a, v);
  for (int step = 8; step; step /= 2)
    for (int i = 0; i < step; ++i) a[i] += a[i + step];
  return a[0];
}
K3_INLINE float max_lane(vec v) {
  float m = v[0];
  for (int i = 1; i < kLanes; ++i) m = v[i] > m ? v[i] : m;
  return m;
}

// e^x, within 2 ulp; 0 below -87.3, infinity above 88.7; NaN stays NaN.
K3_INLINE vec exp(vec x) {
  vec t = x * splat(1.44269504088896341f) + splat(12582912.0f);  // 1.5 * 2^23: the sum's low bits are the nearest integer
  vec n = t - splat(12582912.0f);
  vec r = x - n * splat(0.693145751953125f);
  r = r - n * splat(1.42860682030941723212e-6f);
  vec p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  vec y = fma(p, r * r, r) + splat(1.0f);
  uvec e = uvec(t) - uvec(isplat(0x4B400000));  // the integer itself; nonsense out of range, where the result is replaced
  y = vec(uvec(y) + (e << 23));
  y = select(x < splat(-87.33654f), zero(), y);
  y = select(x > splat(88.72283f), splat(__builtin_inff()), y);
  return select(x == x, y, x);
}
K3_INLINE vec sigmoid(vec x) { return splat(1.0f) / (splat(1.0f) + exp(-x)); }
// tanh: a polynomial near 0, where 1 - 2/(e^2x + 1) would cancel.
K3_INLINE vec tanh(vec x) {
  vec a = abs(x), z = x * x;
  vec p = splat(-5.70498872745e-3f);
  p = fma(p, z, splat(2.06390887954e-2f));
  p = fma(p, z, splat(-5.37397155531e-2f));
  p = fma(p, z, splat(1.33314422036e-1f));
  p = fma(p, z, splat(-3.33332819422e-1f));
  vec small = fma(p * z, x, x);
  vec large = splat(1.0f) - splat(2.0f) / (exp(a + a) + splat(1.0f));
  large = select(x < zero(), -large, large);
  return select(a < splat(0.625f), small, select(x == x, large, x));
}
// ln x for positive normal x.
K3_INLINE vec log(vec x) {
  ivec u = ivec(uvec(x) - uvec(isplat(0x3f3504f3)));  // sqrt(1/2): the mantissa lands in [sqrt(1/2), sqrt(2))
  ivec e = u >> 23;
  vec m = vec((u & isplat(0x007fffff)) + isplat(0x3f3504f3)) - splat(1.0f);
  vec k = __builtin_convertvector(e, vec);
  vec z = m * m;
  vec p = splat(7.0376836292e-2f);
  p = fma(p, m, splat(-1.1514610310e-1f));
  p = fma(p, m, splat(1.1676998740e-1f));
  p = fma(p, m, splat(-1.2420140846e-1f));
  p = fma(p, m, splat(1.4249322787e-1f));
  p = fma(p, m, splat(-1.6668057665e-1f));
  p = fma(p, m, splat(2.0000714765e-1f));
  p = fma(p, m, splat(-2.4999993993e-1f));
  p = fma(p, m, splat(3.3333331174e-1f));
  vec y = p * m * z;
  y = fma(k, splat(-2.12194440e-4f), y);
  y = fma(z, splat(-0.5f), y);
  return m + y + k * splat(0.693359375f);
}
// ln(1 + y) for y >= 0, accurate near 0.
K3_INLINE vec log1p(vec y) {
  vec u = splat(1.0f) + y;
  vec d = u - splat(1.0f);
  return select(d == zero(), y, log(u) * (y / select(d == zero(), splat(1.0f), d)));
}
// ln(1 + e^x)
K3_INLINE vec softplus(vec x) { return max(x, zero()) + log1p(exp(-abs(x))); }

}  // namespace k3::simd

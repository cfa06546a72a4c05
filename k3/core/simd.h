#pragma once
// vec: sixteen floats, whatever the machine: one register, or halves down to the registers that the level has (a 64-byte vector type would
// live on the stack there). Every level adds in the same order; only the fusing of multiply and add differs (plain has none). Everything is
// forced inline: see isa.h for why.
#include <cstdint>

#pragma GCC diagnostic ignored "-Wpsabi"
#define K3_INLINE static inline __attribute__((always_inline))

namespace k3::simd {

inline constexpr int kLanes = 16;

// One register: kNative lanes.
#if defined(__AVX512F__)
inline constexpr int kNative = 16;
#elif defined(__AVX2__)
inline constexpr int kNative = 8;
#else
inline constexpr int kNative = 4;
#endif
typedef float native __attribute__((vector_size(4 * kNative)));
typedef int32_t inative __attribute__((vector_size(4 * kNative)));
typedef uint32_t unative __attribute__((vector_size(4 * kNative)));
typedef native native_mem __attribute__((aligned(1), may_alias));

K3_INLINE void fill(native& v, float x) { v = x - native{}; }  // not native{} + x, which would lose the sign of -0
K3_INLINE void fill(inative& v, int32_t x) { v = x - inative{}; }
K3_INLINE void read(native& v, const void* p) { v = *static_cast<const native_mem*>(p); }
K3_INLINE void write(void* p, native v) { *static_cast<native_mem*>(p) = v; }
K3_INLINE native to_floats(inative v) { return __builtin_convertvector(v, native); }

#if defined(__AVX512F__)
typedef native vec;
typedef inative ivec;
typedef unative uvec;  // for sums of bits that may wrap
#else
#define K3_MEMBER inline __attribute__((always_inline))
template <class Half, class Lane>
struct Pair {
  typedef Lane lane __attribute__((may_alias));
  Half lo, hi;
  Pair() = default;
  K3_MEMBER Pair(Half lo, Half hi) : lo(lo), hi(hi) {}
  template <class H, class L>
  K3_MEMBER explicit Pair(Pair<H, L> bits) : lo(Half(bits.lo)), hi(Half(bits.hi)) {}
  K3_MEMBER lane& operator[](int64_t i) { return reinterpret_cast<lane*>(this)[i]; }
  K3_MEMBER Lane operator[](int64_t i) const { return reinterpret_cast<const lane*>(this)[i]; }
};
#define K3_BINARY(op)                                            \
  template <class H, class L>                                    \
  K3_INLINE Pair<H, L> operator op(Pair<H, L> a, Pair<H, L> b) { \
    return {a.lo op b.lo, a.hi op b.hi};                         \
  }                                                              \
  template <class H, class L>                                    \
  K3_INLINE void operator op##=(Pair<H, L>& a, Pair<H, L> b) {   \
    a = a op b;                                                  \
  }
#define K3_COMPARE(op)                                                        \
  template <class H, class L>                                                 \
  K3_INLINE auto operator op(Pair<H, L> a, Pair<H, L> b) {                    \
    return Pair<decltype(a.lo op b.lo), int32_t>(a.lo op b.lo, a.hi op b.hi); \
  }
#define K3_SHIFT(op)                                         \
  template <class H, class L>                                \
  K3_INLINE Pair<H, L> operator op(Pair<H, L> a, int bits) { \
    return {a.lo op bits, a.hi op bits};                     \
  }
K3_BINARY(+)
K3_BINARY(-)
K3_BINARY(*)
K3_BINARY(/)
K3_BINARY(&)
K3_BINARY(|)
K3_BINARY(^)
K3_COMPARE(<)
K3_COMPARE(>)
K3_COMPARE(<=)
K3_COMPARE(>=)
K3_COMPARE(==)
K3_COMPARE(!=)
K3_SHIFT(<<)
K3_SHIFT(>>)
#undef K3_BINARY
#undef K3_COMPARE
#undef K3_SHIFT
template <class H, class L>
K3_INLINE Pair<H, L> operator-(Pair<H, L> a) {
  return {-a.lo, -a.hi};
}
template <class H, class L>
K3_INLINE Pair<H, L> operator~(Pair<H, L> a) {
  return {~a.lo, ~a.hi};
}
template <class H, class L>
K3_INLINE void fill(Pair<H, L>& v, L x) {
  fill(v.lo, x), fill(v.hi, x);
}
template <class H, class L>
K3_INLINE void read(Pair<H, L>& v, const void* p) {
  read(v.lo, p), read(v.hi, static_cast<const char*>(p) + sizeof(H));
}
template <class H, class L>
K3_INLINE void write(void* p, Pair<H, L> v) {
  write(p, v.lo), write(static_cast<char*>(p) + sizeof(H), v.hi);
}
#if defined(__AVX2__)
typedef Pair<native, float> vec;
typedef Pair<inative, int32_t> ivec;
typedef Pair<unative, uint32_t> uvec;
K3_INLINE vec to_floats(ivec v) { return {to_floats(v.lo), to_floats(v.hi)}; }
#else
typedef Pair<Pair<native, float>, float> vec;
typedef Pair<Pair<inative, int32_t>, int32_t> ivec;
typedef Pair<Pair<unative, uint32_t>, uint32_t> uvec;
K3_INLINE vec to_floats(ivec v) { return {{to_floats(v.lo.lo), to_floats(v.lo.hi)}, {to_floats(v.hi.lo), to_floats(v.hi.hi)}}; }
#endif
#endif

K3_INLINE vec splat(float x) {
  vec v;
  fill(v, x);
  return v;
}
K3_INLINE ivec isplat(int32_t x) {
  ivec v;
  fill(v, x);
  return v;
}
K3_INLINE vec zero() { return vec{}; }
K3_INLINE ivec lane_numbers() {  // 0, 1, ... 15
  ivec v;
  for (int i = 0; i < kLanes; ++i) v[i] = i;
  return v;
}
K3_INLINE vec load(const float* p) {
  vec v;
  read(v, p);
  return v;
}
K3_INLINE void store(float* p, vec v) { write(p, v); }
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
// a b + c, rounded once where the level has such an instruction: always, not when the compiler happens to fuse.
K3_INLINE native fma(native a, native b, native c) {
#if defined(__AVX512F__)
  return __builtin_ia32_vfmaddps512_mask(a, b, c, -1, 4);
#elif defined(__AVX2__)
  return __builtin_ia32_vfmaddps256(a, b, c);
#else
  return a * b + c;
#endif
}
#if !defined(__AVX512F__)
template <class H, class L>
K3_INLINE Pair<H, L> fma(Pair<H, L> a, Pair<H, L> b, Pair<H, L> c) {
  return {fma(a.lo, b.lo, c.lo), fma(a.hi, b.hi, c.hi)};
}
#endif
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
// The largest lane, by the same tree.
K3_INLINE float max_lane(vec v) {
#if defined(__AVX512F__)
  const ivec by8 = {8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}, by4 = {4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11};
  const ivec by2 = {2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}, by1 = {1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14};
  v = max(v, __builtin_shuffle(v, by8)), v = max(v, __builtin_shuffle(v, by4)), v = max(v, __builtin_shuffle(v, by2));
  return max(v, __builtin_shuffle(v, by1))[0];
#else
  float a[16];
  store(a, v);
  for (int step = 8; step; step /= 2)
    for (int i = 0; i < step; ++i) a[i] = a[i] > a[i + step] ? a[i] : a[i + step];
  return a[0];
#endif
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
  vec k = to_floats(e);
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

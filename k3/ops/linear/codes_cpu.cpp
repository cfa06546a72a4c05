// Products of codes in the order of product.h. Four rows of W at a time are read where they lie, 64 bytes of each in one or more registers, and
// multiplied with the digits of up to eight rows of x: as bytes, four neighbours summed at once, where AVX-512 has VNNI, else as sixteen-bit numbers.
// Each lane then holds the sum of four neighbouring bytes of W. The four lanes of 16 bytes are added for four rows at once, which leaves the sums of
// the rows side by side, ready to be scaled and added to their chains.
//
// All sums up to there are of whole numbers, so they may be taken in any order; wraps in between do no harm, since what is left at the end fits.
#include "k3/core/simd.h"
#include "k3/ops/linear/codes_kernels.h"

namespace k3::cpu::K3_ISA {

using namespace k3::simd;

constexpr int kParts = kLanes / kNative;      // registers for 64 bytes
constexpr int kRows = 4;                      // of W
constexpr int64_t kInputs = 128;              // of a FixedX
constexpr int64_t kAhead = 16384;             // bytes
constexpr int kBitsMxfp4 = 22, kBitsQ8 = 14;  // of x as whole numbers: sums of 32 products with codes up to 12 fit; 16-bit numbers

typedef int8_t bytes __attribute__((vector_size(4 * kNative)));
typedef int16_t shorts __attribute__((vector_size(4 * kNative)));
typedef int64_t longs __attribute__((vector_size(4 * kNative)));
typedef uint16_t ushorts __attribute__((vector_size(4 * kNative)));
typedef int32_t iquad __attribute__((vector_size(16)));

template <class V>
K3_INLINE V read_as(const void* p) {
  typedef V mem __attribute__((aligned(1), may_alias));
  return *static_cast<const mem*>(p);
}

// Twice the value of the 4-bit code (sign, two bits of exponent, one of mantissa) in the low bits of each byte, + 12 with AVX-512; the bits above are
// 0.
K3_INLINE bytes e2m1(bytes code) {
#if defined(__AVX512F__)
#define K3_E2M1 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0
  typedef char chars __attribute__((vector_size(64)));
  const bytes table = {K3_E2M1, K3_E2M1, K3_E2M1, K3_E2M1};
  return bytes(__builtin_ia32_pshufb512_mask(chars(table), chars(code), chars{}, -1));
#elif defined(__AVX2__)
#define K3_E2M1 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12
  typedef char chars __attribute__((vector_size(32)));
  const bytes table = {K3_E2M1, K3_E2M1};
  return bytes(__builtin_ia32_pshufb256(chars(table), chars(code)));
#else
  const bytes minus = code > 7, c = code & 7;                                               // 0 1 2 3 4 5 6 7
  const bytes twice = c + ((c - 4) & (c > 4)) + ((c - 6) & (c > 6)) + ((c - 6) & (c > 6));  // 0 1 2 3 4 6 8 12
  return (twice ^ minus) - minus;
#endif
#undef K3_E2M1
}

// A register of codes of one row of W, and t[i] = their products with x for four rows i, four bytes of W in a lane.
#if defined(__AVX512F__)
constexpr int kOffsetMxfp4 = 12, kOffsetQ8 = 128;  // added to codes
struct Codes {
  bytes even, odd;  // inputs; q8: all in `even`
};
template <bool mxfp4>
K3_INLINE Codes codes_of(bytes w) {
  if (!mxfp4) return {bytes(w ^ int8_t(-128)), bytes{}};
  return {e2m1(w & 15), e2m1(bytes(ushorts(w) >> 4) & 15)};
}
template <bool mxfp4>
K3_INLINE void products(const Codes* w, const FixedX& x, int half, int, inative* t) {
#pragma GCC unroll 3
  for (int d = 0; d < (mxfp4 ? 3 : 2); ++d) {
    const bytes even = read_as<bytes>(x.digits + 64 * (2 * d + half)), odd = read_as<bytes>(x.digits + 64 * (2 * d + 1));
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      t[i] = __builtin_ia32_vpdpbusd_v16si(d ? t[i] << 8 : inative{}, inative(w[i].even), inative(even));
      if (mxfp4) t[i] = __builtin_ia32_vpdpbusd_v16si(t[i], inative(w[i].odd), inative(odd));
    }
  }
}
// From 128 whole numbers.
template <bool mxfp4>
K3_INLINE void cut(const int32_t* n, char* digits) {
  int32_t m[kInputs];
  for (int i = 0; i < 64; ++i) m[i] = n[mxfp4 ? 2 * i : i], m[64 + i] = n[mxfp4 ? 2 * i + 1 : 64 + i];
  int8_t* to = reinterpret_cast<int8_t*>(digits);
  if (mxfp4) {
    for (int i = 0; i < int(kInputs); ++i) to[i] = int8_t((m[i] + 0x8080) >> 16);
    to += kInputs;
  }
  for (int i = 0; i < int(kInputs); ++i) to[i] = int8_t((m[i] + 0x80) >> 8);
  for (int i = 0; i < int(kInputs); ++i) to[kInputs + i] = int8_t(m[i]);
}
#else
constexpr int kOffsetMxfp4 = 0, kOffsetQ8 = 0;
struct Codes {
  shorts of[4];  // of the inputs i, i + 4, ...; q8: i, i + 2, ...
};
template <bool mxfp4>
K3_INLINE Codes codes_of(bytes w) {
  auto even = [](bytes b) { return (shorts(b) << 8) >> 8; };
  auto odd = [](bytes b) { return shorts(b) >> 8; };
  if (!mxfp4) return {{even(w), odd(w)}};
  const bytes low = e2m1(w & 15), high = e2m1(bytes(ushorts(w) >> 4) & 15);
  return {{even(low), even(high), odd(low), odd(high)}};
}
K3_INLINE inative pairs(shorts a, shorts b) {  // the sums of neighbouring products
#if defined(__AVX2__)
  return __builtin_ia32_pmaddwd256(a, b);
#else
  return __builtin_ia32_pmaddwd128(a, b);
#endif
}
template <bool mxfp4>
K3_INLINE void products(const Codes* w, const FixedX& x, int half, int part, inative* t) {
  auto all = [&](int i, int first) {
    inative sum = {};
#pragma GCC unroll 4
    for (int k = 0; k < (mxfp4 ? 4 : 2); ++k) sum = sum + pairs(w[i].of[k], read_as<shorts>(x.digits + 64 * (first + k) + part * sizeof(shorts)));
    return sum;
  };
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) t[i] = mxfp4 ? (all(i, 0) << 12) + all(i, 4) : all(i, 2 * half);
}
template <bool mxfp4>
K3_INLINE void cut(const int32_t* n, char* digits) {
  typedef int16_t number __attribute__((may_alias));
  number* to = reinterpret_cast<number*>(digits);
  for (int k = 0; k < 4; ++k)
    for (int i = 0; i < 32; ++i) {
      const int32_t m = n[mxfp4 ? 4 * i + k : 64 * (k / 2) + 2 * i + k % 2], high = (m + 2048) >> 12;
      to[32 * k + i] = int16_t(mxfp4 ? high : m);
      if (mxfp4) to[32 * (k + 4) + i] = int16_t(m - high * 4096);
    }
}
#endif

// Neighbours interleaved in each 128 bits: the low or high halves of a and b, as words or as pairs of words.
#if defined(__AVX512F__)
#define K3_FOURS(a, b, c, d) \
  { a, b, c, d, a + 4, b + 4, c + 4, d + 4, a + 8, b + 8, c + 8, d + 8, a + 12, b + 12, c + 12, d + 12 }
#define K3_TWOS(a, b) \
  { a, b, a + 2, b + 2, a + 4, b + 4, a + 6, b + 6 }
#elif defined(__AVX2__)
#define K3_FOURS(a, b, c, d) \
  { a, b, c, d, a + 4, b + 4, c + 4, d + 4 }
#define K3_TWOS(a, b) \
  { a, b, a + 2, b + 2 }
#else
#define K3_FOURS(a, b, c, d) \
  { a, b, c, d }
#define K3_TWOS(a, b) \
  { a, b }
#endif
// Lane r of each four: the sum of these four lanes in t[r].
K3_INLINE inative sum_fours(const inative* t) {
  constexpr int n = kNative;
  const inative low = K3_FOURS(0, n, 1, n + 1), high = K3_FOURS(2, n + 2, 3, n + 3);
  const longs first = K3_TWOS(0, n / 2), second = K3_TWOS(1, n / 2 + 1);
  const longs a = longs(__builtin_shuffle(t[0], t[1], low) + __builtin_shuffle(t[0], t[1], high));
  const longs b = longs(__builtin_shuffle(t[2], t[3], low) + __builtin_shuffle(t[2], t[3], high));
  return inative(__builtin_shuffle(a, b, first)) + inative(__builtin_shuffle(a, b, second));
}
#undef K3_FOURS
#undef K3_TWOS
// Four numbers again and again.
K3_INLINE inative repeat(iquad q) {
#if defined(__AVX512F__)
  return __builtin_ia32_broadcasti32x4_512(q, inative{}, -1);
#elif defined(__AVX2__)
  typedef long long two __attribute__((vector_size(16)));
  return inative(__builtin_ia32_vbroadcastsi256(two(q)));
#else
  return q;
#endif
}
// Four times each of those of the four numbers that belong to this part.
K3_INLINE inative spread(iquad q, [[maybe_unused]] int part) {
#if defined(__AVX512F__)
  const inative at = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
  return __builtin_shuffle(repeat(q), at);
#elif defined(__AVX2__)
  const inative low = {0, 0, 0, 0, 1, 1, 1, 1};
  return __builtin_shuffle(repeat(q), low + 2 * part);
#else
  return inative{} + q[part];
#endif
}

// Keeps the compiler from fusing a product with the sum that follows.
K3_INLINE native rounded(native v) {
  __asm__("" : "+v"(v));
  return v;
}

// The chains of four rows of W and R rows of x: lane r of four c is chain c of row r.
template <int R>
struct Chains {
  native sum[R][kParts];
};

// 2^(byte - 127) for bytes that lie in the lowest eight bits; the byte 0 is a subnormal number
K3_INLINE native e8m0(unative byte) {
  const inative bits = inative(byte << 23), least = inative{} + 0x00400000;
  return native(bits > least ? bits : least);
}

// 64 bytes of four rows of W, R rows of x. scale: a word of each row's scales, four bytes of mxfp4 or a float of q8. half: of x's 128 inputs, q8
// only.
template <Stored stored, int R>
K3_INLINE void step(const char* const* w, const iquad* scale, const FixedX* x, int64_t x_row, int half, Chains<R>& chains) {
  constexpr bool mxfp4 = stored == Stored::mxfp4;
#pragma GCC unroll 4
  for (int part = 0; part < kParts; ++part) {
    native factor = native(repeat(*scale));
    if (mxfp4) {
      unative at;
      for (int lane = 0; lane < kNative; ++lane) at[lane] = uint32_t(8 * ((part * kNative + lane) / 4));
      factor = e8m0((unative(factor) >> at) & 255);
    }
    Codes codes[kRows];
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) codes[i] = codes_of<mxfp4>(read_as<bytes>(w[i] + part * sizeof(bytes)));
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const FixedX& f = x[r * x_row];
      inative t[kRows];
      products<mxfp4>(codes, f, half, part, t);
      auto four_times = [&](const void* p) {
        return mxfp4 ? read_as<inative>(static_cast<const char*>(p) + part * sizeof(inative))
                     : spread(read_as<iquad>(static_cast<const char*>(p) + half * sizeof(iquad)), part);
      };
      native& chain = chains.sum[r][part];
      const native sums = to_floats(sum_fours(t) + four_times(f.correction));
      chain = chain + rounded(rounded(sums * native(four_times(f.step))) * factor);
    }
  }
}

// Four words of each of four rows' scales, as the words of the four rows four times; what is not there is 0.
K3_INLINE void read_scales(const char* const* from, int64_t there, iquad* scales) {
  iquad row[kRows] = {};
  for (int i = 0; i < kRows; ++i) {
    if (there >= 16)
      row[i] = read_as<iquad>(from[i]);
    else
      __builtin_memcpy(&row[i], from[i], uint64_t(there));
  }
  const iquad low = {0, 4, 1, 5}, high = {2, 6, 3, 7}, first = {0, 1, 4, 5}, second = {2, 3, 6, 7};
  const iquad a = __builtin_shuffle(row[0], row[1], low), b = __builtin_shuffle(row[2], row[3], low), c = __builtin_shuffle(row[0], row[1], high),
              d = __builtin_shuffle(row[2], row[3], high);
  scales[0] = __builtin_shuffle(a, b, first), scales[1] = __builtin_shuffle(a, b, second);
  scales[2] = __builtin_shuffle(c, d, first), scales[3] = __builtin_shuffle(c, d, second);
}

// Four rows of W from column j on, R rows of x.
template <Stored stored, int R>
static void tile(const CodesArgs& p, int64_t j, const FixedX* x, float* y, bool first) {
  constexpr bool mxfp4 = stored == Stored::mxfp4;
  const int64_t stride = mxfp4 ? p.in / 2 : p.in, scale_stride = mxfp4 ? p.in / kGroupMxfp4 : (p.in + kGroupQ8 - 1) / kGroupQ8 * 4;
  const int64_t x_row = (p.in + kInputs - 1) / kInputs, rows = p.last - j < kRows ? p.last - j : kRows;
  const char *w[kRows], *scale[kRows];
  for (int64_t i = 0; i < kRows; ++i) {  // a row that is not there is the last one once more
    const int64_t row = j + (i < rows ? i : rows - 1);
    w[i] = static_cast<const char*>(p.w) + row * stride, scale[i] = static_cast<const char*>(p.scale) + row * scale_stride;
  }
  // Fetched ahead into the second level, as one stream of whole rows: four streams, or jumps, halve what the memory gives.
  const char* next = w[0] + (2 * kRows * stride > kAhead ? 2 * kRows * stride : kAhead);
  Chains<R> chains{};
  char edge[kRows][64] = {};
  iquad scales[4];
  for (int64_t at = 0, unit = 0; at < stride; at += 64, ++unit) {
    if (unit % 4 == 0) {
      read_scales(scale, scale_stride - 4 * unit, scales);
      for (int i = 0; i < kRows; ++i) scale[i] += 16;
    }
    if (first)
      for (int i = 0; i < kRows; ++i, next += 64) __builtin_prefetch(next, 0, 2);
    if (stride - at < 64)
      for (int i = 0; i < kRows; ++i) {
        __builtin_memcpy(edge[i], w[i], uint64_t(stride - at));
        w[i] = edge[i];
      }
    step<stored, R>(w, scales + unit % 4, x + (mxfp4 ? unit : unit / 2), x_row, mxfp4 ? 0 : int(unit % 2), chains);
    for (int i = 0; i < kRows; ++i) w[i] += 64;
  }
  for (int r = 0; r < R; ++r) {
    float c[4][kRows];
    __builtin_memcpy(c, chains.sum[r], sizeof c);
    for (int64_t i = 0; i < rows; ++i) y[r * p.ldy + j + i] = (c[0][i] + c[2][i]) + (c[1][i] + c[3][i]);
  }
}

template <Stored stored, int R>
static void rows(const CodesArgs& p, int64_t& i) {
  for (; i + R <= p.rows; i += R)
    for (int64_t j = p.first; j < p.last; j += kRows) tile<stored, R>(p, j, p.x + i * ((p.in + kInputs - 1) / kInputs), p.y + i * p.ldy, i == 0);
}
template <Stored stored>
static void product_as(const CodesArgs& p) {
  int64_t i = 0;
  rows<stored, 8>(p, i);
  rows<stored, 4>(p, i);
  rows<stored, 2>(p, i);
  rows<stored, 1>(p, i);
}
static void codes_product(const CodesArgs& p) { p.stored == Stored::mxfp4 ? product_as<Stored::mxfp4>(p) : product_as<Stored::q8>(p); }

// n for 32 inputs of which `count` are there, below 2^bits 4/3; returns the step, or NaN when one of them is not finite.
K3_INLINE float fix_group(const float* x, int64_t count, int bits, int32_t* n) {
  int32_t pattern[32] = {}, most = 0;
  if (count == 32)
    __builtin_memcpy(pattern, x, sizeof pattern);
  else
    __builtin_memcpy(pattern, x, uint64_t(count) * 4);
  for (int i = 0; i < 32; ++i) {
    const int32_t magnitude = pattern[i] & 0x7fffffff;
    most = magnitude > most ? magnitude : most;
  }
  int32_t e = int32_t((uint32_t(most) + 0x555555u) >> 23);  // of the power of two at or below 1.5 most; a NaN is the largest of all
  e = e < 24 ? 24 : e;
  if (e >= 255) {
    for (int i = 0; i < 32; ++i) n[i] = 0;
    return __builtin_nanf("");
  }
  const float inverse = __builtin_bit_cast(float, (254 + bits - e) << 23);
  for (int i = 0; i < 32; ++i) {  // 2^23 + |x / step| is a whole number
    const float whole = __builtin_bit_cast(float, pattern[i] & 0x7fffffff) * inverse + 8388608.0f;
    const int32_t magnitude = __builtin_bit_cast(int32_t, whole) & 0x7fffff, sign = pattern[i] >> 31;
    n[i] = (magnitude ^ sign) - sign;
  }
  return __builtin_bit_cast(float, (e - bits) << 23);
}
template <bool mxfp4>
static void fix_as(const FixArgs& p) {
  constexpr int of = mxfp4 ? 32 : 16, copies = mxfp4 ? 4 : 1, offset = mxfp4 ? kOffsetMxfp4 : kOffsetQ8;
  FixedX* to = p.to;
  for (int64_t r = 0; r < p.rows; ++r)
    for (int64_t k = 0; k < p.in; k += kInputs, ++to) {
      int32_t n[kInputs];
      float step[4];
      for (int g = 0; g < 4; ++g) {
        const int64_t at = k + 32 * g, left = p.in - at;
        step[g] = fix_group(p.x + r * p.in + (left > 0 ? at : 0), left < 0 ? 0 : left < 32 ? left : 32, mxfp4 ? kBitsMxfp4 : kBitsQ8, n + 32 * g);
      }
      for (int g = 0; g < int(kInputs) / of; ++g) {
        int32_t sum = 0;
        for (int i = 0; i < of; ++i) sum += n[of * g + i];
        for (int i = 0; i < copies; ++i)
          to->correction[copies * g + i] = -offset * sum, to->step[copies * g + i] = step[of * g / 32] * (mxfp4 ? 0.5f : 1.0f);
      }
      cut<mxfp4>(n, to->digits);
    }
}
static void fix(const FixArgs& p) { p.stored == Stored::mxfp4 ? fix_as<true>(p) : fix_as<false>(p); }

}  // namespace k3::cpu::K3_ISA

K3_KERNELS(CodesKernels, codes_kernels, fix, codes_product)

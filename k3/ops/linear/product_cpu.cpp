// Products in the order of product.h. Lanes run over sixteen columns of the result, so each lane is one chain of multiply-adds over k.
//
// A weight W (out, in) is bound by reading it once, at any number of rows below kMaxRows. For each group of kTiles tiles of sixteen columns:
//   1. 64 bytes of each of a tile's sixteen rows come in, asked for kAhead bytes earlier: 64 rows are more streams than a processor foresees;
//   2. as 16 x 16 words of 32 bits they are transposed, so that a vector holds the same word of sixteen rows;
//   3. a word is one float32, two bfloat16 (a shift, a mask), four bytes (two shifts, a conversion, a scale) or eight 4-bit codes (a shift, a
//      table, the scale of the row's 32 inputs);
//   4. each vector of weights goes into the chains of all rows of x. Chains of different tiles hide the latency of a single row's.
#include "k3/core/simd.h"
#include "k3/ops/linear/product_kernels.h"

namespace k3::cpu::K3_ISA {

using namespace k3::simd;

constexpr int kTiles = 4, kMaxRows = 32;
constexpr int kBytes = 64, kAhead = 512;  // of one row of W: what is taken at once, and how long before it is asked for
#if defined(__AVX512F__)
constexpr int kChains = 8;  // rows whose chains fill the registers
#elif defined(__AVX2__)
constexpr int kChains = 4;
#else
constexpr int kChains = 2;
#endif

K3_INLINE unative read_native(const char* p) {
  typedef unative mem __attribute__((aligned(1), may_alias));
  return *reinterpret_cast<const mem*>(p);
}

// kNative x kNative words in registers: rounds of pairwise exchange, doubling the distance.
K3_INLINE void transpose_native(unative* r) {
#define K3_ROUND(d, lo, hi)                                                  \
  _Pragma("GCC unroll 16") for (int i = 0; i < kNative; ++i) if (!(i & d)) { \
    unative a = r[i], b = r[i + d];                                          \
    r[i] = __builtin_shuffle(a, b, lo);                                      \
    r[i + d] = __builtin_shuffle(a, b, hi);                                  \
  }
#if defined(__AVX512F__)
  const unative lo1 = {0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30}, hi1 = {1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31};
  const unative lo2 = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29}, hi2 = {2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31};
  const unative lo4 = {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27}, hi4 = {4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31};
  const unative lo8 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}, hi8 = {8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31};
  K3_ROUND(1, lo1, hi1)
  K3_ROUND(2, lo2, hi2)
  K3_ROUND(4, lo4, hi4)
  K3_ROUND(8, lo8, hi8)
#elif defined(__AVX2__)
  const unative lo1 = {0, 8, 2, 10, 4, 12, 6, 14}, hi1 = {1, 9, 3, 11, 5, 13, 7, 15};
  const unative lo2 = {0, 1, 8, 9, 4, 5, 12, 13}, hi2 = {2, 3, 10, 11, 6, 7, 14, 15};
  const unative lo4 = {0, 1, 2, 3, 8, 9, 10, 11}, hi4 = {4, 5, 6, 7, 12, 13, 14, 15};
  K3_ROUND(1, lo1, hi1)
  K3_ROUND(2, lo2, hi2)
  K3_ROUND(4, lo4, hi4)
#else
  const unative lo1 = {0, 4, 2, 6}, hi1 = {1, 5, 3, 7}, lo2 = {0, 1, 4, 5}, hi2 = {2, 3, 6, 7};
  K3_ROUND(1, lo1, hi1)
  K3_ROUND(2, lo2, hi2)
#endif
#undef K3_ROUND
}

// w[i] = word i of sixteen rows
K3_INLINE void transpose_words(const char* p, int64_t stride, uvec* w) {
  constexpr int parts = kLanes / kNative;
  for (int a = 0; a < parts; ++a)
    for (int b = 0; b < parts; ++b) {
      unative r[kNative];
#pragma GCC unroll 16
      for (int j = 0; j < kNative; ++j) r[j] = read_native(p + (a * kNative + j) * stride + b * kNative * 4);
      transpose_native(r);
#pragma GCC unroll 16
      for (int i = 0; i < kNative; ++i) __builtin_memcpy(reinterpret_cast<char*>(w + b * kNative + i) + a * kNative * 4, &r[i], sizeof(unative));
    }
}

// The value of a 4-bit code (sign, two bits of exponent, one of mantissa) in each lane; bits above the fourth are ignored.
K3_INLINE vec e2m1(uvec code) {
#if defined(__AVX512F__)
  const vec table = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
  return __builtin_shuffle(table, ivec(code));
#else
  uvec sign = (code & uvec(isplat(8))) << 28;
#if defined(__AVX2__)
  const native table = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};  // a shuffle looks at three bits of an index
  vec magnitude = {__builtin_shuffle(table, inative(code.lo)), __builtin_shuffle(table, inative(code.hi))};
#else
  uvec low = code & uvec(isplat(7));
  vec v = vec((low << 22) + uvec(isplat(126 << 23)));  // right from code 2 on
  vec magnitude = select(ivec(low) < isplat(2), v + v - splat(1.0f), v);
#endif
  return vec(uvec(magnitude) | sign);
#endif
}
// 2^(byte - 127); the byte 0 is a subnormal number
K3_INLINE vec e8m0(uvec byte) { return select(ivec(byte) == isplat(0), vec(isplat(0x00400000)), vec(byte << 23)); }

template <Stored stored>
constexpr int kUnit = stored == Stored::f32    ? 16
                      : stored == Stored::bf16 ? 32
                      : stored == Stored::q8   ? 64
                                               : 128;  // weights in kBytes
template <Stored stored>
K3_INLINE int64_t bytes_of_weights(int64_t n) {
  return n * kBytes / kUnit<stored>;
}

// t[i] = weight i of sixteen rows. scale: a word for each row, mxfp4's four bytes or q8's float.
template <Stored stored>
K3_INLINE void unpack(const char* p, int64_t stride, const uint32_t* scale, vec* t) {
  uvec w[16];
  transpose_words(p, stride, w);
  if constexpr (stored == Stored::f32) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) t[i] = vec(w[i]);
  } else if constexpr (stored == Stored::bf16) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) t[2 * i] = vec(w[i] << 16), t[2 * i + 1] = vec(w[i] & uvec(isplat(int32_t(0xffff0000))));
  } else if constexpr (stored == Stored::q8) {
    vec f;
    __builtin_memcpy(&f, scale, sizeof(f));
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i)
#pragma GCC unroll 4
      for (int b = 0; b < 4; ++b) t[4 * i + b] = to_floats(ivec(w[i] << (24 - 8 * b)) >> 24) * f;
  } else {
    uvec s;
    __builtin_memcpy(&s, scale, sizeof(s));
    for (int g = 0; g < 4; ++g) {
      vec f = e8m0(s & uvec(isplat(255)));
      s = s >> 8;
      for (int i = 4 * g; i < 4 * g + 4; ++i)
#pragma GCC unroll 8
        for (int q = 0; q < 8; ++q) t[8 * i + q] = e2m1(w[i] >> (4 * q)) * f;
    }
  }
}

// The chains of R rows of x over n weights.
template <int R>
K3_INLINE void chain(const float* x, int64_t x_row, int64_t x_step, const vec* t, int64_t n, vec* acc) {
  vec s[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) s[r] = acc[r];
  for (int64_t k = 0; k < n; ++k)
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) s[r] = fma(splat(x[r * x_row + k * x_step]), t[k], s[r]);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) acc[r] = s[r];
}
template <int R>
K3_INLINE void chains(const float* x, int64_t x_row, int64_t x_step, const vec* t, int64_t n, int64_t rows, vec* acc) {
  int64_t r = 0;
  for (; r + R <= rows; r += R) chain<R>(x + r * x_row, x_row, x_step, t, n, acc + r);
  if constexpr (R > 1)
    if (r < rows) chains<R / 2>(x + r * x_row, x_row, x_step, t, n, rows - r, acc + r);
}

template <Stored stored>
static void tiles(const WeightArgs& p, int64_t j0, int64_t columns) {
  constexpr int unit = kUnit<stored>;
  vec acc[kTiles][kMaxRows];
  const int64_t groups = stored == Stored::mxfp4 ? p.in / kGroupMxfp4 : (p.in + kGroupQ8 - 1) / kGroupQ8, count = (columns + kLanes - 1) / kLanes;
  for (int64_t k0 = 0; k0 < p.in || k0 == 0; k0 += kProductBlock) {
    for (int64_t t = 0; t < count; ++t)
      for (int64_t r = 0; r < p.rows; ++r) acc[t][r] = zero();
    const int64_t end = k0 + kProductBlock < p.in ? k0 + kProductBlock : p.in;
    for (int64_t k = k0; k < end; k += unit)
      for (int64_t t = 0; t < count; ++t) {
        const int64_t j = j0 + t * kLanes, rows = columns - t * kLanes < kLanes ? columns - t * kLanes : kLanes, n = end - k < unit ? end - k : unit;
        const char* w = static_cast<const char*>(p.w) + j * p.w_stride + bytes_of_weights<stored>(k);
        uint32_t scale[kLanes] = {};
        if (stored == Stored::q8)
          for (int64_t i = 0; i < rows; ++i) __builtin_memcpy(&scale[i], static_cast<const float*>(p.scale) + (j + i) * groups + k / kGroupQ8, 4);
        if (stored == Stored::mxfp4)
          for (int64_t i = 0; i < rows; ++i) {
            const uint8_t* s = static_cast<const uint8_t*>(p.scale) + (j + i) * groups + k / kGroupMxfp4;
            if (n == unit)
              __builtin_memcpy(&scale[i], s, 4);
            else
              for (int64_t g = 0; g < n / 32; ++g) scale[i] |= uint32_t(s[g]) << (8 * g);
          }
        vec weights[unit];
        if (rows == kLanes && n == unit) {
          for (int64_t i = 0; i < kLanes; ++i) __builtin_prefetch(w + i * p.w_stride + kAhead);
          unpack<stored>(w, p.w_stride, scale, weights);
          chains<kChains>(p.x + k * p.x_step, p.x_row, p.x_step, weights, unit, p.rows, acc[t]);
        } else {
          char edge[kLanes * kBytes] = {};
          for (int64_t i = 0; i < rows; ++i) __builtin_memcpy(edge + i * kBytes, w + i * p.w_stride, uint64_t(bytes_of_weights<stored>(n)));
          unpack<stored>(edge, kBytes, scale, weights);
          chains<kChains>(p.x + k * p.x_step, p.x_row, p.x_step, weights, n, p.rows, acc[t]);
        }
      }
    for (int64_t t = 0; t < count; ++t)
      for (int64_t r = 0; r < p.rows; ++r) {
        float* y = p.y + r * p.ldy + j0 + t * kLanes;
        const int64_t n = columns - t * kLanes;
        store_n(y, p.accumulate || k0 ? load_n(y, n) + acc[t][r] : acc[t][r], n);
      }
  }
}

template <Stored stored>
static void weight_product_as(const WeightArgs& a) {
  WeightArgs p = a;
  for (int64_t i = 0; i < a.rows; i += kMaxRows) {
    p.rows = a.rows - i < kMaxRows ? a.rows - i : kMaxRows, p.x = a.x + i * a.x_row, p.y = a.y + i * a.ldy;
    for (int64_t j = a.first; j < a.last; j += kTiles * kLanes) tiles<stored>(p, j, a.last - j < kTiles * kLanes ? a.last - j : kTiles * kLanes);
  }
}

static void weight_product(const WeightArgs& a) {
  switch (a.stored) {
    case Stored::f32:
      return weight_product_as<Stored::f32>(a);
    case Stored::bf16:
      return weight_product_as<Stored::bf16>(a);
    case Stored::mxfp4:
      return weight_product_as<Stored::mxfp4>(a);
    case Stored::q8:
      return weight_product_as<Stored::q8>(a);
  }
}

static void widen(const Weight& w, int64_t first, int64_t last, float* to) {
  if (w.stored == Stored::mxfp4) {
    constexpr float value[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    const uint8_t *codes = static_cast<const uint8_t*>(w.data) + first * w.in / 2, *scale = static_cast<const uint8_t*>(w.scale) + first * w.in / 32;
    for (int64_t g = 0; g < (last - first) * w.in / 32; ++g) {
      const float s = __builtin_bit_cast(float, scale[g] ? uint32_t(scale[g]) << 23 : 0x00400000u);
      for (int64_t i = 16 * g; i < 16 * g + 16; ++i) to[2 * i] = value[codes[i] & 15] * s, to[2 * i + 1] = value[codes[i] >> 4] * s;
    }
    return;
  }
  if (w.stored == Stored::q8) {
    const int64_t groups = (w.in + kGroupQ8 - 1) / kGroupQ8;
    for (int64_t r = first; r < last; ++r) {
      const int8_t* codes = static_cast<const int8_t*>(w.data) + r * w.in;
      const float* scale = static_cast<const float*>(w.scale) + r * groups;
      float* row = to + (r - first) * w.in;
      for (int64_t i = 0; i < w.in; ++i) row[i] = float(codes[i]) * scale[i / kGroupQ8];
    }
    return;
  }
  const uint16_t* bits = static_cast<const uint16_t*>(w.data) + first * w.in;
  for (int64_t i = 0; i < (last - first) * w.in; ++i) to[i] = __builtin_bit_cast(float, uint32_t(bits[i]) << 16);
}

// B as rows of k: R rows of A by sixteen columns.
template <int R>
static void rows_by_16(const Product& p, int64_t i0, int64_t j0, int64_t cols) {
  const int64_t a_row = p.a_transposed ? 1 : p.lda, a_step = p.a_transposed ? p.lda : 1;
  const float* a = p.a + i0 * a_row;
  vec total[R];
  for (int r = 0; r < R; ++r) total[r] = p.accumulate ? load_n(p.c + (i0 + r) * p.ldc + j0, cols) : zero();
  for (int64_t k0 = 0; k0 < p.k; k0 += kProductBlock) {
    const int64_t end = k0 + kProductBlock < p.k ? k0 + kProductBlock : p.k;
    vec s[R];
    for (int r = 0; r < R; ++r) s[r] = zero();
    for (int64_t k = k0; k < end; ++k) {
      vec b = load_n(p.b + k * p.ldb + j0, cols);
      for (int r = 0; r < R; ++r) s[r] = fma(splat(a[r * a_row + k * a_step]), b, s[r]);
    }
    for (int r = 0; r < R; ++r) total[r] = p.accumulate || k0 ? total[r] + s[r] : s[r];
  }
  for (int r = 0; r < R; ++r) store_n(p.c + (i0 + r) * p.ldc + j0, total[r], cols);
}

static void ordered_product(const Product& p) {
  if (p.b_transposed)
    return weight_product({Stored::f32, p.m, p.k, 0, p.n, p.a, p.a_transposed ? 1 : p.lda, p.a_transposed ? p.lda : 1, p.b, p.ldb * 4, nullptr, p.c,
                           p.ldc, p.accumulate});
  for (int64_t j = 0; j < p.n; j += kLanes) {
    const int64_t cols = p.n - j < kLanes ? p.n - j : kLanes;
    int64_t i = 0;
    for (; i + kChains <= p.m; i += kChains) rows_by_16<kChains>(p, i, j, cols);
    for (; i < p.m; ++i) rows_by_16<1>(p, i, j, cols);
  }
}

}  // namespace k3::cpu::K3_ISA

K3_KERNELS(ProductKernels, product_kernels, ordered_product, weight_product, widen)

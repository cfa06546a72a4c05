// Products in the order of product.h. Lanes run over sixteen columns of the result, so each lane is one chain of multiply-adds over k.
//
// A weight W (out, in) is bound by reading it once, at few rows of x. For one to four tiles of sixteen columns (rows of W), row by row of x in
// registers:
//   1. 16 bytes of each of a tile's sixteen rows are transposed, as 4 x 4 words in each 128 bits, so that a vector holds one word of sixteen rows;
//   2. a word is one float32, two bfloat16 (a shift, a mask), four int8 or eight 4-bit codes (a shift, a table; below);
//   3. each vector of weights goes into the chains of up to sixteen rows of x. Chains of different tiles hide the latency of a single row's.
//
// With kManyRows of x and more it is bound by the multiply-adds. Then the vectors of one block and kPanel tiles are kept, in the second-level
// cache, and go into the chains of all rows, kPanelRows at a time.
//
// MXFP4's scales are powers of two, so they can stand outside the chains: before each group of 32 a chain is multiplied by the last group's scale
// over this one's, at the end by the last. That moves no bit as long as nothing leaves the range of normal numbers: see x_reaches() and
// scales_reach().
#include "k3/core/simd.h"
#include "k3/ops/linear/product_kernels.h"

namespace k3::cpu::K3_ISA {

using namespace k3::simd;

constexpr int kBytes = 64;  // of one row of W: a step
#if defined(__AVX512F__)
constexpr int kChains = 16;  // what fits in the registers
#elif defined(__AVX2__)
constexpr int kChains = 4;
#else
constexpr int kChains = 2;
#endif

typedef uint32_t quad __attribute__((vector_size(16)));
K3_INLINE quad read_quad(const char* p) {
  typedef quad mem __attribute__((aligned(1), may_alias));
  return *reinterpret_cast<const mem*>(p);
}
// 16 bytes from every fourth row into each 128 bits of a register
K3_INLINE unative read_rows(const char* p, [[maybe_unused]] int64_t stride) {
#if defined(__AVX512F__)
  typedef uint32_t oct __attribute__((vector_size(32)));
  oct a = __builtin_shufflevector(read_quad(p), read_quad(p + 4 * stride), 0, 1, 2, 3, 4, 5, 6, 7);
  oct b = __builtin_shufflevector(read_quad(p + 8 * stride), read_quad(p + 12 * stride), 0, 1, 2, 3, 4, 5, 6, 7);
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#elif defined(__AVX2__)
  return __builtin_shufflevector(read_quad(p), read_quad(p + 4 * stride), 0, 1, 2, 3, 4, 5, 6, 7);
#else
  return read_quad(p);
#endif
}
#if defined(__AVX512F__)
#define K3_QUADS(a, b, c, d) \
  { a, b, c, d, a + 4, b + 4, c + 4, d + 4, a + 8, b + 8, c + 8, d + 8, a + 12, b + 12, c + 12, d + 12 }
#elif defined(__AVX2__)
#define K3_QUADS(a, b, c, d) \
  { a, b, c, d, a + 4, b + 4, c + 4, d + 4 }
#else
#define K3_QUADS(a, b, c, d) \
  { a, b, c, d }
#endif
K3_INLINE void transpose_quads(const char* p, int64_t stride, unative* w) {
  constexpr uint32_t n = kNative;
  const unative low = K3_QUADS(0, n, 1, n + 1), high = K3_QUADS(2, n + 2, 3, n + 3), first = K3_QUADS(0, 1, n, n + 1),
                second = K3_QUADS(2, 3, n + 2, n + 3);
  const unative a = read_rows(p, stride), b = read_rows(p + stride, stride), c = read_rows(p + 2 * stride, stride),
                d = read_rows(p + 3 * stride, stride);
  const unative ab0 = __builtin_shuffle(a, b, low), ab2 = __builtin_shuffle(a, b, high), cd0 = __builtin_shuffle(c, d, low),
                cd2 = __builtin_shuffle(c, d, high);
  w[0] = __builtin_shuffle(ab0, cd0, first), w[1] = __builtin_shuffle(ab0, cd0, second);
  w[2] = __builtin_shuffle(ab2, cd2, first), w[3] = __builtin_shuffle(ab2, cd2, second);
}
#undef K3_QUADS

// w[i] = word i of sixteen rows, i < 4
K3_INLINE void transpose_words(const char* p, int64_t stride, uvec* w) {
  constexpr int parts = kLanes / kNative;
  unative part[parts][4];
#pragma GCC unroll 4
  for (int a = 0; a < parts; ++a) transpose_quads(p + a * kNative * stride, stride, part[a]);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
#if defined(__AVX512F__)
    w[i] = part[0][i];
#elif defined(__AVX2__)
    w[i] = uvec(part[0][i], part[1][i]);
#else
    w[i] = uvec({part[0][i], part[1][i]}, {part[2][i], part[3][i]});
#endif
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

// Keeps the compiler from fusing a product with the sum that follows.
K3_INLINE native rounded(native v) {
  __asm__("" : "+v"(v));
  return v;
}
#if !defined(__AVX512F__)
template <class H, class L>
K3_INLINE Pair<H, L> rounded(Pair<H, L> v) {
  return {rounded(v.lo), rounded(v.hi)};
}
#endif

// When scales may stand outside the chains. x is 0 or 2^-60 <= |x| < 2^50, scales are 2^-31 .. 2^32: then a chain, in whichever of these scales, is a
// multiple of 2^(-60-24-63) (x has 24 bits, a code is a multiple of 1/2, two scales are 2^63 apart at most), which float32 holds down to 2^-149, and
// below 384 * 6 * 2^(50+63) < 2^125.
static bool x_reaches(const WeightArgs& p) {
  ivec bad{};
  for (int64_t r = 0; r < p.rows; ++r)
    for (int64_t k = 0; k < p.in; k += kLanes) {  // in is a multiple of 32
      const ivec bits = ivec(load(p.x + r * p.x_row + k)) & isplat(0x7fffffff);
      bad = bad | ((bits != isplat(0)) & ((bits < isplat((127 - 60) << 23)) | (bits >= isplat((127 + 50) << 23))));
    }
  for (int i = 0; i < kLanes; ++i)
    if (bad[i]) return false;
  return true;
}
// The scales of sixteen rows for a block's steps, a word a row: four bytes of mxfp4, a float of q8; 127 (one) where there is no row or group.
template <Stored stored>
constexpr int kSteps = int(kProductBlock) / kUnit<stored>;
template <Stored stored>
K3_INLINE void load_scales(const WeightArgs& p, int64_t row, int64_t rows, int64_t k0, int64_t end, uvec* scales) {
  if constexpr (stored == Stored::q8) {
    const int64_t groups = (p.in + kGroupQ8 - 1) / kGroupQ8;
    for (int64_t k = k0; k < end; k += kUnit<stored>) {
      float f[kLanes] = {};
      for (int64_t i = 0; i < rows; ++i) f[i] = static_cast<const float*>(p.scale)[(row + i) * groups + k / kGroupQ8];
      __builtin_memcpy(scales++, f, sizeof f);
    }
  }
  if constexpr (stored == Stored::mxfp4) {
    const int64_t groups = p.in / kGroupMxfp4;
    const uint8_t* from = static_cast<const uint8_t*>(p.scale) + row * groups + k0 / kGroupMxfp4;
    for (int64_t k = k0; k < end; k += kUnit<stored>, from += 4) {
      uint32_t words[kLanes];
      const int64_t n = (end - k) / kGroupMxfp4;
      if (rows == kLanes && n >= 4) {
        for (int i = 0; i < kLanes; ++i) __builtin_memcpy(&words[i], from + i * groups, 4);
      } else {
        for (int i = 0; i < kLanes; ++i) words[i] = 0x7f7f7f7f;
        for (int64_t i = 0; i < rows; ++i) __builtin_memcpy(&words[i], from + i * groups, uint64_t(n < 4 ? n : 4));
      }
      __builtin_memcpy(scales++, words, sizeof words);
    }
  }
}
// Whether all bytes are 96 .. 159: bit 7 unlike bit 6, bit 6 like bit 5.
K3_INLINE bool scales_reach(const uvec* scales, int64_t n) {
  uvec all = ~uvec{}, any{};
  for (int64_t i = 0; i < n; ++i) {
    const uvec t = scales[i] ^ (scales[i] << 1);
    all = all & t, any = any | t;
  }
  const ivec bad = ivec((~all & uvec(isplat(int32_t(0x80808080)))) | (any & uvec(isplat(0x40404040))));
  int32_t found = 0;
  for (int i = 0; i < kLanes; ++i) found |= bad[i];
  return found == 0;
}

// Weight c of sixteen rows, of those in four words; mxfp4 without its scale.
template <Stored stored>
K3_INLINE vec weight(const uvec* w, int c, vec scale) {
  if constexpr (stored == Stored::f32) return vec(w[c]);
  if constexpr (stored == Stored::bf16) return vec(c & 1 ? w[c / 2] & uvec(isplat(int32_t(0xffff0000))) : w[c / 2] << 16);
  if constexpr (stored == Stored::q8) return to_floats(ivec(w[c / 4] << (24 - 8 * (c % 4))) >> 24) * scale;
  if constexpr (stored == Stored::mxfp4) return e2m1(w[c / 8] >> (4 * (c % 8)));
}

// The chains s of R rows of x and T tiles over one step of n weights (n = kUnit if `all`). moved: scales stand outside; `last` is the one that the
// chains are in.
template <Stored stored, int R, int T, bool all, bool moved>
K3_INLINE void step(const char* const* w, int64_t stride, const uvec* scales, uvec* last, const float* x, int64_t x_row, int64_t n, vec (*s)[R]) {
  constexpr int of4 = kUnit<stored> / 4;
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
    if (!all && q * of4 >= n) return;
    uvec words[T][4];
    vec scale[T];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      transpose_words(w[t] + 16 * q, stride, words[t]);
      if constexpr (stored == Stored::q8) scale[t] = vec(scales[t]);
      if constexpr (stored == Stored::mxfp4) {
        const uvec byte = (scales[t] >> (8 * q)) & uvec(isplat(255));
        scale[t] = moved ? vec((last[t] - byte + uvec(isplat(127))) << 23) : e8m0(byte);
        last[t] = byte;
        if (moved)
#pragma GCC unroll 16
          for (int r = 0; r < R; ++r) s[t][r] = rounded(s[t][r] * scale[t]);
      }
    }
#pragma GCC unroll 32
    for (int c = 0; c < of4; ++c) {
      if (!all && q * of4 + c >= n) return;
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        vec v = weight<stored>(words[t], c, scale[t]);
        if (stored == Stored::mxfp4 && !moved) v = v * scale[t];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) s[t][r] = fma(splat(x[r * x_row + q * of4 + c]), v, s[t][r]);
      }
    }
  }
}

// The sum of one block, k0 .. end - 1.
template <Stored stored, int R, int T, bool moved>
K3_INLINE void block(const WeightArgs& p, const float* x, int64_t k0, int64_t end, int64_t j, int64_t columns, const uvec (*scales)[kSteps<stored>],
                     vec (*s)[R]) {
  constexpr int U = kUnit<stored>;
  const char* w[T];
  for (int t = 0; t < T; ++t) w[t] = static_cast<const char*>(p.w) + (j + t * kLanes) * p.w_stride + k0 * kBytes / U;
  // Rows of few kilobytes end before a processor has foreseen them: then the next tile is fetched into the second level meanwhile.
  const bool short_rows = p.w_stride < 6144;
  const char* next = w[0] + T * kLanes * p.w_stride + (T * kLanes - 1) * (k0 * kBytes / U);
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t)
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) s[t][r] = zero();
  uvec last[T];
  for (int t = 0; t < T; ++t) last[t] = uvec(isplat(127));
  int64_t k = k0;
  if (columns == T * kLanes)
    for (; k + U <= end; k += U) {
      uvec scale[T];
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        if (stored == Stored::q8 || stored == Stored::mxfp4) scale[t] = scales[t][(k - k0) / U];
        if (short_rows)
          for (int i = 0; i < kLanes; ++i) __builtin_prefetch(next, 0, 2), next += kBytes;
        else
          for (int i = 0; i < kLanes; ++i) __builtin_prefetch(w[t] + i * p.w_stride + 4 * kBytes);
      }
      step<stored, R, T, true, moved>(w, p.w_stride, scale, last, x + k, p.x_row, U, s);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) w[t] += kBytes;
    }
  for (int64_t n; k < end; k += n) {  // what is no whole step or tile: through a copy
    char edge[T][kLanes * kBytes] = {};
    const char* copy[T];
    uvec scale[T];
    n = end - k < U ? end - k : U;
    for (int t = 0; t < T; ++t) {
      const int64_t rows = columns - t * kLanes < kLanes ? columns - t * kLanes : kLanes;
      for (int64_t i = 0; i < rows; ++i) __builtin_memcpy(edge[t] + i * kBytes, w[t] + i * p.w_stride, uint64_t(n * kBytes / U));
      if (stored == Stored::q8 || stored == Stored::mxfp4) scale[t] = scales[t][(k - k0) / U];
      copy[t] = edge[t], w[t] += n * kBytes / U;
    }
    step<stored, R, T, false, moved>(copy, kBytes, scale, last, x + k, p.x_row, n, s);
  }
  if constexpr (moved)
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) s[t][r] = rounded(s[t][r] * vec(last[t] << 23));
}

// Rows i .. i + R - 1 of x, T tiles from column j on, of which `columns` are there.
template <Stored stored, int R, int T>
static void tiles(const WeightArgs& p, bool may_move, int64_t i, int64_t j, int64_t columns) {
  const float* x = p.x + i * p.x_row;
  for (int64_t k0 = 0; k0 < p.in || k0 == 0; k0 += kProductBlock) {
    const int64_t end = k0 + kProductBlock < p.in ? k0 + kProductBlock : p.in;
    vec s[T][R];
    uvec scales[T][kSteps<stored>];
    for (int t = 0; t < T; ++t)
      load_scales<stored>(p, j + t * kLanes, columns - t * kLanes < kLanes ? columns - t * kLanes : kLanes, k0, end, scales[t]);
    bool moved = stored == Stored::mxfp4 && may_move;
    for (int t = 0; t < T && moved; ++t) moved = scales_reach(scales[t], (end - k0 + kUnit<stored> - 1) / kUnit<stored>);
    if (stored == Stored::mxfp4 && moved)
      block<stored, R, T, stored == Stored::mxfp4>(p, x, k0, end, j, columns, scales, s);
    else
      block<stored, R, T, false>(p, x, k0, end, j, columns, scales, s);
    for (int t = 0; t < T; ++t)
      for (int r = 0; r < R; ++r) {
        float* y = p.y + (i + r) * p.ldy + j + t * kLanes;
        const int64_t n = columns - t * kLanes;
        store_n(y, p.accumulate || k0 ? load_n(y, n) + s[t][r] : s[t][r], n);
      }
  }
}

template <Stored stored, int R>
static void rows(const WeightArgs& p, bool may_move, int64_t& i) {
#if defined(__AVX512F__)
  constexpr int most = stored == Stored::f32 ? 1 : stored == Stored::bf16 ? 2 : 4, T = R == 1 ? most : R == 2 && most > 1 ? 2 : 1;
#else
  constexpr int T = 1;
#endif
  for (; i + R <= p.rows; i += R) {
    int64_t j = p.first;
    for (; j + T * kLanes <= p.last; j += T * kLanes) tiles<stored, R, T>(p, may_move, i, j, T * kLanes);
    for (; j < p.last; j += kLanes) tiles<stored, R, 1>(p, may_move, i, j, p.last - j < kLanes ? p.last - j : kLanes);
  }
}
#if defined(__AVX512F__)
constexpr int kPanel = 2, kPanelRows = 8;
#elif defined(__AVX2__)
constexpr int kPanel = 1, kPanelRows = 4;
#else
constexpr int kPanel = 1, kPanelRows = 2;
#endif
constexpr int64_t kManyRows = 16;

// to[k][t] = weight k0 + k of the sixteen rows of tile t
template <Stored stored>
static void fill_panel(const WeightArgs& p, int64_t j, int64_t columns, int64_t k0, int64_t end, vec (*to)[kPanel]) {
  constexpr int U = kUnit<stored>, of4 = U / 4;
  for (int t = 0; t < kPanel; ++t) {
    const int64_t left = columns - t * kLanes, count = left < 0 ? 0 : left < kLanes ? left : kLanes;
    const char* w = static_cast<const char*>(p.w) + (j + t * kLanes) * p.w_stride + k0 * kBytes / U;
    uvec scales[kSteps<stored>];
    load_scales<stored>(p, j + t * kLanes, count, k0, end, scales);
    for (int64_t k = k0; k < end; k += U, w += kBytes) {
      const int64_t n = end - k < U ? end - k : U;
      char edge[kLanes * kBytes];
      const char* from = w;
      int64_t stride = p.w_stride;
      if (count < kLanes || n < U) {
        __builtin_memset(edge, 0, sizeof edge);
        for (int64_t i = 0; i < count; ++i) __builtin_memcpy(edge + i * kBytes, w + i * p.w_stride, uint64_t(n * kBytes / U));
        from = edge, stride = kBytes;
      }
      for (int q = 0; q < 4 && q * of4 < n; ++q) {
        uvec words[4];
        transpose_words(from + 16 * q, stride, words);
        vec scale = zero();
        if constexpr (stored == Stored::q8) scale = vec(scales[(k - k0) / U]);
        if constexpr (stored == Stored::mxfp4) scale = e8m0((scales[(k - k0) / U] >> (8 * q)) & uvec(isplat(255)));
#pragma GCC unroll 32
        for (int c = 0; c < of4; ++c) {
          vec v = weight<stored>(words, c, scale);
          if (stored == Stored::mxfp4) v = v * scale;
          if (q * of4 + c < n) to[k - k0 + q * of4 + c][t] = v;
        }
      }
    }
  }
}
// Rows i .. i + R - 1 of x with a panel of n weights.
template <int R>
K3_INLINE void panel_rows(const WeightArgs& p, const vec (*panel)[kPanel], const float* x, float* y, int64_t n, int64_t columns, bool add) {
  vec s[R][kPanel];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int t = 0; t < kPanel; ++t) s[r][t] = zero();
  for (int64_t k = 0; k < n; ++k)
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int t = 0; t < kPanel; ++t) s[r][t] = fma(splat(x[r * p.x_row + k]), panel[k][t], s[r][t]);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int t = 0; t < kPanel; ++t) {
      const int64_t there = columns - t * kLanes;
      float* to = y + r * p.ldy + t * kLanes;
      if (there > 0) store_n(to, add ? load_n(to, there) + s[r][t] : s[r][t], there);
    }
}
template <Stored stored>
static void many_rows(const WeightArgs& p) {
  vec panel[kProductBlock][kPanel];
  for (int64_t j = p.first; j < p.last; j += kPanel * kLanes) {
    const int64_t columns = p.last - j < kPanel * kLanes ? p.last - j : kPanel * kLanes;
    for (int64_t k0 = 0; k0 < p.in || k0 == 0; k0 += kProductBlock) {
      const int64_t end = k0 + kProductBlock < p.in ? k0 + kProductBlock : p.in;
      fill_panel<stored>(p, j, columns, k0, end, panel);
      int64_t i = 0;
      auto x = [&] { return p.x + i * p.x_row + k0; };
      auto y = [&] { return p.y + i * p.ldy + j; };
      for (; i + kPanelRows <= p.rows; i += kPanelRows) panel_rows<kPanelRows>(p, panel, x(), y(), end - k0, columns, p.accumulate || k0);
      for (; i < p.rows; ++i) panel_rows<1>(p, panel, x(), y(), end - k0, columns, p.accumulate || k0);
    }
  }
}

template <Stored stored>
static void weight_product_as(const WeightArgs& p) {
  if (p.rows >= kManyRows) return many_rows<stored>(p);
  const bool may_move = stored == Stored::mxfp4 && x_reaches(p);
  int64_t i = 0;
  if constexpr (kChains >= 16 && stored != Stored::mxfp4) rows<stored, 16>(p, may_move, i);
  if constexpr (kChains >= 8) rows<stored, 8>(p, may_move, i);
  if constexpr (kChains >= 4) rows<stored, 4>(p, may_move, i);
  rows<stored, 2>(p, may_move, i);
  rows<stored, 1>(p, may_move, i);
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
  if (p.b_transposed && !p.a_transposed)
    return weight_product({Stored::f32, p.m, p.k, 0, p.n, p.a, p.lda, p.b, p.ldb * 4, nullptr, p.c, p.ldc, p.accumulate});
  if (p.b_transposed) {  // no layer needs it: a row of A gathered for each block
    for (int64_t i = 0; i < p.m; ++i)
      for (int64_t k0 = 0; k0 < p.k || k0 == 0; k0 += kProductBlock) {
        const int64_t n = p.k - k0 < kProductBlock ? p.k - k0 : kProductBlock;
        float row[kProductBlock];
        for (int64_t k = 0; k < n; ++k) row[k] = p.a[(k0 + k) * p.lda + i];
        weight_product({Stored::f32, 1, n, 0, p.n, row, n, p.b + k0, p.ldb * 4, nullptr, p.c + i * p.ldc, p.ldc, p.accumulate || k0});
      }
    return;
  }
  constexpr int most = kChains < 8 ? kChains : 8;
  for (int64_t j = 0; j < p.n; j += kLanes) {
    const int64_t cols = p.n - j < kLanes ? p.n - j : kLanes;
    int64_t i = 0;
    for (; i + most <= p.m; i += most) rows_by_16<most>(p, i, j, cols);
    for (; i < p.m; ++i) rows_by_16<1>(p, i, j, cols);
  }
}

}  // namespace k3::cpu::K3_ISA

K3_KERNELS(ProductKernels, product_kernels, ordered_product, weight_product, widen)

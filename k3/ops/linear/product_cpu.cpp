// Products in the order of product.h. Lanes run over sixteen columns of the result, so each lane is one chain of multiply-adds over k.
//
// A weight W (out, in) is bound by reading it once, at few rows of x. For one to four tiles of sixteen columns (rows of W), row by row of x in
// registers:
//   1. 16 bytes of each of a tile's sixteen rows are transposed, as 4 x 4 words in each 128 bits, so that a vector holds one word of sixteen rows;
//   2. a word is one float32 or two bfloat16 (a shift, a mask);
//   3. each vector of weights goes into the chains of up to sixteen rows of x. Chains of different tiles hide the latency of a single row's.
//
// With kManyRows of x and more it is bound by the multiply-adds. Then the vectors of one block and kPanel tiles are kept, in the second-level
// cache, and go into the chains of all rows, kPanelRows at a time.
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

template <Stored stored>
constexpr int kUnit = stored == Stored::f32 ? 16 : 32;  // weights in kBytes

// Weight c of sixteen rows, of those in four words.
template <Stored stored>
K3_INLINE vec weight(const uvec* w, int c) {
  if constexpr (stored == Stored::f32) return vec(w[c]);
  return vec(c & 1 ? w[c / 2] & uvec(isplat(int32_t(0xffff0000))) : w[c / 2] << 16);
}

// The chains s of R rows of x and T tiles over one step of n weights (n = kUnit if `all`).
template <Stored stored, int R, int T, bool all>
K3_INLINE void step(const char* const* w, int64_t stride, const float* x, int64_t x_row, int64_t n, vec (*s)[R]) {
  constexpr int of4 = kUnit<stored> / 4;
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
    if (!all && q * of4 >= n) return;
    uvec words[T][4];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) transpose_words(w[t] + 16 * q, stride, words[t]);
#pragma GCC unroll 32
    for (int c = 0; c < of4; ++c) {
      if (!all && q * of4 + c >= n) return;
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const vec v = weight<stored>(words[t], c);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) s[t][r] = fma(splat(x[r * x_row + q * of4 + c]), v, s[t][r]);
      }
    }
  }
}

// The sum of one block, k0 .. end - 1.
template <Stored stored, int R, int T>
K3_INLINE void block(const WeightArgs& p, const float* x, int64_t k0, int64_t end, int64_t j, int64_t columns, vec (*s)[R]) {
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
  int64_t k = k0;
  if (columns == T * kLanes)
    for (; k + U <= end; k += U) {
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        if (short_rows)
          for (int i = 0; i < kLanes; ++i) __builtin_prefetch(next, 0, 2), next += kBytes;
        else
          for (int i = 0; i < kLanes; ++i) __builtin_prefetch(w[t] + i * p.w_stride + 4 * kBytes);
      }
      step<stored, R, T, true>(w, p.w_stride, x + k, p.x_row, U, s);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) w[t] += kBytes;
    }
  for (int64_t n; k < end; k += n) {  // what is no whole step or tile: through a copy
    char edge[T][kLanes * kBytes] = {};
    const char* copy[T];
    n = end - k < U ? end - k : U;
    for (int t = 0; t < T; ++t) {
      const int64_t rows = columns - t * kLanes < kLanes ? columns - t * kLanes : kLanes;
      for (int64_t i = 0; i < rows; ++i) __builtin_memcpy(edge[t] + i * kBytes, w[t] + i * p.w_stride, uint64_t(n * kBytes / U));
      copy[t] = edge[t], w[t] += n * kBytes / U;
    }
    step<stored, R, T, false>(copy, kBytes, x + k, p.x_row, n, s);
  }
}

// Rows i .. i + R - 1 of x, T tiles from column j on, of which `columns` are there.
template <Stored stored, int R, int T>
static void tiles(const WeightArgs& p, int64_t i, int64_t j, int64_t columns) {
  const float* x = p.x + i * p.x_row;
  for (int64_t k0 = 0; k0 < p.in || k0 == 0; k0 += kProductBlock) {
    const int64_t end = k0 + kProductBlock < p.in ? k0 + kProductBlock : p.in;
    vec s[T][R];
    block<stored, R, T>(p, x, k0, end, j, columns, s);
    for (int t = 0; t < T; ++t)
      for (int r = 0; r < R; ++r) {
        float* y = p.y + (i + r) * p.ldy + j + t * kLanes;
        const int64_t n = columns - t * kLanes;
        store_n(y, p.accumulate || k0 ? load_n(y, n) + s[t][r] : s[t][r], n);
      }
  }
}

template <Stored stored, int R>
static void rows(const WeightArgs& p, int64_t& i) {
#if defined(__AVX512F__)
  constexpr int T = stored == Stored::bf16 && R <= 2 ? 2 : 1;
#else
  constexpr int T = 1;
#endif
  for (; i + R <= p.rows; i += R) {
    int64_t j = p.first;
    for (; j + T * kLanes <= p.last; j += T * kLanes) tiles<stored, R, T>(p, i, j, T * kLanes);
    for (; j < p.last; j += kLanes) tiles<stored, R, 1>(p, i, j, p.last - j < kLanes ? p.last - j : kLanes);
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
#pragma GCC unroll 32
        for (int c = 0; c < of4; ++c)
          if (q * of4 + c < n) to[k - k0 + q * of4 + c][t] = weight<stored>(words, c);
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
  int64_t i = 0;
  if constexpr (kChains >= 16) rows<stored, 16>(p, i);
  if constexpr (kChains >= 8) rows<stored, 8>(p, i);
  if constexpr (kChains >= 4) rows<stored, 4>(p, i);
  rows<stored, 2>(p, i);
  rows<stored, 1>(p, i);
}
static void weight_product(const WeightArgs& a) { a.stored == Stored::f32 ? weight_product_as<Stored::f32>(a) : weight_product_as<Stored::bf16>(a); }

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
  if (p.b_transposed && !p.a_transposed) return weight_product({Stored::f32, p.m, p.k, 0, p.n, p.a, p.lda, p.b, p.ldb * 4, p.c, p.ldc, p.accumulate});
  if (p.b_transposed) {  // no layer needs it: a row of A gathered for each block
    for (int64_t i = 0; i < p.m; ++i)
      for (int64_t k0 = 0; k0 < p.k || k0 == 0; k0 += kProductBlock) {
        const int64_t n = p.k - k0 < kProductBlock ? p.k - k0 : kProductBlock;
        float row[kProductBlock];
        for (int64_t k = 0; k < n; ++k) row[k] = p.a[(k0 + k) * p.lda + i];
        weight_product({Stored::f32, 1, n, 0, p.n, row, n, p.b + k0, p.ldb * 4, p.c + i * p.ldc, p.ldc, p.accumulate || k0});
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

#pragma once
// Products of small tiles for the kernels of this folder. Each element is one chain of multiply-adds (tile_product) or sixteen chains closed
// by one tree (tile_dots), over k ascending: its bits do not depend on how many rows and columns the tile has.
// Include in *_cpu.cpp only; everything is static (isa.h says why).
#include <cstdint>

#include "k3/core/simd.h"

namespace k3::cpu::K3_ISA {

using namespace k3::simd;

// In a product every lane is a chain of its own, so the width of a vector does not show in the bits: `part` is what one register holds.
// (GCC keeps vectors that are wider than a register in memory.) R rows by V parts of accumulators fill the register file.
#if defined(K3_ISA_avx512)
constexpr int kPart = 16, kR = 8;
#elif defined(K3_ISA_avx2)
constexpr int kPart = 8, kR = 6;
#else
constexpr int kPart = 4, kR = 4;
#endif
constexpr int kV = 2, kWide = 8;
typedef float part __attribute__((vector_size(kPart * 4)));
typedef int32_t part_bits __attribute__((vector_size(kPart * 4)));
typedef float part_mem __attribute__((vector_size(kPart * 4), aligned(4), may_alias));
typedef uint16_t half_part __attribute__((vector_size(kPart * 2), aligned(2), may_alias));

K3_INLINE part load_part(const float* p) { return *reinterpret_cast<const part_mem*>(p); }
K3_INLINE part load_part(const uint16_t* p) {  // bfloat16
  return part(__builtin_convertvector(*reinterpret_cast<const half_part*>(p), part_bits) << 16);
}
K3_INLINE float widen(float x) { return x; }
K3_INLINE float widen(uint16_t x) { return __builtin_bit_cast(float, uint32_t(x) << 16); }
template <class B>
K3_INLINE part load_part_n(const B* p, int64_t n) {
  if (n >= kPart) return load_part(p);
  part v{};
  for (int64_t i = 0; i < n; ++i) v[i] = widen(p[i]);
  return v;
}
K3_INLINE void store_part_n(float* p, part v, int64_t n) {
  if (n >= kPart)
    *reinterpret_cast<part_mem*>(p) = v;
  else
    for (int64_t i = 0; i < n; ++i) p[i] = v[i];
}

enum class Into { set, add, scaled };  // C = AB,  C += AB,  C = C * factor[row] + AB

template <class B>
struct TileProduct {
  int64_t m, n, k;
  const float* a;  // (m, k), or (k, m) when `transposed`
  int64_t lda;
  const B* b;  // (k, n) float or bfloat16
  int64_t ldb;
  float* c;  // (m, n)
  int64_t ldc;
  Into into = Into::set;
  const float* factor = nullptr;  // (m)
  int64_t ahead = 0;              // if not 0: while B is read, what lies so many elements further on is fetched into the cache
};

template <bool transposed, bool fetch, int R, int V, bool tail, class B>
static void product_block(const TileProduct<B>& p, int64_t i, int64_t j, int64_t cols) {
  const float* a = p.a + (transposed ? i : i * p.lda);
  const B* b = p.b + j;
  float* c_row = p.c + i * p.ldc + j;  // copies of what the stores below could otherwise seem to change
  const float* factor = p.factor + i;
  const int64_t ldc = p.ldc;
  const Into into = p.into;
  part s[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) s[r][v] = part{};
  for (int64_t k = 0; k < p.k; ++k) {
    part x[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) x[v] = tail ? load_part_n(b, cols) : load_part(b + v * kPart);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const float y = transposed ? a[r] : a[r * p.lda];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) s[r][v] = y * x[v] + s[r][v];
    }
    if (fetch)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) __builtin_prefetch(b + p.ahead + v * kPart, 0, 2);
    a += transposed ? p.lda : 1;
    b += p.ldb;
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      float* c = c_row + r * ldc + v * kPart;
      int64_t n = tail ? cols : kPart;
      part t = s[r][v];
      if (into == Into::add) t = load_part_n(c, n) + t;
      if (into == Into::scaled) t = load_part_n(c, n) * factor[r] + t;
      store_part_n(c, t, n);
    }
}

template <bool transposed, bool fetch, int V, bool tail, class B>
static void product_columns(const TileProduct<B>& p, int64_t j, int64_t cols) {
  int64_t i = 0;
  for (; i + kR <= p.m; i += kR) product_block<transposed, fetch, kR, V, tail>(p, i, j, cols);
  if (kR > 4)
    for (; i + 4 <= p.m; i += 4) product_block<transposed, fetch, 4, V, tail>(p, i, j, cols);
  for (; i + 2 <= p.m; i += 2) product_block<transposed, fetch, 2, V, tail>(p, i, j, cols);
  for (; i < p.m; ++i) product_block<transposed, fetch, 1, V, tail>(p, i, j, cols);
}

template <bool transposed = false, bool fetch = false, class B>
static void tile_product(const TileProduct<B>& p) {
  int64_t j = 0;
  if (p.m == 1)  // a single row: more columns at once hide the latency
    for (; j + kWide * kPart <= p.n; j += kWide * kPart) product_block<transposed, fetch, 1, kWide, false>(p, 0, j, kPart);
  for (; j + kV * kPart <= p.n; j += kV * kPart) product_columns<transposed, fetch, kV, false>(p, j, kPart);
  for (; j + kPart <= p.n; j += kPart) product_columns<transposed, fetch, 1, false>(p, j, kPart);
  if (j < p.n) product_columns<transposed, fetch, 1, true>(p, j, p.n - j);
}

#ifdef K3_ISA_avx512
// Lane i of the result is the sum of the lanes of a[i]: the tree of simd::sum, sixteen at once.
K3_INLINE vec sums(vec* a) {
  const ivec lo8 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}, hi8 = {8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31};
  const ivec lo4 = {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27}, hi4 = {4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31};
  const ivec lo2 = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29}, hi2 = {2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31};
  const ivec lo1 = {0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30}, hi1 = {1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31};
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) a[i] = __builtin_shuffle(a[i], a[i + 8], lo8) + __builtin_shuffle(a[i], a[i + 8], hi8);
#pragma GCC unroll 8
  for (int i = 0; i < 4; ++i) a[i] = __builtin_shuffle(a[i], a[i + 4], lo4) + __builtin_shuffle(a[i], a[i + 4], hi4);
#pragma GCC unroll 8
  for (int i = 0; i < 2; ++i) a[i] = __builtin_shuffle(a[i], a[i + 2], lo2) + __builtin_shuffle(a[i], a[i + 2], hi2);
  return __builtin_shuffle(a[0], a[1], lo1) + __builtin_shuffle(a[0], a[1], hi1);
}
#endif

// C[i][j] = A[i] . B[j]: rows of both run along k (k need not divide by sixteen). B float or bfloat16. R x C sums at a time; each is sixteen
// chains, in as many parts as sixteen lanes have, closed by the tree.
constexpr int kParts = kLanes / kPart;
template <int R, int C, class B>
static void dots_block(const float* a, int64_t lda, const B* b, int64_t ldb, float* c, int64_t ldc, int64_t n, int64_t k) {
  for (int64_t j = 0; j < n; j += C) {
    int64_t cols = n - j < C ? n - j : C;
    const B* row[C];
#pragma GCC unroll 16
    for (int x = 0; x < C; ++x) row[x] = b + (j + (x < cols ? x : 0)) * ldb;
    part s[R * C][kParts];
#pragma GCC unroll 16
    for (int x = 0; x < R * C; ++x)
#pragma GCC unroll 4
      for (int h = 0; h < kParts; ++h) s[x][h] = part{};
    int64_t q = 0;
    for (; q + kLanes <= k; q += kLanes) {
#pragma GCC unroll 4
      for (int h = 0; h < kParts; ++h) {
        part left[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) left[r] = load_part(a + r * lda + q + h * kPart);
#pragma GCC unroll 16
        for (int x = 0; x < C; ++x) {
          part right = load_part(row[x] + q + h * kPart);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) s[r * C + x][h] = left[r] * right + s[r * C + x][h];
        }
      }
#pragma GCC unroll 16
      for (int x = 0; x < C; ++x) __builtin_prefetch(row[x] + C * ldb + q);
    }
    for (int h = 0; h < kParts && q < k; ++h, q += kPart)
      for (int x = 0; x < C; ++x)
        for (int r = 0; r < R; ++r) s[r * C + x][h] = load_part_n(a + r * lda + q, k - q) * load_part_n(row[x] + q, k - q) + s[r * C + x][h];
    float out[R * C];
#ifdef K3_ISA_avx512
    vec all[16];
#pragma GCC unroll 16
    for (int x = 0; x < 16; ++x) all[x] = x < R * C ? s[x < R * C ? x : 0][0] : zero();
    store(out, sums(all));
#else
    for (int x = 0; x < R * C; ++x) {
      float lanes[kLanes];
      for (int h = 0; h < kParts; ++h) store_part_n(lanes + h * kPart, s[x][h], kPart);
      for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; ++i) lanes[i] += lanes[i + step];
      out[x] = lanes[0];
    }
#endif
    for (int r = 0; r < R; ++r)
      for (int64_t x = 0; x < cols; ++x) c[r * ldc + j + x] = out[r * C + x];
  }
}

template <class B>
static void tile_dots(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const B* b, int64_t ldb, float* c, int64_t ldc) {
#ifdef K3_ISA_avx512
  constexpr int R = 4, C = 4, C1 = 16;
#else
  constexpr int R = 2, C = 2, C1 = 4;
#endif
  int64_t i = 0;
  for (; i + R <= m; i += R) dots_block<R, C>(a + i * lda, lda, b, ldb, c + i * ldc, ldc, n, k);
  for (; i < m; ++i) dots_block<1, C1>(a + i * lda, lda, b, ldb, c + i * ldc, ldc, n, k);
}

K3_INLINE void copy_floats(float* to, const float* from, int64_t n) { __builtin_memcpy(to, from, size_t(n) * sizeof(float)); }
K3_INLINE void add_floats(float* to, const float* from, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, load(to + i) + load(from + i));
  for (; i < n; ++i) to[i] += from[i];
}

// n rows of scores of one tile become unnormalised weights, p = exp(scale * p - m); keys from visible(row) on weigh exactly nothing.
// m and l are the rows' running maxima and sums; keep is what earlier sums must be multiplied by. cols: a multiple of sixteen.
// Three loops over the rows, so that one row's maximum and exponentials overlap with the next one's.
template <class Visible>
K3_INLINE void softmax_rows(float* p, int64_t ldp, int64_t n, int64_t cols, Visible visible, float scale, float* m, float* l, float* keep) {
  const ivec lane = lane_numbers();
  for (int64_t r = 0; r < n; ++r) {
    const int64_t seen = visible(r);
    vec top = splat(m[r]);
    for (int64_t j = 0; j < cols; j += kLanes) {
      vec t = load(p + r * ldp + j) * splat(scale);
      if (j + kLanes > seen) t = select(lane + isplat(int32_t(j)) < isplat(int32_t(seen)), t, splat(-__builtin_inff()));
      store(p + r * ldp + j, t);
      top = max(t, top);
    }
    keep[r] = m[r];
    m[r] = max_lane(top);
  }
  for (int64_t r = 0; r < n; r += kLanes) store_n(keep + r, exp(load_n(keep + r, n - r) - load_n(m + r, n - r)), n - r);
  for (int64_t r = 0; r < n; ++r) {
    vec total = zero();
    for (int64_t j = 0; j < cols; j += kLanes) {
      vec e = exp(load(p + r * ldp + j) - splat(m[r]));
      store(p + r * ldp + j, e);
      total = total + e;
    }
    l[r] = l[r] * keep[r] + sum(total);
  }
}

}  // namespace k3::cpu::K3_ISA

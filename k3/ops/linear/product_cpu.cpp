// The matrix product in the order of product.h. Lanes run over columns of C (n), so each lane is one chain of multiply-adds over k.
// For B stored (n, k) a tile of 16 rows by 16 k is transposed in registers on its way; a small product is bound by reading B once.
#include "k3/ops/linear/product_kernels.h"

#include "k3/core/simd.h"

namespace k3::cpu::K3_ISA {

using namespace k3::simd;

constexpr int kRows = 4;  // rows of C at once: 4 chains hide the latency of FMA and reuse each vector of B

// t[i][j] = b[j*ldb + i], i.e. sixteen vectors along n for sixteen steps of k
K3_INLINE void transpose16(const float* b, int64_t ldb, int64_t rows, int64_t steps, vec* t) {
  vec r[16];
  for (int j = 0; j < 16; ++j) r[j] = j < rows ? load_n(b + j * ldb, steps) : zero();
    // four rounds of pairwise exchange, doubling the distance
#define K3_ROUND(src, dst, d, lo, hi)                         \
  for (int i = 0; i < 16; ++i)                                \
    if (!(i & d)) {                                           \
      dst[i] = __builtin_shuffle(src[i], src[i + d], lo);     \
      dst[i + d] = __builtin_shuffle(src[i], src[i + d], hi); \
    }
  vec s[16];
  const ivec lo1 = {0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30}, hi1 = {1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31};
  const ivec lo2 = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29}, hi2 = {2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31};
  const ivec lo4 = {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27}, hi4 = {4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31};
  const ivec lo8 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}, hi8 = {8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31};
  K3_ROUND(r, s, 1, lo1, hi1)
  K3_ROUND(s, r, 2, lo2, hi2)
  K3_ROUND(r, s, 4, lo4, hi4)
  K3_ROUND(s, t, 8, lo8, hi8)
#undef K3_ROUND
}

template <int rows>
static void rows_by_16(const Product& p, int64_t i0, int64_t j0, int64_t cols) {
  const int64_t a_row = p.a_transposed ? 1 : p.lda, a_step = p.a_transposed ? p.lda : 1;
  const float* a = p.a + i0 * a_row;
  vec total[rows] = {};
  bool first = !p.accumulate;
  if (p.accumulate)
    for (int r = 0; r < rows; ++r) total[r] = load_n(p.c + (i0 + r) * p.ldc + j0, cols);
  for (int64_t k0 = 0; k0 < p.k;) {
    int64_t end = k0 + kProductBlock < p.k ? k0 + kProductBlock : p.k;
    vec s[rows];
    for (int r = 0; r < rows; ++r) s[r] = zero();
    for (int64_t k = k0; k < end;) {
      if (p.b_transposed) {
        int64_t steps = end - k < 16 ? end - k : 16;
        vec t[16];
        transpose16(p.b + j0 * p.ldb + k, p.ldb, cols, steps, t);
        if (steps == 16) {
#pragma GCC unroll 16
          for (int q = 0; q < 16; ++q)
            for (int r = 0; r < rows; ++r) s[r] = fma(splat(a[r * a_row + (k + q) * a_step]), t[q], s[r]);
        } else {
          for (int64_t q = 0; q < steps; ++q)
            for (int r = 0; r < rows; ++r) s[r] = fma(splat(a[r * a_row + (k + q) * a_step]), t[q], s[r]);
        }
        k += steps;
      } else {
        vec b = load_n(p.b + k * p.ldb + j0, cols);
        for (int r = 0; r < rows; ++r) s[r] = fma(splat(a[r * a_row + k * a_step]), b, s[r]);
        ++k;
      }
    }
    for (int r = 0; r < rows; ++r) total[r] = first ? s[r] : total[r] + s[r];
    first = false;
    k0 = end;
  }
  for (int r = 0; r < rows; ++r) store_n(p.c + (i0 + r) * p.ldc + j0, p.k > 0 || p.accumulate ? total[r] : zero(), cols);
}

static void ordered_product(const Product& p) {
  for (int64_t j = 0; j < p.n; j += kLanes) {
    int64_t cols = p.n - j < kLanes ? p.n - j : kLanes;
    int64_t i = 0;
    for (; i + kRows <= p.m; i += kRows) rows_by_16<kRows>(p, i, j, cols);
    for (; i < p.m; ++i) rows_by_16<1>(p, i, j, cols);
  }
}

}  // namespace k3::cpu::K3_ISA

K3_KERNELS(ProductKernels, product_kernels, ordered_product)

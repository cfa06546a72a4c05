#pragma once
// What forward and backward are made of; included by *_cpu.cpp files only.
//
// `reg` is one register of the level. A tile is a few rows by two registers of accumulators, each lane one chain over the depth in
// ascending order: so an element's bits don't depend on how many rows the call has.
#include <cstdint>

#include "k3/core/simd.h"
#include "k3/ops/delta_rule/delta_rule_kernels.h"

namespace k3::cpu::K3_ISA {

using namespace k3::simd;

#if defined(K3_ISA_avx512)
constexpr int kWidth = 16, kTileRows = 8;  // 16 accumulators of 32 registers
#elif defined(K3_ISA_avx2)
constexpr int kWidth = 8, kTileRows = 4;  // 8 of 16
#else
constexpr int kWidth = 4, kTileRows = 4;
#endif
constexpr int kPanelRegs = kDeltaPanel / kWidth;
typedef float reg __attribute__((vector_size(kWidth * 4)));
typedef float reg_mem __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));

K3_INLINE reg get(const float* p) { return *reinterpret_cast<const reg_mem*>(p); }
K3_INLINE void put(float* p, reg v) { *reinterpret_cast<reg_mem*>(p) = v; }

// Strong forgetting makes numbers below 2^-126, over which some processors take a hundred times longer. While this lives they are zero.
struct TinyIsZero {
#ifdef __SSE__
  unsigned before = __builtin_ia32_stmxcsr();
  __attribute__((always_inline)) TinyIsZero() { __builtin_ia32_ldmxcsr(before | 0x8040); }
  __attribute__((always_inline)) ~TinyIsZero() { __builtin_ia32_ldmxcsr(before); }
#endif
};

// ---- C (m, cols) = A (m, depth) B (depth, cols). A's columns come in blocks of 32, `a_jump` apart: 32 for a plain matrix, a panel for S.
struct Factor {
  const float* at;
  int64_t row, jump;
};
K3_INLINE Factor plain_rows(const float* a, int64_t ld) { return {a, ld, kDeltaPanel}; }
K3_INLINE Factor panels(const float* s, int64_t k) { return {s, kDeltaPanel, k * kDeltaPanel}; }

template <int rows, int regs>
K3_INLINE void tile(Factor a, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t depth) {
  reg acc[rows][regs];
  for (int r = 0; r < rows; ++r)
    for (int n = 0; n < regs; ++n) acc[r][n] = reg{};
  for (; depth > 0; depth -= kDeltaPanel, a.at += a.jump) {
    int64_t steps = depth < kDeltaPanel ? depth : kDeltaPanel;
    for (int64_t d = 0; d < steps; ++d, b += ldb) {
      reg v[regs];
      for (int n = 0; n < regs; ++n) v[n] = get(b + n * kWidth);
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r)
        for (int n = 0; n < regs; ++n) acc[r][n] += v[n] * a.at[r * a.row + d];
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int n = 0; n < regs; ++n) put(c + r * ldc + n * kWidth, acc[r][n]);
}
template <int regs>
static inline void product_columns(int64_t m, Factor a, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t depth) {
  int64_t i = 0;
  for (; i + kTileRows <= m; i += kTileRows) tile<kTileRows, regs>({a.at + i * a.row, a.row, a.jump}, b, ldb, c + i * ldc, ldc, depth);
  for (; i + 2 <= m; i += 2) tile<2, regs>({a.at + i * a.row, a.row, a.jump}, b, ldb, c + i * ldc, ldc, depth);
  if (i < m) tile<1, regs>({a.at + i * a.row, a.row, a.jump}, b, ldb, c + i * ldc, ldc, depth);
}
static inline void product(int64_t m, int64_t cols, int64_t depth, Factor a, const float* b, int64_t ldb, float* c, int64_t ldc) {
  int64_t j = 0;
  for (; j + 2 * kWidth <= cols; j += 2 * kWidth) product_columns<2>(m, a, b + j, ldb, c + j, ldc, depth);
  for (; j < cols; j += kWidth) product_columns<1>(m, a, b + j, ldb, c + j, ldc, depth);
}
// rows (m, k) times S (k, v) -> (m, v)
static inline void times_memory(int64_t m, const float* rows, const float* s, float* c, int64_t k, int64_t v) {
  for (int64_t p = 0; p < v; p += kDeltaPanel) product(m, kDeltaPanel, k, plain_rows(rows, k), s + p * k, kDeltaPanel, c + p, v);
}

// ---- to (k, v) = Diag(decay) from + X^T B over n rows of X (n, k), B (n, v); from null: zero
template <int rows>
K3_INLINE void update_tile(const float* from, const float* decay, float* to, const float* x, int64_t ldx, const float* b, int64_t ldb, int64_t n) {
  reg acc[rows][2];
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < 2; ++c) acc[r][c] = from ? get(from + r * kDeltaPanel + c * kWidth) * decay[r] : reg{};
  for (int64_t d = 0; d < n; ++d, x += ldx, b += ldb) {
    reg v[2] = {get(b), get(b + kWidth)};
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r)
      for (int c = 0; c < 2; ++c) acc[r][c] += v[c] * x[r];
  }
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < 2; ++c) put(to + r * kDeltaPanel + c * kWidth, acc[r][c]);
}
static inline void update_memory(const float* from, const float* decay, float* to, const float* x, const float* b, int64_t n, int64_t k, int64_t v) {
  for (int64_t p = 0; p < v; p += kDeltaPanel)
    for (int64_t c = 0; c < kDeltaPanel; c += 2 * kWidth)
      for (int64_t i = 0; i < k; i += kTileRows) {
        int64_t at = p * k + i * kDeltaPanel + c;
        update_tile<kTileRows>(from ? from + at : nullptr, decay + i, to + at, x + i, k, b + p + c, v, n);
      }
}

// ---- shuffles: lo and hi exchange lanes between two registers at distance d. Transposing applies both; adding both halves a sum.
template <int... i>
struct Lanes {};
#if defined(K3_ISA_avx512)
typedef Lanes<0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15> AllLanes;
#elif defined(K3_ISA_avx2)
typedef Lanes<0, 1, 2, 3, 4, 5, 6, 7> AllLanes;
#else
typedef Lanes<0, 1, 2, 3> AllLanes;
#endif
template <int d, int... i>
K3_INLINE reg lo(reg a, reg b, Lanes<i...>) {
  return __builtin_shufflevector(a, b, (i & d ? kWidth + i - d : i)...);
}
template <int d, int... i>
K3_INLINE reg hi(reg a, reg b, Lanes<i...>) {
  return __builtin_shufflevector(a, b, (i & d ? kWidth + i : i + d)...);
}

template <int d>
K3_INLINE void exchange(reg* r) {
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i)
    if (!(i & d)) {
      reg a = r[i], b = r[i + d];
      r[i] = lo<d>(a, b, AllLanes{}), r[i + d] = hi<d>(a, b, AllLanes{});
    }
}
// out (cols, 16 of ld_out) = in (n <= 16 of 16, cols)^T, the missing rows as zeros; cols a multiple of 16
static inline void transpose(const float* in, int64_t ld_in, int64_t n, int64_t cols, float* out, int64_t ld_out) {
  for (int64_t c = 0; c < cols; c += kWidth)
    for (int64_t r0 = 0; r0 < 16; r0 += kWidth) {
      reg r[kWidth];
#pragma GCC unroll 16
      for (int i = 0; i < kWidth; ++i) r[i] = r0 + i < n ? get(in + (r0 + i) * ld_in + c) : reg{};
      exchange<1>(r);
      exchange<2>(r);
      if constexpr (kWidth > 4) exchange<4>(r);
      if constexpr (kWidth > 8) exchange<8>(r);
#pragma GCC unroll 16
      for (int i = 0; i < kWidth; ++i) put(out + (c + i) * ld_out + r0, r[i]);
    }
}
template <int d>
K3_INLINE void fold(reg* r) {
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; i += 2 * d) r[i] = lo<d>(r[i], r[i + d], AllLanes{}) + hi<d>(r[i], r[i + d], AllLanes{});
}
// out[i] = sum of the lanes of a[i], for 16 registers; a is used up
K3_INLINE void sum16(reg* a, float* out) {
  for (int at = 0; at < 16; at += kWidth) {
    reg* r = a + at;
    fold<1>(r);
    fold<2>(r);
    if constexpr (kWidth > 4) fold<4>(r);
    if constexpr (kWidth > 8) fold<8>(r);
    put(out + at, r[0]);
  }
}

// ---- token t against the rows s <= t of its chunk, through the decays between them. x holds k_t and y holds q_t on entry; on return both
// have come down to the chunk's start. The decays are multiplied one by one, never divided and never summed as logs: nothing overflows
// under any gate, and what underflows is forgotten indeed.
//   a[s] = sum_c k_tc k_sc prod_{s<j<=t} decay_jc   (s < t)         m[s] = the same with q_t   (s <= t)
template <int n>
K3_INLINE void pair_channels(const float* k, const float* decay, int64_t ld, int64_t t, float* px, float* py, reg* a, reg* m) {
  reg x[n], y[n];
  for (int i = 0; i < n; ++i) {
    x[i] = get(px + i * kWidth), y[i] = get(py + i * kWidth);
    m[t] += y[i] * get(k + t * ld + i * kWidth);
  }
  for (int64_t s = t - 1; s >= 0; --s) {
    reg as = a[s], ms = m[s];
    for (int i = 0; i < n; ++i) {
      reg d = get(decay + (s + 1) * ld + i * kWidth), ks = get(k + s * ld + i * kWidth);
      x[i] *= d, y[i] *= d;
      as += x[i] * ks, ms += y[i] * ks;
    }
    a[s] = as, m[s] = ms;
  }
  for (int i = 0; i < n; ++i) {
    reg d = get(decay + i * kWidth);
    put(px + i * kWidth, x[i] * d), put(py + i * kWidth, y[i] * d);
  }
}
// out: a (16) then m (16)
static inline void pair_row(const float* k, const float* decay, int64_t ld, int64_t t, float* x, float* y, float* out) {
  reg a[16], m[16];
  for (int s = 0; s < 16; ++s) a[s] = m[s] = reg{};
  int64_t c = 0;
  for (; c + 4 * kWidth <= ld; c += 4 * kWidth) pair_channels<4>(k + c, decay + c, ld, t, x + c, y + c, a, m);
  for (; c < ld; c += kWidth) pair_channels<1>(k + c, decay + c, ld, t, x + c, y + c, a, m);
  sum16(a, out);
  sum16(m, out + 16);
}

// kd_s = k_s times the decays after s, of n rows; all: the product of all n decays
static inline void bring_to_end(const float* k, const float* decay, int64_t n, int64_t ld, float* kd, float* all) {
  for (int64_t c = 0; c < ld; c += kWidth) {
    reg w = reg{} + 1.0f;
    for (int64_t s = n - 1; s >= 0; --s) {
      put(kd + s * ld + c, get(k + s * ld + c) * w);
      w *= get(decay + s * ld + c);
    }
    put(all + c, w);
  }
}

// A head's rows lie H*K floats apart, too far for the processor to foresee: the next chunk's are asked for while this one is computed.
K3_INLINE void expect_row(const float* p, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) __builtin_prefetch(p + i, 0, 2);
}
K3_INLINE void copy(float* to, const float* from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = from[i];
}
// ---- rows in and out: n values, padded with zeros to m
K3_INLINE void read_row(float* to, const float* from, int64_t n, int64_t m) {
  for (int64_t i = 0; i < n; ++i) to[i] = from[i];
  for (int64_t i = n; i < m; ++i) to[i] = 0;
}
K3_INLINE void read_decay(float* to, const float* g, int64_t columns, int64_t key_dim, int64_t k) {
  if (columns > 1) {
    int64_t i = 0;
    for (; i + kLanes <= key_dim; i += kLanes) store(to + i, exp(load(g + i)));
    if (i < key_dim) store(to + i, exp(load_n(g + i, key_dim - i)));
  } else {
    vec d = columns ? exp(splat(g[0])) : splat(1.0f);
    for (int64_t i = 0; i < k; i += kLanes) store(to + i, d);
  }
}

// The parts of a head (delta_rule_kernels.h).
struct Head {
  float *memory, *k, *decay, *u;
};
K3_INLINE Head head_at(float* p, int64_t k, int64_t v) { return {p, p + k * v, p + k * v + 16 * k, p + k * v + 32 * k}; }

void delta_rule_backward(const DeltaArgs& a);

}  // namespace k3::cpu::K3_ISA

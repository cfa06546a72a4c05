// Bound by memory: n + 1 rows a token forward, 3n + 1 backward (sources, their gradients read and written). A token's sources (n * d floats, 258 KB
// for K3's nine) are read from memory once, for the sums, and come from the cache the second time, for the mix.
#include "k3/ops/depth_mix/depth_mix_kernels.h"

#include <cmath>

#include "k3/core/simd.h"
#include "k3/core/threads.h"

namespace k3::cpu::K3_ISA {

using namespace k3::simd;

constexpr int kChains = 4;  // independent sums that hide the latency of the adds; joined in order

// x . y and, with `square`, x . x
template <bool square>
K3_INLINE void dots(const float* x, const float* y, int64_t d, float& xy, float& xx) {
  vec a[kChains], b[kChains];
#pragma GCC unroll 4
  for (int q = 0; q < kChains; ++q) a[q] = b[q] = zero();
  int64_t c = 0;
  for (; c + kChains * kLanes <= d; c += kChains * kLanes)
#pragma GCC unroll 4
    for (int q = 0; q < kChains; ++q) {
      vec v = load(x + c + q * kLanes);
      a[q] = fma(v, load(y + c + q * kLanes), a[q]);
      if (square) b[q] = fma(v, v, b[q]);
    }
  for (; c < d; c += kLanes) {
    vec v = load_n(x + c, d - c);
    a[0] = fma(v, load_n(y + c, d - c), a[0]);
    if (square) b[0] = fma(v, v, b[0]);
  }
  xy = sum((a[0] + a[1]) + (a[2] + a[3]));
  if (square) xx = sum((b[0] + b[1]) + (b[2] + b[3]));
}

static void gains(const DepthMixArgs& a) {
  for (int64_t c = 0; c < a.d; ++c) a.u[c] = a.w[c] * a.query[c];
}

static void forward(const DepthMixArgs& a) {
  gains(a);
  parallel_blocks(a.rows, 8, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      float *r = a.r + t * a.n, *s = a.s + t * a.n, *w = a.a + t * a.n, *h = a.h + t * a.d;
      float top = -__builtin_inff(), total = 0;
      for (int64_t i = 0; i < a.n; ++i) {
        float dot, square;
        dots<true>(a.v[i] + t * a.d, a.u, a.d, dot, square);
        r[i] = 1.0f / std::sqrt(square / float(a.d) + a.eps);
        s[i] = r[i] * dot;
        top = s[i] > top ? s[i] : top;
      }
      for (int64_t i = 0; i < a.n; ++i) w[i] = exp(splat(s[i] - top))[0], total += w[i];
      for (int64_t i = 0; i < a.n; ++i) w[i] /= total;
      int64_t c = 0;
      for (; c + kChains * kLanes <= a.d; c += kChains * kLanes) {
        vec x[kChains];
#pragma GCC unroll 4
        for (int q = 0; q < kChains; ++q) x[q] = zero();
        for (int64_t i = 0; i < a.n; ++i)
#pragma GCC unroll 4
          for (int q = 0; q < kChains; ++q) x[q] = fma(splat(w[i]), load(a.v[i] + t * a.d + c + q * kLanes), x[q]);
#pragma GCC unroll 4
        for (int q = 0; q < kChains; ++q) store(h + c + q * kLanes, x[q]);
      }
      for (; c < a.d; c += kLanes) {
        vec x = zero();
        for (int64_t i = 0; i < a.n; ++i) x = fma(splat(w[i]), load_n(a.v[i] + t * a.d + c, a.d - c), x);
        store_n(h + c, x, a.d - c);
      }
    }
  });
}

static void backward(const DepthMixArgs& a) {
  gains(a);
  parallel_blocks(a.rows, kDepthMixBlock, [&](int64_t first, int64_t last) {
    float* du = a.partial ? a.partial + first / kDepthMixBlock * a.d : nullptr;
    if (du)
      for (int64_t c = 0; c < a.d; ++c) du[c] = 0;
    for (int64_t t = first; t < last; ++t) {
      const float *r = a.r + t * a.n, *s = a.s + t * a.n, *w = a.a + t * a.n, *dh = a.dh + t * a.d;
      float mean = 0, unused;
      float* ds = a.ds + t * a.n;
      for (int64_t i = 0; i < a.n; ++i) {
        dots<false>(a.v[i] + t * a.d, dh, a.d, ds[i], unused);
        mean += w[i] * ds[i];
      }
      for (int64_t i = 0; i < a.n; ++i) ds[i] = w[i] * (ds[i] - mean);
      for (int64_t c = 0; c < a.d; c += kLanes) {
        const int64_t m = a.d - c;
        vec g = load_n(dh + c, m), u = load_n(a.u + c, m), sum_u = zero();
        for (int64_t i = 0; i < a.n; ++i) {
          vec v = load_n(a.v[i] + t * a.d + c, m);
          float* dv = a.dv[i] + t * a.d + c;
          float dr = ds[i] * r[i];
          store_n(dv, load_n(dv, m) + fma(splat(w[i]), g, fma(splat(dr), u, splat(-dr * s[i] * r[i] / float(a.d)) * v)), m);
          sum_u = fma(splat(dr), v, sum_u);
        }
        if (du) store_n(du + c, load_n(du + c, m) + sum_u, m);
      }
    }
  });
  if (!a.partial) return;
  parallel_blocks(a.d, 512, [&](int64_t first, int64_t last) {
    for (int64_t c = first; c < last; ++c) {
      float du = 0;
      for (int64_t b = 0; b < depth_mix_row_blocks(a.rows); ++b) du += a.partial[b * a.d + c];
      if (a.dw) a.dw[c] += du * a.query[c];
      if (a.dquery) a.dquery[c] += du * a.w[c];
    }
  });
}

}  // namespace k3::cpu::K3_ISA

K3_KERNELS(DepthMixKernels, depth_mix, forward, backward)

// Elementwise passes of the optimizers, bound by memory. Sums of squares are made in double, where the square of a float is exact and
// cannot overflow: the sum is finite exactly when every element is, and the same bits at every instruction set.
#include "k3/ops/update/update_kernels.h"

#include <cmath>

#include "k3/core/simd.h"

namespace k3::cpu::K3_ISA {

using namespace k3::simd;

// f(i, n): the n <= 16 elements from i
template <class F>
K3_INLINE void columns(int64_t d, F f) {
  int64_t i = 0;
  for (; i + kLanes <= d; i += kLanes) f(i, int64_t(kLanes));
  if (i < d) f(i, d - i);
}

static void adamw(const AdamWArgs& a) {
  columns(a.n, [&](int64_t i, int64_t n) {
    vec g = load_n(a.g + i, n) * splat(a.grad_scale);
    vec m = splat(a.beta1) * load_n(a.m + i, n) + splat(1 - a.beta1) * g;
    vec v = splat(a.beta2) * load_n(a.v + i, n) + splat(1 - a.beta2) * (g * g);
    store_n(a.m + i, m, n);
    store_n(a.v + i, v, n);
    vec root = v * splat(a.correct_v);
    for (int j = 0; j < kLanes; ++j) root[j] = std::sqrt(root[j]);
    vec w = load_n(a.w + i, n);
    vec step = m * splat(a.correct_m) / (root + splat(a.eps));
    store_n(a.w + i, w - splat(a.lr) * (step + splat(a.weight_decay) * w), n);
  });
}

static double sum_of_squares(const float* x, int64_t n) {
  double s[kLanes] = {};
  columns(n, [&](int64_t i, int64_t m) {
    float v[kLanes];
    store(v, load_n(x + i, m));
    for (int j = 0; j < kLanes; ++j) s[j] += double(v[j]) * double(v[j]);
  });
  double total = 0;
  for (int j = 0; j < kLanes; ++j) total += s[j];
  return total;
}

static void scale(float* x, float s, int64_t n) {
  columns(n, [&](int64_t i, int64_t m) { store_n(x + i, splat(s) * load_n(x + i, m), m); });
}

static void momentum(float* m, const float* g, float* ahead, float mu, float s, bool nesterov, int64_t n) {
  columns(n, [&](int64_t i, int64_t k) {
    vec gv = splat(s) * load_n(g + i, k), mv = fma(splat(mu), load_n(m + i, k), gv);
    store_n(m + i, mv, k);
    store_n(ahead + i, nesterov ? fma(splat(mu), mv, gv) : mv, k);
  });
}

static void combine(const float* x, float* z, float b, float c, int64_t n) {
  columns(n, [&](int64_t i, int64_t k) { store_n(z + i, fma(splat(b), load_n(x + i, k), splat(c) * load_n(z + i, k)), k); });
}

static void mirror(float* c, int64_t m, int64_t first, int64_t last) {
  constexpr int64_t kTile = 16;  // so that the columns read are sixteen whole cache lines
  for (int64_t j0 = first; j0 < m; j0 += kTile)
    for (int64_t i = first; i < last && i < j0 + kTile; ++i)
      for (int64_t j = i < j0 ? j0 : i + 1; j < j0 + kTile && j < m; ++j) c[i * m + j] = c[j * m + i];
}

static void apply(float* w, const float* o, float step, float decay, int64_t n) {
  columns(n, [&](int64_t i, int64_t k) {
    vec v = load_n(w + i, k);
    store_n(w + i, v - fma(splat(step), load_n(o + i, k), splat(decay) * v), k);
  });
}

}  // namespace k3::cpu::K3_ISA

K3_KERNELS(UpdateKernels, update, adamw, sum_of_squares, scale, momentum, combine, mirror, apply)

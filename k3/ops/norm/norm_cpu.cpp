// Bound by memory: one read of each input, one write of each output. Rows in blocks of kNormBlock over the threads; the width in vectors of
// sixteen with a masked tail; each sum is one vector accumulator closed by simd::sum, so a row's bits depend on the row alone.
#include "k3/ops/norm/norm_kernels.h"

#include <cmath>

#include "k3/core/simd.h"
#include "k3/core/threads.h"

namespace k3::cpu::K3_ISA {

using namespace k3::simd;

K3_INLINE float dot(const float* a, const float* b, int64_t d) {
  vec s = zero();
  int64_t i = 0;
  for (; i + kLanes <= d; i += kLanes) s = fma(load(a + i), load(b + i), s);
  if (i < d) s = fma(load_n(a + i, d - i), load_n(b + i, d - i), s);
  return sum(s);
}

// f(i, n): the n <= 16 columns from i
template <class F>
K3_INLINE void columns(int64_t d, F f) {
  int64_t i = 0;
  for (; i + kLanes <= d; i += kLanes) f(i, int64_t(kLanes));
  if (i < d) f(i, d - i);
}

enum class Kind { rms, l2, gated };

template <Kind kind>
static void forward(const NormArgs& a) {
  parallel_blocks(a.rows, kNormBlock, [&](int64_t first, int64_t last) {
    for (int64_t n = first; n < last; ++n) {
      const float* x = a.x + n * a.d;
      float* y = a.y + n * a.d;
      float square = dot(x, x, a.d);
      float r = 1.0f / std::sqrt((kind == Kind::l2 ? square : square / float(a.d)) + a.eps);
      if (a.r) a.r[n] = r;
      columns(a.d, [&](int64_t i, int64_t m) {
        vec v = load_n(x + i, m) * splat(r);
        if (kind != Kind::l2) v = v * load_n(a.w + i, m);
        if (kind == Kind::gated) v = v * sigmoid(load_n(a.gate + n * a.d + i, m));
        store_n(y + i, v, m);
      });
    }
  });
}

template <Kind kind>
static void backward(const NormArgs& a) {
  parallel_blocks(a.rows, kNormBlock, [&](int64_t first, int64_t last) {
    float* dw = a.dw ? a.partial + first / kNormBlock * a.d : nullptr;
    if (dw) columns(a.d, [&](int64_t i, int64_t m) { store_n(dw + i, zero(), m); });
    for (int64_t n = first; n < last; ++n) {
      const float *x = a.x + n * a.d, *dy = a.dy + n * a.d, *gate = kind == Kind::gated ? a.gate + n * a.d : nullptr;
      vec r = splat(a.r[n]), acc = zero();
      // dn: the gradient of the normed row before its gain
      auto dn = [&](int64_t i, int64_t m) {
        vec v = load_n(dy + i, m);
        return kind == Kind::gated ? v * sigmoid(load_n(gate + i, m)) : v;
      };
      auto gain = [&](int64_t i, int64_t m) { return kind == Kind::l2 ? splat(1.0f) : load_n(a.w + i, m); };
      columns(a.d, [&](int64_t i, int64_t m) { acc = fma(gain(i, m) * dn(i, m), load_n(x + i, m) * r, acc); });
      vec mean = splat(kind == Kind::l2 ? sum(acc) : sum(acc) / float(a.d));
      columns(a.d, [&](int64_t i, int64_t m) {
        vec xhat = load_n(x + i, m) * r, g = dn(i, m);
        if (a.dx) store_n(a.dx + n * a.d + i, load_n(a.dx + n * a.d + i, m) + r * (gain(i, m) * g - xhat * mean), m);
        if (kind == Kind::gated && a.dgate) {
          vec s = sigmoid(load_n(gate + i, m));
          store_n(a.dgate + n * a.d + i, load_n(a.dgate + n * a.d + i, m) + g * xhat * gain(i, m) * (splat(1.0f) - s), m);
        }
        if (dw) store_n(dw + i, load_n(dw + i, m) + g * xhat, m);
      });
    }
  });
  if (!a.dw) return;
  for (int64_t b = 0; b < norm_row_blocks(a.rows); ++b)
    columns(a.d, [&](int64_t i, int64_t m) { store_n(a.dw + i, load_n(a.dw + i, m) + load_n(a.partial + b * a.d + i, m), m); });
}

}  // namespace k3::cpu::K3_ISA

K3_KERNELS(NormKernels, norm, forward<Kind::rms>, backward<Kind::rms>, forward<Kind::l2>, backward<Kind::l2>, forward<Kind::gated>,
           backward<Kind::gated>)

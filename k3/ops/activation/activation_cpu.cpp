// Elementwise, one vector of sixteen at a time. The sums and gates are bound by memory; SiTU by its three exponentials. 1 - sigmoid(x) is
// computed as sigmoid(-x): the difference would have no correct digit left once the gate saturates.
#include "k3/ops/activation/activation_kernels.h"

#include <cmath>

#include "k3/core/simd.h"

namespace k3::cpu::K3_ISA {

using namespace k3::simd;

// f(i, m): the m <= 16 elements from i
template <class F>
K3_INLINE void each(int64_t n, F f) {
  for (int64_t i = 0; i < n; i += kLanes) f(i, n - i < kLanes ? n - i : int64_t(kLanes));
}
K3_INLINE void accumulate(float* p, vec v, int64_t m) { store_n(p, load_n(p, m) + v, m); }
K3_INLINE vec one() { return splat(1.0f); }
K3_INLINE vec silu(vec x) { return x * sigmoid(x); }
K3_INLINE vec silu_slope(vec x) { return sigmoid(x) * (one() + x * sigmoid(-x)); }
// Comparisons in this order keep NaN.
K3_INLINE vec at_most(vec x, vec limit) { return select(x > limit, limit, x); }
K3_INLINE vec at_least(vec x, vec limit) { return select(x < limit, limit, x); }

template <Activation::Kind kind>
K3_INLINE void glu_forward_kind(const GluArgs& a) {
  const vec b = splat(a.activation.beta), bu = splat(a.activation.linear_beta), limit = splat(a.activation.limit);
  const bool squash = a.activation.linear_beta > 0;
  each(a.n, [&](int64_t i, int64_t m) {
    vec g = load_n(a.gate + i, m), u = load_n(a.up + i, m), y;
    if constexpr (kind == Activation::Kind::situ)
      y = b * tanh(g / b) * sigmoid(g) * (squash ? bu * tanh(u / bu) : u);
    else if constexpr (kind == Activation::Kind::clipped)
      y = silu(at_most(g, limit)) * at_least(at_most(u, limit), -limit);
    else
      y = silu(g) * u;
    store_n(a.y + i, y, m);
  });
}

template <Activation::Kind kind>
K3_INLINE void glu_backward_kind(const GluArgs& a) {
  const vec b = splat(a.activation.beta), bu = splat(a.activation.linear_beta), limit = splat(a.activation.limit);
  const bool squash = a.activation.linear_beta > 0;
  each(a.n, [&](int64_t i, int64_t m) {
    vec g = load_n(a.gate + i, m), u = load_n(a.up + i, m), dy = load_n(a.dy + i, m), dg, du;
    if constexpr (kind == Activation::Kind::situ) {
      vec t = tanh(g / b), s = sigmoid(g), tu = squash ? tanh(u / bu) : zero(), w = squash ? bu * tu : u;
      dg = dy * w * s * ((one() - t * t) + b * t * sigmoid(-g));
      du = dy * b * t * s * (one() - tu * tu);
    } else if constexpr (kind == Activation::Kind::clipped) {
      vec gc = at_most(g, limit), uc = at_least(at_most(u, limit), -limit);
      dg = select(g > limit, zero(), dy * uc * silu_slope(gc));
      du = select(abs(u) > limit, zero(), dy * silu(gc));
    } else {
      dg = dy * u * silu_slope(g);
      du = dy * silu(g);
    }
    accumulate(a.dgate + i, dg, m);
    accumulate(a.dup + i, du, m);
  });
}

static void glu_forward(const GluArgs& a) {
  switch (a.activation.kind) {
    case Activation::Kind::swiglu:
      return glu_forward_kind<Activation::Kind::swiglu>(a);
    case Activation::Kind::situ:
      return glu_forward_kind<Activation::Kind::situ>(a);
    case Activation::Kind::clipped:
      return glu_forward_kind<Activation::Kind::clipped>(a);
  }
}
static void glu_backward(const GluArgs& a) {
  switch (a.activation.kind) {
    case Activation::Kind::swiglu:
      return glu_backward_kind<Activation::Kind::swiglu>(a);
    case Activation::Kind::situ:
      return glu_backward_kind<Activation::Kind::situ>(a);
    case Activation::Kind::clipped:
      return glu_backward_kind<Activation::Kind::clipped>(a);
  }
}

static void add_forward(const ElementArgs& a) {
  each(a.n, [&](int64_t i, int64_t m) { store_n(a.y + i, load_n(a.x + i, m) + load_n(a.g + i, m), m); });
}
static void add_backward(const ElementArgs& a) {
  each(a.n, [&](int64_t i, int64_t m) {
    accumulate(a.dx + i, load_n(a.dy + i, m), m);
    accumulate(a.dg + i, load_n(a.dy + i, m), m);
  });
}
static void silu_forward(const ElementArgs& a) {
  each(a.n, [&](int64_t i, int64_t m) { store_n(a.y + i, silu(load_n(a.x + i, m)), m); });
}
static void silu_backward(const ElementArgs& a) {
  each(a.n, [&](int64_t i, int64_t m) { accumulate(a.dx + i, load_n(a.dy + i, m) * silu_slope(load_n(a.x + i, m)), m); });
}
static void sigmoid_forward(const ElementArgs& a) {
  each(a.n, [&](int64_t i, int64_t m) { store_n(a.y + i, sigmoid(load_n(a.x + i, m)), m); });
}
static void sigmoid_backward(const ElementArgs& a) {
  each(a.n, [&](int64_t i, int64_t m) {
    vec x = load_n(a.x + i, m);
    accumulate(a.dx + i, load_n(a.dy + i, m) * sigmoid(x) * sigmoid(-x), m);
  });
}
static void sigmoid_gate_forward(const ElementArgs& a) {
  each(a.n, [&](int64_t i, int64_t m) { store_n(a.y + i, load_n(a.x + i, m) * sigmoid(load_n(a.g + i, m)), m); });
}
static void sigmoid_gate_backward(const ElementArgs& a) {
  each(a.n, [&](int64_t i, int64_t m) {
    vec g = load_n(a.g + i, m), ds = load_n(a.dy + i, m) * sigmoid(g);
    accumulate(a.dx + i, ds, m);
    accumulate(a.dg + i, ds * load_n(a.x + i, m) * sigmoid(-g), m);
  });
}

}  // namespace k3::cpu::K3_ISA

K3_KERNELS(ActivationKernels, activation, glu_forward, glu_backward, add_forward, add_backward, silu_forward, silu_backward, sigmoid_forward,
           sigmoid_backward, sigmoid_gate_forward, sigmoid_gate_backward)

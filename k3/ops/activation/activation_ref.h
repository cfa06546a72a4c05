#pragma once
// The plain formulas of one element and their derivatives. S = complex<double> with an imaginary step gives the derivative itself.
#include <cmath>
#include <complex>

#include "k3/ops/activation/activation_kernels.h"

namespace k3::ref {

template <class S>
S sigmoid(S x) {
  using std::exp;
  return S(1) / (S(1) + exp(-x));
}
template <class S>
S silu(S x) {
  return x * sigmoid(x);
}
inline double sigmoid_backward(double x, double dy) { return dy * sigmoid(x) * sigmoid(-x); }
inline double silu_backward(double x, double dy) { return dy * sigmoid(x) * (1 + x * sigmoid(-x)); }

template <class S>
S sigmoid_gate(S o, S g) {
  return o * sigmoid(g);
}
inline void sigmoid_gate_backward(double o, double g, double dy, double& d_o, double& dg) {
  d_o += dy * sigmoid(g);
  dg += sigmoid_backward(g, dy * o);
}

template <class S>
S glu(S g, S u, const Activation& a) {
  using std::real;
  using std::tanh;
  double b = a.beta, bu = a.linear_beta, limit = a.limit;
  switch (a.kind) {
    case Activation::Kind::situ:
      return b * tanh(g / b) * sigmoid(g) * (bu > 0 ? bu * tanh(u / bu) : u);
    case Activation::Kind::clipped:
      if (real(g) > limit) g = S(limit);
      if (real(u) > limit) u = S(limit);
      if (real(u) < -limit) u = S(-limit);
      [[fallthrough]];
    case Activation::Kind::swiglu:
      break;
  }
  return silu(g) * u;
}

// situ, with t = tanh(g/b), s = sigmoid(g), w the squashed u:   dg = dy w s ((1 - t^2) + b t (1 - s)),   du = dy b t s w'
inline void glu_backward(double g, double u, const Activation& a, double dy, double& dg, double& du) {
  double b = a.beta, bu = a.linear_beta, limit = a.limit;
  if (a.kind == Activation::Kind::situ) {
    double t = std::tanh(g / b), s = sigmoid(g), tu = bu > 0 ? std::tanh(u / bu) : 0, w = bu > 0 ? bu * tu : u;
    dg += dy * w * s * ((1 - t * t) + b * t * sigmoid(-g));
    du += dy * b * t * s * (1 - tu * tu);
    return;
  }
  bool clipped = a.kind == Activation::Kind::clipped, cut_g = clipped && g > limit, cut_u = clipped && std::abs(u) > limit;
  if (cut_g) g = limit;
  if (cut_u) u = u < 0 ? -limit : limit;
  if (!cut_g) dg += silu_backward(g, dy * u);
  if (!cut_u) du += dy * silu(g);
}

}  // namespace k3::ref

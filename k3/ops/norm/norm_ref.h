#pragma once
// The plain loops. Templated on the scalar: double is the oracle, complex<double> with an imaginary step of 1e-30 is the derivative.
#include <cmath>
#include <complex>
#include <cstdint>

namespace k3::ref {

template <class S>
void rms_norm(const S* x, const S* w, S eps, S* y, int64_t rows, int64_t d) {
  using std::sqrt;
  for (int64_t n = 0; n < rows; ++n) {
    S sum = 0;
    for (int64_t i = 0; i < d; ++i) sum += x[n * d + i] * x[n * d + i];
    S r = S(1) / sqrt(sum / S(double(d)) + eps);
    for (int64_t i = 0; i < d; ++i) y[n * d + i] = x[n * d + i] * r * w[i];
  }
}

// dx_i += r (w_i dy_i - xhat_i mean_j(w_j dy_j xhat_j)),  dw_i += sum_n dy_i xhat_i,  xhat = x r
template <class S>
void rms_norm_backward(const S* x, const S* w, S eps, const S* dy, S* dx, S* dw, int64_t rows, int64_t d) {
  using std::sqrt;
  for (int64_t n = 0; n < rows; ++n) {
    S sum = 0, dot = 0;
    for (int64_t i = 0; i < d; ++i) sum += x[n * d + i] * x[n * d + i];
    S r = S(1) / sqrt(sum / S(double(d)) + eps);
    for (int64_t i = 0; i < d; ++i) dot += w[i] * dy[n * d + i] * x[n * d + i] * r;
    dot /= S(double(d));
    for (int64_t i = 0; i < d; ++i) {
      S xhat = x[n * d + i] * r;
      dx[n * d + i] += r * (w[i] * dy[n * d + i] - xhat * dot);
      dw[i] += dy[n * d + i] * xhat;
    }
  }
}

// rows here are (token, head) pairs
template <class S>
void l2_norm(const S* x, S eps, S* y, int64_t rows, int64_t d) {
  using std::sqrt;
  for (int64_t n = 0; n < rows; ++n) {
    S sum = 0;
    for (int64_t i = 0; i < d; ++i) sum += x[n * d + i] * x[n * d + i];
    S r = S(1) / sqrt(sum + eps);
    for (int64_t i = 0; i < d; ++i) y[n * d + i] = x[n * d + i] * r;
  }
}

// dx += r (dy - y (y . dy))
template <class S>
void l2_norm_backward(const S* x, S eps, const S* dy, S* dx, int64_t rows, int64_t d) {
  using std::sqrt;
  for (int64_t n = 0; n < rows; ++n) {
    S sum = 0, dot = 0;
    for (int64_t i = 0; i < d; ++i) sum += x[n * d + i] * x[n * d + i];
    S r = S(1) / sqrt(sum + eps);
    for (int64_t i = 0; i < d; ++i) dot += dy[n * d + i] * x[n * d + i] * r;
    for (int64_t i = 0; i < d; ++i) dx[n * d + i] += r * (dy[n * d + i] - x[n * d + i] * r * dot);
  }
}

template <class S>
void gated_rms_norm(const S* o, const S* gate, const S* w, S eps, S* y, int64_t rows, int64_t d) {
  using std::exp;
  rms_norm(o, w, eps, y, rows, d);
  for (int64_t i = 0; i < rows * d; ++i) y[i] = y[i] / (S(1) + exp(-gate[i]));
}

// n = rms_norm(o), s = sigmoid(gate):  dgate += dy n s (1 - s),  dn = dy s, then rms_norm's backward
template <class S>
void gated_rms_norm_backward(const S* o, const S* gate, const S* w, S eps, const S* dy, S* d_o, S* dgate, S* dw, int64_t rows, int64_t d) {
  using std::exp;
  using std::sqrt;
  for (int64_t n = 0; n < rows; ++n) {
    S sum = 0, dot = 0;
    const S *on = o + n * d, *gn = gate + n * d, *dyn = dy + n * d;
    for (int64_t i = 0; i < d; ++i) sum += on[i] * on[i];
    S r = S(1) / sqrt(sum / S(double(d)) + eps);
    for (int64_t i = 0; i < d; ++i) {
      S s = S(1) / (S(1) + exp(-gn[i]));
      dot += w[i] * dyn[i] * s * on[i] * r;
    }
    dot /= S(double(d));
    for (int64_t i = 0; i < d; ++i) {
      S s = S(1) / (S(1) + exp(-gn[i])), xhat = on[i] * r;
      dgate[n * d + i] += dyn[i] * xhat * w[i] * s * (S(1) - s);
      d_o[n * d + i] += r * (w[i] * dyn[i] * s - xhat * dot);
      dw[i] += dyn[i] * s * xhat;
    }
  }
}

}  // namespace k3::ref

#pragma once
// The plain loops, in double.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace k3::ref {

struct AdamW {
  double lr, beta1, beta2, eps, weight_decay, grad_scale;
};

inline void adamw_step(double* w, const double* grad, double* m, double* v, int64_t n, int64_t step, const AdamW& o) {
  for (int64_t i = 0; i < n; ++i) {
    double g = o.grad_scale * grad[i];
    m[i] = o.beta1 * m[i] + (1 - o.beta1) * g;
    v[i] = o.beta2 * v[i] + (1 - o.beta2) * g * g;
    double m_hat = m[i] / (1 - std::pow(o.beta1, double(step))), v_hat = v[i] / (1 - std::pow(o.beta2, double(step)));
    w[i] -= o.lr * (m_hat / (std::sqrt(v_hat) + o.eps) + o.weight_decay * w[i]);
  }
}

// X / (|X|_F + 1e-7), then five times S = X X^T, X <- a X + (b S + c S S) X; on X^T when rows > cols
inline void newton_schulz(double* x, int64_t rows, int64_t cols) {
  const double a = 3.4445, b = -4.7750, c = 2.0315;
  const bool tall = rows > cols;
  const int64_t m = std::min(rows, cols), n = std::max(rows, cols);
  std::vector<double> y(size_t(m * n)), next(size_t(m * n)), s(size_t(m * m)), p(size_t(m * m));
  double norm = 0;
  for (int64_t i = 0; i < m * n; ++i) norm += x[i] * x[i];
  norm = std::sqrt(norm) + 1e-7;
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < cols; ++j) y[size_t(tall ? j * n + i : i * n + j)] = x[i * cols + j] / norm;
  auto times = [&](const std::vector<double>& l, const double* r, int64_t row_step, int64_t col_step, std::vector<double>& out, int64_t inner,
                   int64_t w) {
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < w; ++j) {
        double sum = 0;
        for (int64_t k = 0; k < inner; ++k) sum += l[size_t(i * inner + k)] * r[k * row_step + j * col_step];
        out[size_t(i * w + j)] = sum;
      }
  };
  for (int step = 0; step < 5; ++step) {
    times(y, y.data(), 1, n, s, n, m);
    times(s, s.data(), m, 1, p, m, m);
    for (int64_t i = 0; i < m * m; ++i) p[size_t(i)] = b * s[size_t(i)] + c * p[size_t(i)] + (i % (m + 1) == 0 ? a : 0);
    times(p, y.data(), n, 1, next, m, n);
    y = next;
  }
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < cols; ++j) x[i * cols + j] = y[size_t(tall ? j * n + i : i * n + j)];
}

struct Muon {
  double lr, momentum, weight_decay, grad_scale;
  bool nesterov;
};

// One block: M <- mu M + g;  N = mu M + g or M;  w -= lr (0.2 sqrt(max(rows, cols)) NS(N) + weight_decay w)
inline void muon_step(double* w, const double* grad, double* momentum, int64_t rows, int64_t cols, const Muon& o) {
  std::vector<double> look(size_t(rows * cols));
  for (int64_t i = 0; i < rows * cols; ++i) {
    double g = o.grad_scale * grad[i];
    momentum[i] = o.momentum * momentum[i] + g;
    look[size_t(i)] = o.nesterov ? o.momentum * momentum[i] + g : momentum[i];
  }
  newton_schulz(look.data(), rows, cols);
  for (int64_t i = 0; i < rows * cols; ++i) w[i] -= o.lr * (0.2 * std::sqrt(double(std::max(rows, cols))) * look[size_t(i)] + o.weight_decay * w[i]);
}

}  // namespace k3::ref

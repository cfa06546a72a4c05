#pragma once
// The plain loops. z, g (rows, heads * dim); A_log at least (heads); bias (heads * dim).
#include <cmath>
#include <complex>
#include <cstdint>

namespace k3::ref {

template <class S>
void bounded_decay(const S* z, const S* A_log, const S* bias, S lower_bound, S* g, int64_t rows, int64_t heads, int64_t dim) {
  using std::exp;
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = h * dim; i < (h + 1) * dim; ++i)
        g[n * heads * dim + i] = lower_bound / (S(1) + exp(-exp(A_log[h]) * (z[n * heads * dim + i] + bias[i])));
}

// s = sigmoid(e^A (z + bias)):   dz = dg lower_bound s (1 - s) e^A,   dbias = sum_n dz,   dA = sum dz (z + bias)
inline void bounded_decay_backward(const double* z, const double* A_log, const double* bias, double lower_bound, const double* dg, double* dz,
                                   double* dA_log, double* dbias, int64_t rows, int64_t heads, int64_t dim) {
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = h * dim; i < (h + 1) * dim; ++i) {
        double a = std::exp(A_log[h]), v = z[n * heads * dim + i] + bias[i];
        double s = 1 / (1 + std::exp(-a * v)), rest = 1 / (1 + std::exp(a * v));
        double d = dg[n * heads * dim + i] * lower_bound * s * rest * a;
        dz[n * heads * dim + i] += d, dbias[i] += d, dA_log[h] += d * v;
      }
}

template <class S>
void softplus_decay(const S* z, const S* A_log, const S* bias, S* g, int64_t rows, int64_t heads, int64_t dim) {
  using std::exp;
  using std::log;
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = h * dim; i < (h + 1) * dim; ++i) g[n * heads * dim + i] = -exp(A_log[h]) * log(S(1) + exp(z[n * heads * dim + i] + bias[i]));
}

// dz = -dg e^A sigmoid(z + bias),   dbias = sum_n dz,   dA = sum dg g
inline void softplus_decay_backward(const double* z, const double* A_log, const double* bias, const double* dg, double* dz, double* dA_log,
                                    double* dbias, int64_t rows, int64_t heads, int64_t dim) {
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = h * dim; i < (h + 1) * dim; ++i) {
        double a = std::exp(A_log[h]), v = z[n * heads * dim + i] + bias[i], up = dg[n * heads * dim + i];
        double d = -up * a / (1 + std::exp(-v));
        dz[n * heads * dim + i] += d, dbias[i] += d, dA_log[h] -= up * a * std::log1p(std::exp(v));
      }
}

}  // namespace k3::ref

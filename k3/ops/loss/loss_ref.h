#pragma once
// The plain loops: all logits stored, one row after the other. Ignored targets are negative.
#include <cmath>
#include <complex>
#include <cstdint>
#include <vector>

namespace k3::ref {

// loss_n = log sum_v e^{x_n . head_v} - x_n . head_target
template <class S>
void cross_entropy(const S* x, const S* head, const int32_t* targets, S* loss, int64_t rows, int64_t d, int64_t vocabulary) {
  using std::exp;
  using std::log;
  using std::real;
  for (int64_t n = 0; n < rows; ++n) {
    loss[n] = S(0);
    if (targets[n] < 0) continue;
    std::vector<S> l(vocabulary, S(0));
    double max = -INFINITY;
    for (int64_t v = 0; v < vocabulary; ++v) {
      for (int64_t i = 0; i < d; ++i) l[v] += x[n * d + i] * head[v * d + i];
      max = std::max(max, real(l[v]));
    }
    S sum = 0;
    for (int64_t v = 0; v < vocabulary; ++v) sum += exp(l[v] - max);
    loss[n] = max + log(sum) - l[targets[n]];
  }
}

// dl_v = weight (softmax(l)_v - [v = target]);  dx_n += sum_v dl_v head_v,  dhead_v += sum_n dl_v x_n
inline void cross_entropy_backward(const double* x, const double* head, const int32_t* targets, double weight, double* dx, double* dhead,
                                   int64_t rows, int64_t d, int64_t vocabulary) {
  for (int64_t n = 0; n < rows; ++n) {
    if (targets[n] < 0) continue;
    std::vector<double> l(vocabulary, 0.0);
    double max = -INFINITY, sum = 0;
    for (int64_t v = 0; v < vocabulary; ++v) {
      for (int64_t i = 0; i < d; ++i) l[v] += x[n * d + i] * head[v * d + i];
      max = std::max(max, l[v]);
    }
    for (int64_t v = 0; v < vocabulary; ++v) sum += std::exp(l[v] - max);
    for (int64_t v = 0; v < vocabulary; ++v) {
      double dl = weight * (std::exp(l[v] - max) / sum - (v == targets[n] ? 1.0 : 0.0));
      for (int64_t i = 0; i < d; ++i) dx[n * d + i] += dl * head[v * d + i], dhead[v * d + i] += dl * x[n * d + i];
    }
  }
}

}  // namespace k3::ref

#pragma once
#include <cstdint>

namespace k3::ref {

// y[i][o] = sum_k x[i][k] w[o][k]
template <class S>
void linear(const S* x, const S* w, S* y, int64_t m, int64_t n, int64_t k) {
  for (int64_t i = 0; i < m; ++i)
    for (int64_t o = 0; o < n; ++o) {
      S sum = 0;
      for (int64_t j = 0; j < k; ++j) sum += x[i * k + j] * w[o * k + j];
      y[i * n + o] = sum;
    }
}

// dx += dy W,  dW += dy^T x
template <class S>
void linear_backward(const S* x, const S* w, const S* dy, S* dx, S* dw, int64_t m, int64_t n, int64_t k) {
  for (int64_t i = 0; i < m; ++i)
    for (int64_t o = 0; o < n; ++o)
      for (int64_t j = 0; j < k; ++j) {
        dx[i * k + j] += dy[i * n + o] * w[o * k + j];
        dw[o * k + j] += dy[i * n + o] * x[i * k + j];
      }
}

}  // namespace k3::ref

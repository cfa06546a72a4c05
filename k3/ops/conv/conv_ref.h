#pragma once
// The plain loops, for one sequence of T tokens from its first. Templated on the scalar, as all references are.
#include <cmath>
#include <complex>
#include <cstdint>

namespace k3::ref {

// a_t[c] = sum_j w[c, j] x_{t - (width-1) + j}[c],  y = a sigmoid(a)
template <class S>
void conv_silu(const S* x, const S* w, S* y, int64_t tokens, int64_t channels, int64_t width) {
  using std::exp;
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t c = 0; c < channels; ++c) {
      S a = 0;
      for (int64_t j = 0; j < width; ++j)
        if (int64_t s = t - (width - 1) + j; s >= 0) a += w[c * width + j] * x[s * channels + c];
      y[t * channels + c] = a / (S(1) + exp(-a));
    }
}

// da = dy sigmoid(a) (1 + a (1 - sigmoid(a)));  dx_s += sum_j w[j] da_{s + (width-1) - j},  dw[j] += sum_t da_t x_{t - (width-1) + j}
template <class S>
void conv_silu_backward(const S* x, const S* w, const S* dy, S* dx, S* dw, int64_t tokens, int64_t channels, int64_t width) {
  using std::exp;
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t c = 0; c < channels; ++c) {
      S a = 0;
      for (int64_t j = 0; j < width; ++j)
        if (int64_t s = t - (width - 1) + j; s >= 0) a += w[c * width + j] * x[s * channels + c];
      S g = S(1) / (S(1) + exp(-a)), da = dy[t * channels + c] * g * (S(1) + a * (S(1) - g));
      for (int64_t j = 0; j < width; ++j)
        if (int64_t s = t - (width - 1) + j; s >= 0) dx[s * channels + c] += w[c * width + j] * da, dw[c * width + j] += da * x[s * channels + c];
    }
}

}  // namespace k3::ref

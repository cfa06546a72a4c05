#pragma once
#include <cmath>
#include <complex>
#include <cstdint>
#include <vector>

namespace k3::ref {

// The n sources of one token: r, s, softmax a. u = norm_weight * query.
template <class S>
void depth_weights(const std::vector<const S*>& v, const S* w, const S* query, double eps, int64_t d, std::vector<S>& r, std::vector<S>& s,
                   std::vector<S>& a) {
  size_t n = v.size();
  r.assign(n, S(0)), s.assign(n, S(0)), a.assign(n, S(0));
  double top = -INFINITY;
  for (size_t i = 0; i < n; ++i) {
    S square = 0, dot = 0;
    for (int64_t c = 0; c < d; ++c) square += v[i][c] * v[i][c], dot += v[i][c] * w[c] * query[c];
    r[i] = 1.0 / std::sqrt(square / double(d) + eps);
    s[i] = r[i] * dot;
    top = std::max(top, std::real(s[i]));
  }
  S sum = 0;
  for (size_t i = 0; i < n; ++i) sum += a[i] = std::exp(s[i] - top);
  for (size_t i = 0; i < n; ++i) a[i] /= sum;
}

// v: n sources (rows, d) each; h (rows, d)
template <class S>
void depth_mix(const std::vector<const S*>& v, const S* w, const S* query, double eps, S* h, int64_t rows, int64_t d) {
  std::vector<S> r, s, a;
  for (int64_t t = 0; t < rows; ++t) {
    auto row = v;
    for (auto& x : row) x += t * d;
    depth_weights(row, w, query, eps, d, r, s, a);
    for (int64_t c = 0; c < d; ++c) {
      S sum = 0;
      for (size_t i = 0; i < v.size(); ++i) sum += a[i] * row[i][c];
      h[t * d + c] = sum;
    }
  }
}

// da_i = v_i . dh,  ds_i = a_i (da_i - sum_j a_j da_j),  dv_i += a_i dh + ds_i (r_i u - s_i r_i^2/d v_i),  du += ds_i r_i v_i
template <class S>
void depth_mix_backward(const std::vector<const S*>& v, const S* w, const S* query, double eps, const S* dh, const std::vector<S*>& dv, S* dw,
                        S* dquery, int64_t rows, int64_t d) {
  std::vector<S> r, s, a, da(v.size());
  for (int64_t t = 0; t < rows; ++t) {
    auto row = v;
    for (auto& x : row) x += t * d;
    depth_weights(row, w, query, eps, d, r, s, a);
    S mean = 0;
    for (size_t i = 0; i < v.size(); ++i) {
      da[i] = 0;
      for (int64_t c = 0; c < d; ++c) da[i] += row[i][c] * dh[t * d + c];
      mean += a[i] * da[i];
    }
    for (size_t i = 0; i < v.size(); ++i) {
      S ds = a[i] * (da[i] - mean);
      for (int64_t c = 0; c < d; ++c) {
        dv[i][t * d + c] += a[i] * dh[t * d + c] + ds * (r[i] * w[c] * query[c] - s[i] * r[i] * r[i] / double(d) * row[i][c]);
        dw[c] += ds * r[i] * row[i][c] * query[c];
        dquery[c] += ds * r[i] * row[i][c] * w[c];
      }
    }
  }
}

}  // namespace k3::ref

#pragma once
// The plain loops. The choice is made in double by sorting; weights and experts are templated, so that a complex step proves the backward.
#include <algorithm>
#include <cmath>
#include <complex>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

namespace k3::ref {

struct RouteShape {
  int64_t rows, experts, top_k;
  bool softmax = false, renormalize = true;
  double scale = 1;
  int64_t groups = 1, top_groups = 1;
};

template <class S>
void route_scores(const S* logits, S* s, const RouteShape& o) {
  using std::exp;
  for (int64_t n = 0; n < o.rows; ++n) {
    S total = 0;
    for (int64_t j = 0; j < o.experts; ++j) total += exp(logits[n * o.experts + j]);
    for (int64_t j = 0; j < o.experts; ++j) {
      S x = logits[n * o.experts + j];
      s[n * o.experts + j] = o.softmax ? exp(x) / total : S(1) / (S(1) + exp(-x));
    }
  }
}

// The top k of scores + bias, best first, equals by index; cutoff is the (k+1)-th value or -infinity.
inline void route_choose(const double* s, const double* bias, int32_t* chosen, double* cutoff, const RouteShape& o) {
  const double none = -std::numeric_limits<double>::infinity();
  const int64_t size = o.experts / o.groups;
  auto best_first = [](const std::vector<double>& v) {
    std::vector<int32_t> order(v.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return v[size_t(a)] > v[size_t(b)]; });
    return order;
  };
  for (int64_t n = 0; n < o.rows; ++n) {
    std::vector<double> choice(size_t(o.experts), 0.0), of_group;
    for (int64_t j = 0; j < o.experts; ++j) choice[size_t(j)] = s[n * o.experts + j] + bias[j];
    for (int64_t g = 0; g < o.groups; ++g) {
      std::vector<double> in(choice.begin() + g * size, choice.begin() + (g + 1) * size);
      std::sort(in.rbegin(), in.rend());
      of_group.push_back(in[0] + (size > 1 ? in[1] : 0));
    }
    auto groups = best_first(of_group);
    for (int64_t g = o.top_groups; g < o.groups; ++g) std::fill_n(choice.begin() + groups[size_t(g)] * size, size, none);
    auto order = best_first(choice);
    std::copy_n(order.begin(), o.top_k, chosen + n * o.top_k);
    cutoff[n] = o.top_k < o.experts ? choice[size_t(order[size_t(o.top_k)])] : none;
  }
}

template <class S>
void route_weights(const S* logits, const int32_t* chosen, S* weights, const RouteShape& o) {
  std::vector<S> s(size_t(o.rows * o.experts));
  route_scores(logits, s.data(), o);
  for (int64_t n = 0; n < o.rows; ++n) {
    S total = 0;
    for (int64_t i = 0; i < o.top_k; ++i) total += s[size_t(n * o.experts + chosen[n * o.top_k + i])];
    for (int64_t i = 0; i < o.top_k; ++i) {
      S w = s[size_t(n * o.experts + chosen[n * o.top_k + i])];
      if (o.renormalize && o.top_k > 1) w /= total + S(1e-20);
      weights[n * o.top_k + i] = w * S(o.scale);
    }
  }
}

// With p the weight before `scale`, D the sum of the chosen scores:   ds_j = (dp_j - sum_r dp_r p_r) / D   (j chosen, else 0)
//   sigmoid: dlogit_j += ds_j s_j (1 - s_j)        softmax: dlogit_j += s_j (ds_j - sum_r ds_r s_r)
inline void route_backward(const double* logits, const int32_t* chosen, const double* dweights, double* dlogits, const RouteShape& o) {
  std::vector<double> s(size_t(o.rows * o.experts));
  route_scores(logits, s.data(), o);
  for (int64_t n = 0; n < o.rows; ++n) {
    const double *sn = s.data() + n * o.experts, *dw = dweights + n * o.top_k;
    const int32_t* c = chosen + n * o.top_k;
    std::vector<double> ds(size_t(o.experts), 0.0);
    double total = 1e-20, inner = 0, across = 0;
    for (int64_t i = 0; i < o.top_k; ++i) total += sn[c[i]];
    for (int64_t i = 0; i < o.top_k; ++i) inner += o.scale * dw[i] * sn[c[i]] / total;
    bool renormalize = o.renormalize && o.top_k > 1;
    for (int64_t i = 0; i < o.top_k; ++i) ds[size_t(c[i])] = renormalize ? (o.scale * dw[i] - inner) / total : o.scale * dw[i];
    for (int64_t j = 0; j < o.experts; ++j) across += ds[size_t(j)] * sn[j];
    for (int64_t j = 0; j < o.experts; ++j)
      dlogits[n * o.experts + j] += o.softmax ? sn[j] * (ds[size_t(j)] - across) : ds[size_t(j)] * sn[j] * (1 - sn[j]);
  }
}

struct ExpertsShape {
  int64_t rows, slots, l, m;
};

// u = sum_j p_j W2_j f(W1_j z, W3_j z);   w1, w3 (E, m, l), w2 (E, l, m); slots that chose -1 add nothing
template <class S, class F>
void experts(const S* z, const S* p, const int32_t* chosen, const S* w1, const S* w3, const S* w2, F f, S* u, const ExpertsShape& o) {
  for (int64_t n = 0; n < o.rows; ++n) {
    for (int64_t i = 0; i < o.l; ++i) u[n * o.l + i] = 0;
    for (int64_t k = 0; k < o.slots; ++k) {
      if (chosen[n * o.slots + k] < 0) continue;
      const int64_t at = chosen[n * o.slots + k] * o.m * o.l;
      for (int64_t q = 0; q < o.m; ++q) {
        S a = 0, c = 0;
        for (int64_t i = 0; i < o.l; ++i) a += w1[at + q * o.l + i] * z[n * o.l + i], c += w3[at + q * o.l + i] * z[n * o.l + i];
        S h = f(a, c);
        for (int64_t i = 0; i < o.l; ++i) u[n * o.l + i] += p[n * o.slots + k] * w2[at + i * o.m + q] * h;
      }
    }
  }
}

// Per pair: e = W2^T du;  dp = e.h;  dh = p e;  dW2 += p du h^T;  dW1 += da z^T;  dW3 += dc z^T;  dz += W1^T da + W3^T dc
template <class F, class B>
void experts_backward(const double* z, const double* p, const int32_t* chosen, const double* w1, const double* w3, const double* w2, F f,
                      B f_backward, const double* du, double* dz, double* dp, double* dw1, double* dw3, double* dw2, const ExpertsShape& o) {
  for (int64_t n = 0; n < o.rows; ++n)
    for (int64_t k = 0; k < o.slots; ++k) {
      if (chosen[n * o.slots + k] < 0) continue;
      const int64_t at = chosen[n * o.slots + k] * o.m * o.l;
      const double *zn = z + n * o.l, *dun = du + n * o.l, pk = p[n * o.slots + k];
      for (int64_t q = 0; q < o.m; ++q) {
        double a = 0, c = 0, e = 0, da = 0, dc = 0;
        for (int64_t i = 0; i < o.l; ++i) a += w1[at + q * o.l + i] * zn[i], c += w3[at + q * o.l + i] * zn[i], e += w2[at + i * o.m + q] * dun[i];
        double h = f(a, c);
        f_backward(a, c, pk * e, da, dc);
        dp[n * o.slots + k] += e * h;
        for (int64_t i = 0; i < o.l; ++i) {
          dw2[at + i * o.m + q] += pk * dun[i] * h;
          dw1[at + q * o.l + i] += da * zn[i], dw3[at + q * o.l + i] += dc * zn[i];
          dz[n * o.l + i] += w1[at + q * o.l + i] * da + w3[at + q * o.l + i] * dc;
        }
      }
    }
}

}  // namespace k3::ref

#pragma once
#include <cmath>
#include <complex>
#include <cstdint>
#include <vector>

namespace k3::ref {

inline double real_part(double x) { return x; }
inline double real_part(std::complex<double> x) { return x.real(); }

// One sequence of n tokens. p[s], s <= t: the weights of query row t of one head; returns the largest logit.
template <class S>
double attention_weights(const S* q, const S* k, int64_t t, int64_t k_stride, int64_t key_dim, double scale, std::vector<S>& p) {
  p.assign(size_t(t) + 1, S(0));
  double top = -INFINITY;
  for (int64_t s = 0; s <= t; ++s) {
    for (int64_t i = 0; i < key_dim; ++i) p[s] += q[i] * k[s * k_stride + i];
    p[s] *= scale;
    top = std::max(top, real_part(p[s]));
  }
  S sum = 0;
  for (S& x : p) sum += x = std::exp(x - top);
  for (S& x : p) x /= sum;
  return top;
}

// q (n, heads*key_dim), k (n, kv_heads*key_dim), v (n, kv_heads*value_dim), o (n, heads*value_dim); max_logit (heads) or null
template <class S>
void attention(const S* q, const S* k, const S* v, S* o, int64_t n, int64_t heads, int64_t kv_heads, int64_t key_dim, int64_t value_dim, double scale,
               double* max_logit = nullptr) {
  std::vector<S> p;
  for (int64_t h = 0; h < heads; ++h) {
    int64_t g = h / (heads / kv_heads);
    if (max_logit) max_logit[h] = -INFINITY;
    for (int64_t t = 0; t < n; ++t) {
      double top = attention_weights(q + (t * heads + h) * key_dim, k + g * key_dim, t, kv_heads * key_dim, key_dim, scale, p);
      if (max_logit) max_logit[h] = std::max(max_logit[h], top);
      for (int64_t i = 0; i < value_dim; ++i) {
        S sum = 0;
        for (int64_t s = 0; s <= t; ++s) sum += p[s] * v[(s * kv_heads + g) * value_dim + i];
        o[(t * heads + h) * value_dim + i] = sum;
      }
    }
  }
}

// dlogit_ts = p_ts (do_t . v_s - D_t),  D_t = sum_s p_ts do_t . v_s
template <class S>
void attention_backward(const S* q, const S* k, const S* v, const S* d_o, S* dq, S* dk, S* dv, int64_t n, int64_t heads, int64_t kv_heads,
                        int64_t key_dim, int64_t value_dim, double scale) {
  std::vector<S> p, dp;
  for (int64_t h = 0; h < heads; ++h) {
    int64_t g = h / (heads / kv_heads);
    for (int64_t t = 0; t < n; ++t) {
      attention_weights(q + (t * heads + h) * key_dim, k + g * key_dim, t, kv_heads * key_dim, key_dim, scale, p);
      const S* dot = d_o + (t * heads + h) * value_dim;
      S d = 0;
      dp.assign(p.size(), S(0));
      for (int64_t s = 0; s <= t; ++s) {
        for (int64_t i = 0; i < value_dim; ++i) dp[s] += dot[i] * v[(s * kv_heads + g) * value_dim + i];
        d += p[s] * dp[s];
      }
      for (int64_t s = 0; s <= t; ++s) {
        S dlogit = p[s] * (dp[s] - d) * scale;
        for (int64_t i = 0; i < value_dim; ++i) dv[(s * kv_heads + g) * value_dim + i] += p[s] * dot[i];
        for (int64_t i = 0; i < key_dim; ++i) {
          dq[(t * heads + h) * key_dim + i] += dlogit * k[(s * kv_heads + g) * key_dim + i];
          dk[(s * kv_heads + g) * key_dim + i] += dlogit * q[(t * heads + h) * key_dim + i];
        }
      }
    }
  }
}

struct Mla {
  int64_t heads, nope, rope, value, rank;
  double scale;
};

// k_h = [W_UK c | k_pe], v_h = W_UV c
template <class S>
void mla_expand(const S* c, const S* k_pe, const S* kv_b, S* k, S* v, int64_t n, const Mla& m) {
  for (int64_t t = 0; t < n; ++t)
    for (int64_t h = 0; h < m.heads; ++h) {
      for (int64_t i = 0; i < m.nope + m.value; ++i) {
        S sum = 0;
        for (int64_t j = 0; j < m.rank; ++j) sum += kv_b[(h * (m.nope + m.value) + i) * m.rank + j] * c[t * m.rank + j];
        if (i < m.nope)
          k[(t * m.heads + h) * (m.nope + m.rope) + i] = sum;
        else
          v[(t * m.heads + h) * m.value + i - m.nope] = sum;
      }
      for (int64_t i = 0; i < m.rope; ++i) k[(t * m.heads + h) * (m.nope + m.rope) + m.nope + i] = k_pe[t * m.rope + i];
    }
}

template <class S>
void mla_attention(const S* q, const S* c, const S* k_pe, const S* kv_b, S* o, int64_t n, const Mla& m, double* max_logit = nullptr) {
  std::vector<S> k(n * m.heads * (m.nope + m.rope)), v(n * m.heads * m.value);
  mla_expand(c, k_pe, kv_b, k.data(), v.data(), n, m);
  attention(q, k.data(), v.data(), o, n, m.heads, m.heads, m.nope + m.rope, m.value, m.scale, max_logit);
}

template <class S>
void mla_attention_backward(const S* q, const S* c, const S* k_pe, const S* kv_b, const S* d_o, S* dq, S* dc, S* dk_pe, S* dkv_b, int64_t n,
                            const Mla& m) {
  std::vector<S> k(n * m.heads * (m.nope + m.rope)), v(n * m.heads * m.value), dk(k.size()), dv(v.size());
  mla_expand(c, k_pe, kv_b, k.data(), v.data(), n, m);
  attention_backward(q, k.data(), v.data(), d_o, dq, dk.data(), dv.data(), n, m.heads, m.heads, m.nope + m.rope, m.value, m.scale);
  for (int64_t t = 0; t < n; ++t)
    for (int64_t h = 0; h < m.heads; ++h) {
      for (int64_t i = 0; i < m.nope + m.value; ++i) {
        S d = i < m.nope ? dk[(t * m.heads + h) * (m.nope + m.rope) + i] : dv[(t * m.heads + h) * m.value + i - m.nope];
        for (int64_t j = 0; j < m.rank; ++j) {
          int64_t w = (h * (m.nope + m.value) + i) * m.rank + j;
          dc[t * m.rank + j] += d * kv_b[w];
          dkv_b[w] += d * c[t * m.rank + j];
        }
      }
      for (int64_t i = 0; i < m.rope; ++i) dk_pe[t * m.rope + i] += dk[(t * m.heads + h) * (m.nope + m.rope) + m.nope + i];
    }
}

}  // namespace k3::ref

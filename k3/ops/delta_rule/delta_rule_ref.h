#pragma once
// The plain loops, one head. S is the scalar: double is the oracle, complex<double> with an imaginary step of 1e-30 is the derivative.
#include <cmath>
#include <complex>
#include <cstdint>
#include <vector>

namespace k3::ref {

// How g is laid out: nothing, one value a token, or one a channel.
enum class DeltaGate { none, head, channel };
constexpr int64_t gate_columns(DeltaGate gate, int64_t K) { return gate == DeltaGate::none ? 0 : gate == DeltaGate::head ? 1 : K; }

// A = Diag(exp g_t) S;  u = beta_t (v_t - A^T k_t);  S = A + k_t u^T;  o_t = scale S^T q_t
//   q, k (T, K)   v, o (T, V)   g (T, gate columns)   beta (T)   s (K, V): the memory before and, on return, after
template <class S>
void delta_rule(DeltaGate gate, const S* q, const S* k, const S* v, const S* g, const S* beta, S* s, S* o, int64_t T, int64_t K, int64_t V,
                double scale) {
  using std::exp;
  int64_t G = gate_columns(gate, K);
  for (int64_t t = 0; t < T; ++t, q += K, k += K, v += V, o += V, g += G) {
    if (G)
      for (int64_t i = 0; i < K * V; ++i) s[i] *= exp(g[G == 1 ? 0 : i / V]);
    for (int64_t j = 0; j < V; ++j) {
      S e = v[j];
      for (int64_t i = 0; i < K; ++i) e -= s[i * V + j] * k[i];
      for (int64_t i = 0; i < K; ++i) s[i * V + j] += k[i] * beta[t] * e;
      o[j] = 0;
      for (int64_t i = 0; i < K; ++i) o[j] += S(scale) * s[i * V + j] * q[i];
    }
  }
}

// t from the last to the first; G: the gradient of S_t, from ds = that of the last memory to, on return, that of the first.
//   G  += scale q_t do_t^T;     dq_t = scale S_t do_t
//   du  = G^T k_t;              dbeta_t = du . e;    de = beta_t du;    dv_t = de
//   dk_t = G u - A de;          dA = G - k_t de^T
//   dg_t = rowsum(dA * A);      G = Diag(exp g_t) dA
// Adds to dq, dk, dv, dg, dbeta.
template <class S>
void delta_rule_backward(DeltaGate gate, const S* q, const S* k, const S* v, const S* g, const S* beta, const S* s0, const S* d_o, S* ds, S* dq,
                         S* dk, S* dv, S* dg, S* dbeta, int64_t T, int64_t K, int64_t V, double scale) {
  using std::exp;
  int64_t G = gate_columns(gate, K);
  std::vector<S> states(size_t(T + 1) * K * V), o(V);
  std::copy(s0, s0 + K * V, states.begin());
  for (int64_t t = 0; t < T; ++t) {
    S* s = &states[(t + 1) * K * V];
    std::copy(s - K * V, s, s);
    delta_rule(gate, q + t * K, k + t * K, v + t * V, g + t * G, beta + t, s, o.data(), 1, K, V, scale);
  }
  std::vector<S> a(K * V), e(V), de(V);
  for (int64_t t = T - 1; t >= 0; --t) {
    const S *before = &states[t * K * V], *after = before + K * V, *qt = q + t * K, *kt = k + t * K, *dot = d_o + t * V;
    auto decay = [&](int64_t i) { return G ? exp(g[t * G + (G == 1 ? 0 : i)]) : S(1); };
    for (int64_t i = 0; i < K; ++i)
      for (int64_t j = 0; j < V; ++j) a[i * V + j] = decay(i) * before[i * V + j];
    for (int64_t i = 0; i < K; ++i)
      for (int64_t j = 0; j < V; ++j) {
        ds[i * V + j] += S(scale) * qt[i] * dot[j];
        dq[t * K + i] += S(scale) * after[i * V + j] * dot[j];
      }
    for (int64_t j = 0; j < V; ++j) {
      S du = 0;
      e[j] = v[t * V + j];
      for (int64_t i = 0; i < K; ++i) e[j] -= a[i * V + j] * kt[i], du += ds[i * V + j] * kt[i];
      dbeta[t] += du * e[j];
      de[j] = beta[t] * du;
      dv[t * V + j] += de[j];
    }
    for (int64_t i = 0; i < K; ++i)
      for (int64_t j = 0; j < V; ++j) {
        dk[t * K + i] += ds[i * V + j] * beta[t] * e[j] - a[i * V + j] * de[j];
        S da = ds[i * V + j] - kt[i] * de[j];
        if (G) dg[t * G + (G == 1 ? 0 : i)] += da * a[i * V + j];
        ds[i * V + j] = decay(i) * da;
      }
  }
}

}  // namespace k3::ref

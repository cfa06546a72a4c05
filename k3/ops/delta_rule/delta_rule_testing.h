#pragma once
// What the tests of the delta rule share: inputs as a layer would give them, and the oracle's answer for a packed batch.
#include <algorithm>
#include <cmath>
#include <vector>

#include "k3/ops/delta_rule/delta_rule.h"
#include "k3/ops/delta_rule/delta_rule_ref.h"
#include "k3/ops/testing.h"

namespace k3::testing {

using ref::DeltaGate;

// Log gates as they come: e^g spread over (0, 1); at K3's bound; half of the channels at either end; open.
enum class Decay { spread, bound, mixed, open };
inline float log_gate(Decay decay, int64_t i, float normal) {
  switch (decay) {
    case Decay::spread:
      return -5 / (1 + std::exp(-normal - 1));
    case Decay::bound:
      return -5;
    case Decay::mixed:
      return i % 2 ? -0.001f : -5;
    default:
      return 0;
  }
}

struct DeltaInputs {
  int64_t tokens, H, K, V;
  DeltaGate gate;
  Values q, k, v, g, beta, d_o;

  DeltaInputs(int64_t tokens, int64_t H, int64_t K, int64_t V, DeltaGate gate = DeltaGate::channel, Decay decay = Decay::spread, uint64_t seed = 1)
      : tokens(tokens),
        H(H),
        K(K),
        V(V),
        gate(gate),
        q(tokens * H * K, seed),
        k(tokens * H * K, seed + 1),
        v(tokens * H * V, seed + 2),
        g(tokens * H * ref::gate_columns(gate, K), seed + 3),
        beta(tokens * H, seed + 4),
        d_o(tokens * H * V, seed + 5) {
    for (Values* x : {&q, &k})
      for (int64_t r = 0; r < tokens * H; ++r) normalise(*x, r);
    for (int64_t i = 0; i < g.size(); ++i) g[i] = log_gate(decay, i, g[i]);
    for (int64_t i = 0; i < beta.size(); ++i) beta[i] = 1 / (1 + std::exp(-beta[i]));
  }
  void normalise(Values& x, int64_t r) {
    double sum = 1e-6;
    for (int64_t i = 0; i < K; ++i) sum += double(x[r * K + i]) * x[r * K + i];
    for (int64_t i = 0; i < K; ++i) x[r * K + i] = float(x[r * K + i] / std::sqrt(sum));
  }
  int64_t G() const { return ref::gate_columns(gate, K); }
  DeltaShape shape() const { return {H, K, V, float(1 / std::sqrt(double(K)))}; }
  DeltaInputs part(int64_t from, int64_t to) const {
    DeltaInputs p = *this;
    int64_t n = to - from;
    p.tokens = n;
    p.q = q.slice(from * H * K, n * H * K), p.k = k.slice(from * H * K, n * H * K), p.v = v.slice(from * H * V, n * H * V);
    p.g = g.slice(from * H * G(), n * H * G()), p.beta = beta.slice(from * H, n * H), p.d_o = d_o.slice(from * H * V, n * H * V);
    return p;
  }
};

struct DeltaVars {
  Var q, k, v, g, beta, o;
};
inline DeltaVars run_delta(Step& step, const DeltaInputs& in, const Batch& batch, DeltaState* state = nullptr) {
  int64_t n = in.tokens;
  DeltaVars x{step.input(in.q, {n, in.H * in.K}), step.input(in.k, {n, in.H * in.K}),
              step.input(in.v, {n, in.H * in.V}), {},
              step.input(in.beta, {n, in.H}),     {}};
  if (in.G()) x.g = step.input(in.g, {n, in.H * in.G()});
  x.o = delta_rule(x.q, x.k, x.v, x.g, x.beta, in.shape(), batch, state);
  return x;
}

// The oracle: each head of each sequence by itself.
struct DeltaAnswer {
  std::vector<double> o, dq, dk, dv, dg, dbeta, s, ds;  // s, ds (sequences, H, K, V): the last memory, and the gradient of the first
};
inline DeltaAnswer delta_answer(const DeltaInputs& in, const Batch& batch, const std::vector<double>& s0 = {},
                                const std::vector<double>& d_final = {}, bool gradients = true) {
  int64_t N = in.tokens, H = in.H, K = in.K, V = in.V, G = in.G(), KV = K * V;
  DeltaAnswer a;
  a.o.resize(N * H * V), a.dq.resize(N * H * K), a.dk.resize(N * H * K), a.dv.resize(N * H * V), a.dg.resize(N * H * G), a.dbeta.resize(N * H);
  a.s = s0, a.ds = d_final;
  a.s.resize(batch.sequences() * H * KV), a.ds.resize(batch.sequences() * H * KV);
  for (int64_t s = 0; s < batch.sequences(); ++s)
    for (int64_t h = 0; h < H; ++h) {
      int64_t first = batch.begin(s), T = batch.length(s);
      auto rows = [&](auto& x, int64_t width) {  // this head's columns of this sequence
        std::vector<double> y(size_t(T * width));
        for (int64_t t = 0; t < T; ++t)
          for (int64_t i = 0; i < width; ++i) y[t * width + i] = x[((first + t) * H + h) * width + i];
        return y;
      };
      auto back = [&](const std::vector<double>& y, std::vector<double>& x, int64_t width) {
        for (int64_t t = 0; t < T; ++t)
          for (int64_t i = 0; i < width; ++i) x[((first + t) * H + h) * width + i] = y[t * width + i];
      };
      auto q = rows(in.q, K), k = rows(in.k, K), v = rows(in.v, V), g = rows(in.g, G), beta = rows(in.beta, 1), d_o = rows(in.d_o, V);
      double *state = &a.s[(s * H + h) * KV], *ds = &a.ds[(s * H + h) * KV];
      std::vector<double> begin(state, state + KV), o(T * V), dq(T * K), dk(T * K), dv(T * V), dg(T * G), dbeta(T);
      double scale = in.shape().scale;
      ref::delta_rule(in.gate, q.data(), k.data(), v.data(), g.data(), beta.data(), state, o.data(), T, K, V, scale);
      back(o, a.o, V);
      if (!gradients) continue;
      ref::delta_rule_backward(in.gate, q.data(), k.data(), v.data(), g.data(), beta.data(), begin.data(), d_o.data(), ds, dq.data(), dk.data(),
                               dv.data(), dg.data(), dbeta.data(), T, K, V, scale);
      back(dq, a.dq, K), back(dk, a.dk, K), back(dv, a.dv, V), back(dg, a.dg, G), back(dbeta, a.dbeta, 1);
    }
  return a;
}

inline void expect_delta(const DeltaVars& x, const DeltaAnswer& want, double forward, double backward, const std::string& where) {
  expect_near(x.o.value(), want.o, forward, where + " o");
  expect_near(x.q.grad(), want.dq, backward, where + " dq");
  expect_near(x.k.grad(), want.dk, backward, where + " dk");
  expect_near(x.v.grad(), want.dv, backward, where + " dv");
  expect_near(x.beta.grad(), want.dbeta, backward, where + " dbeta");
  if (!x.g.empty()) expect_near(x.g.grad(), want.dg, backward, where + " dg");
}

}  // namespace k3::testing

#pragma once
// What tests of KDA's bfloat16 kernels share: raw inputs as a layer has them, gates of every kind, the recurrence in double.
#include <algorithm>
#include <cmath>
#include <vector>

#include "k3/ops/delta_rule/delta_rule_cuda.h"
#include "k3/ops/kernel_testing.h"

namespace k3::testing {

constexpr int D = cuda::kDeltaHead;
constexpr double kScale = 0.08838834764831845;  // 128^-1/2

struct Gates {
  const char* name;
  bool bounded;
  double mean, deviation;  // of the raw gate
  int pattern = 0;         // 1: half of the channels saturated, half open   2: 20 tokens saturated, 20 open   3: aligned keys, beta near 1
  double limit = 5e-3;
};
inline const Gates kGates[] = {
    {"bounded, N(0,1)", true, 0, 1},
    {"bounded, slow", true, -4, 1},
    {"bounded, very slow", true, -8, 1},
    {"bounded, all at -5", true, 30, 0},
    {"bounded, channels mixed", true, 0, 1, 1},
    {"bounded, tokens mixed", true, 0, 1, 2},
    {"bounded, aligned keys, beta near 1", true, -5.3, 0.2, 3, 1.2e-2},
    {"softplus, N(0,1)", false, 0, 1},
    {"softplus, slow", false, -4, 1},
    {"softplus, about -8", false, 8, 0.5},
    {"softplus, about -60", false, 60, 2},
    {"softplus, channels mixed", false, 0, 1, 1},
    {"softplus, aligned keys, beta near 1", false, -4, 0.1, 3, 1.2e-2},
};

struct Problem {
  std::vector<int> begins;
  int heads;
  Gates gates;
  std::vector<float> q, k, v, x, b, A_log, dt_bias, state;  // (N, H, D); state (sequences, H, D, D)
  int64_t tokens() const { return begins.back(); }
  int sequences() const { return int(begins.size()) - 1; }
};

inline Problem make(const std::vector<int>& lengths, int heads, const Gates& g, uint64_t seed) {
  Random rng(seed);
  Problem p{{0}, heads, g};
  for (int n : lengths) p.begins.push_back(p.begins.back() + n);
  int64_t n = p.tokens() * heads * D;
  p.q = rng.normals(n), p.k = rng.normals(n), p.v = rng.normals(n), p.x = rng.normals(n, g.mean, g.deviation);
  p.b = rng.normals(p.tokens() * heads, 0, 1.5);
  p.A_log = rng.normals(heads, 0, 0.05), p.dt_bias = rng.normals(heads * D, 0, 0.1);
  p.state = rng.normals(int64_t(p.sequences()) * heads * D * D, 0, 0.3);
  for (int64_t t = 0; t < p.tokens(); ++t)
    for (int i = 0; i < heads * D; ++i) {
      float& x = p.x[t * heads * D + i];
      if (g.pattern == 1) x = i % 2 ? 25.f : -8.f;
      if (g.pattern == 2) x = t / 20 % 2 ? 25.f : -8.f;
      if (g.pattern == 3) p.k[t * heads * D + i] = p.k[i] + 1e-3f * float(rng.normal());
    }
  if (g.pattern == 3)
    for (float& b : p.b) b = float(3 + 4 * rng.uniform());
  for (std::vector<float>* v : {&p.q, &p.k, &p.v, &p.x, &p.b})
    for (float& x : *v) x = rounded(x);
  return p;
}

// Log decay of channel i of head h.
inline double log_decay(const Problem& p, int h, int i, double raw) {
  const double rate = std::exp(double(p.A_log[h])), z = raw + p.dt_bias[h * D + i];
  return p.gates.bounded ? -5 / (1 + std::exp(-rate * z)) : -rate * (z > 0 ? z + std::log1p(std::exp(-z)) : std::log1p(std::exp(z)));
}

// o (N, H, D) and the final states, in double.
inline void recurrence(const Problem& p, bool with_state, std::vector<double>& o, std::vector<double>& states) {
  const int H = p.heads;
  o.assign(p.tokens() * H * D, 0), states.assign(int64_t(p.sequences()) * H * D * D, 0);
  std::vector<double> S(D * D), q(D), k(D), a(D);
  for (int s = 0; s < p.sequences(); ++s)
    for (int h = 0; h < H; ++h) {
      const int64_t at = (int64_t(s) * H + h) * D * D;
      for (int i = 0; i < D * D; ++i) S[i] = with_state ? p.state[at + i] : 0.;
      for (int t = p.begins[s]; t < p.begins[s + 1]; ++t) {
        const int64_t r = (int64_t(t) * H + h) * D;
        double nq = 1e-6, nk = 1e-6;
        for (int i = 0; i < D; ++i) nq += double(p.q[r + i]) * p.q[r + i], nk += double(p.k[r + i]) * p.k[r + i];
        for (int i = 0; i < D; ++i)
          q[i] = p.q[r + i] / std::sqrt(nq), k[i] = p.k[r + i] / std::sqrt(nk), a[i] = std::exp(log_decay(p, h, i, p.x[r + i]));
        double beta = 1 / (1 + std::exp(-double(p.b[int64_t(t) * H + h])));
        double u[D] = {}, out[D] = {};
        for (int i = 0; i < D; ++i)
          for (int j = 0; j < D; ++j) u[j] += k[i] * (S[i * D + j] *= a[i]);
        for (int j = 0; j < D; ++j) u[j] = beta * (p.v[r + j] - u[j]);
        for (int i = 0; i < D; ++i)
          for (int j = 0; j < D; ++j) out[j] += q[i] * (S[i * D + j] += k[i] * u[j]);
        for (int j = 0; j < D; ++j) o[r + j] = kScale * out[j];
      }
      std::copy(S.begin(), S.end(), states.begin() + at);
    }
}

}  // namespace k3::testing

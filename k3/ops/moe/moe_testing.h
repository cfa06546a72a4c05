#pragma once
// What tests of routing and of experts share.
#include <numeric>
#include <vector>

#include "k3/ops/moe/moe.h"
#include "k3/ops/testing.h"

namespace k3::testing {

// The first k of a random order of the experts, a row each.
inline std::vector<int32_t> random_choice(int64_t rows, int64_t k, int64_t experts, uint64_t seed) {
  std::vector<int32_t> chosen;
  for (int64_t n = 0; n < rows; ++n) {
    std::vector<int32_t> order(experts);
    std::iota(order.begin(), order.end(), 0);
    for (int64_t i = 0; i < k; ++i) std::swap(order[i], order[i + int64_t(Rng{seed, 3}.below(uint64_t(experts - i), uint64_t(n * k + i)))]);
    chosen.insert(chosen.end(), order.begin(), order.begin() + k);
  }
  return chosen;
}

struct Router {
  Values x, gate, bias;
  int64_t rows, experts, d;
  Router(int64_t rows, int64_t experts, int64_t d, double bias_scale = 0.3, uint64_t seed = 1)
      : x(rows * d, seed),
        gate(experts * d, seed + 1, 1 / std::sqrt(double(d))),
        bias(experts, seed + 2, bias_scale),
        rows(rows),
        experts(experts),
        d(d) {}
  Routing run(Step& step, const RouteOptions& o, const Batch& batch, const Tensor* forced = nullptr) const {
    return route(step.input(x, {rows, d}), step.keep(step.param("gate", gate, {experts, d})), step.keep(step.param("bias", bias, {experts}, false)),
                 o, batch, forced);
  }
};

}  // namespace k3::testing

#include "k3/model/init.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "k3/core/file.h"
#include "k3/core/rng.h"
#include "k3/core/threads.h"

namespace k3 {

void initialize(Model& model, uint64_t seed) {
  const Config& c = model.config();
  for (Param& p : model.params().all()) {
    const Rng rng{seed, checksum(p.name.data(), p.name.size())};
    const std::string_view name = p.name;
    float* w = p.value.f32();
    const int64_t n = p.value.size();
    auto fill = [&](auto value) {
      parallel_blocks(n, 1 << 14, [&](int64_t a, int64_t b) {
        for (int64_t i = a; i < b; ++i) w[i] = float(value(uint64_t(i)));
      });
    };
    auto normal = [&](double std) { fill([&](uint64_t i) { return rng.normal(i) * std; }); };
    if (name.ends_with("embed_tokens.weight")) {
      normal(1.0);
    } else if (name == "lm_head.weight") {
      normal(1 / std::sqrt(double(c.hidden_size)));
    } else if (name.ends_with("conv1d.weight")) {
      double bound = 1 / std::sqrt(double(p.shape[p.shape.rank - 1]));
      fill([&](uint64_t i) { return (2 * rng.uniform(i) - 1) * bound; });
    } else if (name.ends_with("A_log")) {
      bool bounded = c.gate_lower_bound && model.params().find(p.name.substr(0, p.name.size() - 5) + "f_a_proj.weight");  // not a gdn layer
      if (bounded)
        fill([](uint64_t) { return 0.0; });
      else
        fill([&](uint64_t i) { return std::log(1 + 15 * rng.uniform(i)); });
    } else if (name.ends_with("dt_bias")) {
      fill([&](uint64_t i) {
        double dt = std::max(1e-4, std::exp(std::log(1e-3) + rng.uniform(i) * (std::log(1e-1) - std::log(1e-3))));
        return dt + std::log(-std::expm1(-dt));
      });
    } else if (name.ends_with("e_score_correction_bias") || name.ends_with("_res_proj.weight")) {
      fill([](uint64_t) { return 0.0; });
    } else if (p.role.kind == Role::Kind::vector) {
      fill([](uint64_t) { return 1.0; });
    } else {
      normal(c.initializer_range.value_or(c.hidden_size >= 2000 ? 0.02 : 1 / std::sqrt(double(p.shape[1]))));
    }
  }
}

}  // namespace k3

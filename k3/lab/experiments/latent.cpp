// A full-width MoE against its eff and acc latent forms with the same routed parameters.
#include <fmt/format.h>

#include "k3/lab/learn.h"

namespace k3::lab {

namespace {

Job job_of(const Setting& s, const std::string& arm) {
  Job job;
  job.model = {"mixers=kda,mla", "num_experts=16", "num_experts_per_token=2", "num_shared_experts=1", "moe_intermediate_size=48"};
  if (arm != "moe") { job.model.insert(job.model.end(), {"latent_moe_alpha=2", "latent_moe_variant=" + arm, "latent_moe_norm=up"}); }
  job.train = {"learning_rate=0.01"};
  job.task = {"language", 16}, job.sequences = 8, job.steps = s.pick(60, 350), job.looks = s.pick(4, 10);
  return job;
}
const char* const kArms[] = {"moe", "eff", "acc"};

std::vector<Unit> units(const Setting& s) {
  std::vector<Unit> out;
  for (const char* arm : kArms)
    for (int64_t seed = 1; seed <= s.seeds; ++seed) out.push_back(unit_of(s, arm, job_of(s, arm), seed));
  return out;
}

Findings conclude(const Setting& s, const Results& r) {
  Findings f;
  Chart c{Chart::curves, "Held-out loss", "step", "loss", {}, {}, false, false};
  Table t{"A layer and token",
          {"arm", "held-out loss", "experts, active", "routed parameters", "active routed FLOPs", "latent pair", "router", "dispatch + combine",
           "FLOPs of a step"},
          {}};
  std::vector<std::pair<std::string, double>> parameters, routed;
  std::map<std::string, double> loss;
  for (const char* arm : kArms) {
    const Job job = job_of(s, arm);
    const Config m = config_of(job);
    const Size size = size_of(job);
    const int64_t w = m.latent_size(), all = 3 * m.num_experts * w * m.moe_intermediate_size,
                  active = 6 * m.num_experts_per_token * w * m.moe_intermediate_size;
    const int64_t pair = m.routed_expert_hidden_size ? 2 * m.hidden_size * w : 0;
    parameters.emplace_back(arm, double(size.parameters)), routed.emplace_back(arm, double(all));
    c.series.push_back(curve(r, arm, s.seeds, "loss"));
    Spread l = spread(over_seeds(r, arm, s.seeds, final_loss));
    loss[arm] = l.mean;
    t.rows.push_back({arm, show(l), fmt::format("{}, {}", m.num_experts, m.num_experts_per_token), std::to_string(all), std::to_string(active),
                      std::to_string(pair), std::to_string(m.num_experts * m.hidden_size), std::to_string(2 * m.num_experts_per_token * w),
                      fmt::format("{:.3g}", size.flops)});
  }
  f.answer = fmt::format("Held-out loss: MoE {:.3f}, eff {:.3f} with half the routed FLOPs and half the traffic, acc {:.3f} with the same of both.",
                         loss["moe"], loss["eff"], loss["acc"]);
  f.notes = {held_equal("routed parameters", routed, 1e-9), held_equal("total parameters", parameters, 0.12),
             "What remains is the latent pair and the wider router, which come on top.",
             "The MoE, of which alpha is 2: " + size_line(job_of(s, "moe")),
             "The notes give K' = alpha K as if general; that is acc only. They describe K2 to K3 by it: N' would be 768, K3 has 896, and m went "
             "from 2048 to 3072."};
  f.tables = {t}, f.charts = {c};
  return f;
}

}  // namespace

const Experiment kLatent{"latent", "What does a latent space buy a mixture of experts, at equal routed parameters?", units, conclude};

}  // namespace k3::lab

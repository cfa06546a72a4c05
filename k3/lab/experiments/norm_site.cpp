// The norm in LatentMoE at none, down, up and both: loss, activation growth and the routed branch's share, at two scales of initialisation.
#include <fmt/format.h>

#include "k3/lab/learn.h"

namespace k3::lab {

namespace {

const char* const kSites[] = {"none", "down", "up", "both"};
constexpr double kScales[] = {1, 3};

std::string arm_of(const char* site, double scale) { return fmt::format("{} x{:.0f}", site, scale); }

Job job_of(const Setting& s, const std::string& site, double scale) {
  Job job;
  job.model = {"mixers=kda,mla",         "num_experts=16",           "num_experts_per_token=4",
               "num_shared_experts=1",   "moe_intermediate_size=48", "routed_expert_hidden_size=32",
               "latent_moe_norm=" + site};
  job.train = {"learning_rate=0.01"};
  job.task = {"language", 16}, job.sequences = 8, job.steps = s.pick(50, 200), job.looks = s.pick(4, 10), job.probe = true, job.init_scale = scale;
  return job;
}

std::vector<Unit> units(const Setting& s) {
  std::vector<Unit> out;
  for (const char* site : kSites)
    for (double scale : kScales)
      for (int64_t seed = 1; seed <= s.seeds; ++seed) out.push_back(unit_of(s, arm_of(site, scale), job_of(s, site, scale), seed));
  return out;
}

Findings conclude(const Setting& s, const Results& r) {
  Findings f;
  Table t{"At the end", {"norm", "initial scale", "held-out loss", "last hidden rms", "routed share"}, {}};
  std::map<std::string, Spread> loss;
  for (double scale : kScales) {
    Chart c{Chart::curves, fmt::format("Held-out loss, initial matrices x{:.0f}", scale), "step", "loss", {}, {}, false, false};
    for (const char* site : kSites) {
      const std::string arm = arm_of(site, scale);
      c.series.push_back(curve(r, arm, s.seeds, "loss"));
      loss[arm] = spread(over_seeds(r, arm, s.seeds, final_loss));
      Spread hidden = spread(over_seeds(r, arm, s.seeds, [](const json& j) { return j["probe"]["hidden_rms"].back().get<double>(); }));
      Spread share = spread(over_seeds(r, arm, s.seeds, [](const json& j) { return j["probe"]["routed_share"].back().get<double>(); }));
      t.rows.push_back({site, fmt::format("{:.0f}", scale), show(loss[arm]), show(hidden, 2), show(share, 2)});
    }
    f.charts.push_back(c);
  }
  f.answer = fmt::format(
      "Held-out loss none {:.3f}, down {:.3f}, up {:.3f}, both {:.3f}; with initial matrices three times as large {:.3f}, {:.3f}, {:.3f}, {:.3f}.",
      loss["none x1"].mean, loss["down x1"].mean, loss["up x1"].mean, loss["both x1"].mean, loss["none x3"].mean, loss["down x3"].mean,
      loss["up x3"].mean, loss["both x3"].mean);
  f.notes = {"Each model, latent width 32, 16 experts of which 4: " + size_line(job_of(s, "up", 1)),
             "The notes say that the norm puts latents on a sphere before Top-K; the router reads the full-width x, and K3's norm comes after the "
             "experts (report, section 2.3)."};
  f.tables = {t};
  return f;
}

}  // namespace

const Experiment kNormSite{"norm-site", "Where should LatentMoE norm: nowhere, after the down-projection, before the up-projection, or both?", units,
                           conclude};

}  // namespace k3::lab

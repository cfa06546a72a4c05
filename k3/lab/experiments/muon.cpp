// AdamW, Muon on whole matrices, Muon on each head: the size of the update over heads when the gradients of heads differ, and the loss.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "k3/core/rng.h"
#include "k3/lab/learn.h"
#include "k3/ops/update/update.h"

namespace k3::lab {

namespace {

constexpr int64_t kHeads = 8, kRows = 32, kColumns = 128;
constexpr double kFactors[] = {1, 2, 4, 8, 16, 32};
const char* const kOptimizers[] = {"adamw", "muon", "muon_per_head"};

// Largest over smallest update of a head, the heads' gradients standing in geometric steps from 1 to `factor`.
double update_spread(const std::string& optimizer, double factor, uint64_t seed) {
  Arena arena(size_t(64) << 20);
  Context c{.arena = &arena};
  const Shape shape{kHeads * kRows, kColumns};
  Tensor w = arena.lend_zeroed(DType::f32, shape), g = arena.lend(DType::f32, shape), m = arena.lend_zeroed(DType::f32, shape),
         v = arena.lend_zeroed(DType::f32, shape);
  for (int64_t i = 0; i < g.size(); ++i)
    g.f32()[i] = float(Rng{seed, 1}.normal(uint64_t(i)) * std::pow(factor, double(i / (kRows * kColumns)) / double(kHeads - 1)));
  if (optimizer == "adamw")
    adamw_step(c, w, g, m, v, {.lr = 1, .weight_decay = 0});
  else
    muon_step(c, {{w, g, m, optimizer == "muon" ? 1 : kHeads}}, {.lr = 1, .weight_decay = 0});
  double low = 1e300, high = 0;
  for (int64_t h = 0; h < kHeads; ++h) {
    double sum = 0;
    for (int64_t i = h * kRows * kColumns; i < (h + 1) * kRows * kColumns; ++i) sum += double(w.f32()[i]) * w.f32()[i];
    low = std::min(low, std::sqrt(sum)), high = std::max(high, std::sqrt(sum));
  }
  return high / low;
}

Job job_of(const Setting& s, const std::string& optimizer) {
  Job job;
  job.model = {"mixers=kda,mla", "num_attention_heads=4", "num_heads=4", "head_dim=16", "v_head_dim=16", "qk_nope_head_dim=16"};
  job.train = {"optimizer=" + optimizer, optimizer == "adamw" ? "learning_rate=0.005" : "learning_rate=0.01"};
  job.task = {"language", 16}, job.sequences = 8, job.steps = s.pick(60, 350), job.looks = s.pick(4, 10);
  return job;
}

std::vector<Unit> units(const Setting& s) {
  std::vector<Unit> out;
  for (int64_t seed = 1; seed <= s.seeds; ++seed) {
    out.push_back(
        {fmt::format("spread-{}", seed), 1, {{"heads", kHeads}, {"geometric", 1}, {"rows", kRows}, {"columns", kColumns}}, [seed](const Tick&) {
           json j;
           for (const char* o : kOptimizers)
             for (double f : kFactors) j[o].push_back(update_spread(o, f, uint64_t(seed)));
           return j;
         }});
    for (const char* o : kOptimizers) out.push_back(unit_of(s, o, job_of(s, o), seed));
  }
  return out;
}

Findings conclude(const Setting& s, const Results& r) {
  Findings f;
  Chart spreads{Chart::curves, "Largest over smallest update of a head, against that of the gradients", "factor", "largest / smallest", {}, {}, true,
                false};
  Chart loss{Chart::curves, "Held-out loss", "step", "loss", {}, {}, false, false};
  Table t{"Optimizers", {"optimizer", "spread at factor 1", "at 8", "at 32", "held-out loss"}, {}};
  std::map<std::string, double> at8, end;
  for (const char* o : kOptimizers) {
    Series line{o, {}, {}, {}, {}};
    for (size_t i = 0; i < std::size(kFactors); ++i) {
      Spread v = spread(over_seeds(r, "spread", s.seeds, [&](const json& j) { return j[o][i].get<double>(); }));
      line.x.push_back(kFactors[i]), line.y.push_back(v.mean), line.low.push_back(v.low), line.high.push_back(v.high);
    }
    Spread l = spread(over_seeds(r, o, s.seeds, final_loss));
    at8[o] = line.y[3], end[o] = l.mean;
    t.rows.push_back({o, fmt::format("{:.2f}", line.y[0]), fmt::format("{:.2f}", line.y[3]), fmt::format("{:.2f}", line.y[5]), show(l)});
    spreads.series.push_back(line), loss.series.push_back(curve(r, o, s.seeds, "loss"));
  }
  f.answer = fmt::format(
      "With gradients of heads that differ up to eightfold, their updates differ {:.2f}-fold under whole-matrix Muon and {:.2f}-fold under per-head "
      "Muon; held-out loss {:.3f} (AdamW), {:.3f} (whole), {:.3f} (per head).",
      at8["muon"], at8["muon_per_head"], end["adamw"], end["muon"], end["muon_per_head"]);
  f.notes = {fmt::format("Spread: {} heads of {} x {}, Gaussian gradients in geometric steps from 1 to the factor, one step. AdamW's first step is "
                         "the gradient's sign, so it is even by construction.",
                         kHeads, kRows, kColumns),
             "Loss: " + size_line(job_of(s, "muon_per_head")) + " AdamW at 0.005; neither rate was tuned further.",
             "The notes take all attention weights by heads; the report names the Q, K and V projections only."};
  f.tables = {t}, f.charts = {spreads, loss};
  return f;
}

}  // namespace

const Experiment kMuon{"muon", "Does orthogonalising each head by itself even out the heads' updates, and what does it do to the loss?", units,
                       conclude};

}  // namespace k3::lab

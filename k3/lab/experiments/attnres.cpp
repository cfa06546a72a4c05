// Plain residuals against attention over depth, full and in blocks.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "k3/lab/learn.h"

namespace k3::lab {

namespace {

const std::vector<std::pair<std::string, std::string>> kArms = {{"plain", "residual=plain"},
                                                                {"full", "attn_res_block_size=1"},
                                                                {"blocks of 2", "attn_res_block_size=2"},
                                                                {"blocks of 4", "attn_res_block_size=4"}};

Job job_of(const Setting& s, const std::string& set) {
  Job job;
  job.model = {set, "num_hidden_layers=8", "mixers=kda,kda,kda,mla", "intermediate_size=128"};
  job.train = {"learning_rate=0.01"};
  job.task = {"language", 16}, job.steps = s.pick(40, 200), job.looks = s.pick(4, 10), job.sequences = 8, job.probe = true;
  return job;
}

std::vector<Unit> units(const Setting& s) {
  std::vector<Unit> out;
  for (const auto& [name, set] : kArms)
    for (int64_t seed = 1; seed <= s.seeds; ++seed) out.push_back(unit_of(s, name, job_of(s, set), seed));
  return out;
}

Findings conclude(const Setting& s, const Results& r) {
  Findings f;
  Chart loss{Chart::curves, "Held-out loss", "step", "loss", {}, {}, false, false};
  Chart hidden{Chart::curves, "Magnitude of what the depth carries (the running sum), after training", "layer", "rms", {}, {}, false, false};
  Chart gradient{Chart::curves, "Gradient norm of each layer's matrices, after training", "layer", "norm", {}, {}, false, false};
  Table t{"At the end", {"residual", "held-out loss", "hidden rms, first to last layer", "gradient, largest over smallest layer"}, {}};
  std::vector<std::pair<std::string, double>> parameters;
  std::vector<Chart> heat;
  std::map<std::string, double> end, grow;
  for (const auto& [name, set] : kArms) {
    loss.series.push_back(curve(r, name, s.seeds, "loss"));
    auto over_depth = [&, arm = name](const char* key) {
      Series line{arm, {}, {}, {}, {}};
      for (size_t l = 0; l < 8; ++l) {
        Spread v = spread(over_seeds(r, arm, s.seeds, [&](const json& j) { return j["probe"][key][l].get<double>(); }));
        line.x.push_back(double(l + 1)), line.y.push_back(v.mean), line.low.push_back(v.low), line.high.push_back(v.high);
      }
      return line;
    };
    hidden.series.push_back(over_depth("hidden_rms")), gradient.series.push_back(over_depth("gradient"));
    const auto &h = hidden.series.back().y, &g = gradient.series.back().y;
    Spread l = spread(over_seeds(r, name, s.seeds, final_loss));
    end[name] = l.mean, grow[name] = h.back() / h.front();
    t.rows.push_back({name, show(l), fmt::format("{:.2f} to {:.2f}", h.front(), h.back()),
                      fmt::format("{:.2f}", *std::max_element(g.begin(), g.end()) / *std::min_element(g.begin(), g.end()))});
    if (r.at(name + "-1")["probe"].contains("depth_weights")) {
      Chart c{Chart::heat, fmt::format("{}: weight of each source, mean over tokens and seeds", name), "source", "reader", {}, {}, false, false};
      const json& first = r.at(name + "-1")["probe"]["depth_weights"];
      for (size_t i = 0; i < first.size(); ++i) {
        Series row{i + 1 == first.size() ? "output" : fmt::format("{} {}", i / 2 + 1, i % 2 ? "ffn" : "mixer"), {}, {}, {}, {}};
        for (size_t j = 0; j < first[i].size(); ++j)
          row.y.push_back(spread(over_seeds(r, name, s.seeds, [&](const json& x) { return x["probe"]["depth_weights"][i][j].get<double>(); })).mean);
        // The running sum stands last, whatever the number of finished blocks.
        row.y.insert(row.y.end() - 1, first.back().size() - row.y.size(), NAN);
        c.series.push_back(row);
      }
      for (size_t j = 0; j < first.back().size(); ++j)
        c.names.push_back(j + 1 == first.back().size() ? "running sum" : j == 0 ? "embedding" : fmt::format("block {}", j));
      heat.push_back(c);
    }
    parameters.emplace_back(name, r.at(name + "-1")["parameters"].get<double>());
  }
  f.answer = fmt::format(
      "Held-out loss plain {:.3f}, full {:.3f}, blocks of two {:.3f}, of four {:.3f}; the running sum grows {:.1f}-fold over the depth with plain "
      "residuals and {:.1f}-fold in "
      "blocks of two.",
      end["plain"], end["full"], end["blocks of 2"], end["blocks of 4"], grow["plain"], grow["blocks of 2"]);
  f.notes = {held_equal("parameters", parameters, 0.02), "Each model, 3 KDA : 1 MLA: " + size_line(job_of(s, "residual=plain")),
             "Published at 194M to 528M active, 39B to 119B tokens: plain 1.931 to 1.719, block 1.909 to 1.693, full 1.899 to 1.692.",
             "The notes leave attention over depth as a to-do; the report has it in section 2.2."};
  f.tables = {t}, f.charts = {loss, hidden, gradient};
  f.charts.insert(f.charts.end(), heat.begin(), heat.end());
  return f;
}

}  // namespace

const Experiment kAttnRes{"attnres", "What does attention over depth change: loss, magnitude and gradient over the layers?", units, conclude};

}  // namespace k3::lab

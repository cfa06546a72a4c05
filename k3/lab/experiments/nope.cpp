// The hybrid without position encoding against attention alone without it, on recall and beyond the trained length.
#include <fmt/format.h>

#include "k3/lab/learn.h"

namespace k3::lab {

namespace {

const std::vector<std::pair<std::string, std::vector<std::string>>> kArms = {
    {"hybrid", {"mixers=kda,kda,kda,mla"}},
    {"all mla", {"mixers=mla"}},
    {"all mla, RoPE", {"mixers=mla", "mla_use_nope=false", "qk_rope_head_dim=8"}},
    {"all kda", {"mixers=kda"}}};
const char* const kTasks[] = {"palindrome", "stack"};
constexpr int64_t kLength = 32;

Job job_of(const Setting& s, const std::string& task, const std::vector<std::string>& set) {
  Job job;
  job.model = set;
  job.model.push_back("num_hidden_layers=4");
  job.train = {"learning_rate=0.005", "optimizer=adamw", "weight_decay=0"};
  job.task = {task, 16}, job.length = kLength, job.sequences = 8, job.steps = s.pick(80, 400), job.looks = s.pick(4, 10);
  job.lengths = {kLength, 2 * kLength, 4 * kLength};
  return job;
}

std::vector<Unit> units(const Setting& s) {
  std::vector<Unit> out;
  for (const char* task : kTasks)
    for (const auto& [name, set] : kArms)
      for (int64_t seed = 1; seed <= s.seeds; ++seed) out.push_back(unit_of(s, fmt::format("{} {}", task, name), job_of(s, task, set), seed));
  return out;
}

Findings conclude(const Setting& s, const Results& r) {
  Findings f;
  Table t{"Accuracy at the scored tokens", {"task", "arm", "trained length", "twice", "four times"}, {}};
  std::map<std::string, double> at;
  for (const char* task : kTasks) {
    Chart c{Chart::curves, fmt::format("{}: accuracy over steps at length {}", task, kLength), "step", "accuracy", {}, {}, false, false};
    for (const auto& [name, set] : kArms) {
      const std::string arm = fmt::format("{} {}", task, name);
      c.series.push_back(curve(r, arm, s.seeds, "accuracy"));
      std::vector<std::string> row = {task, name};
      for (int64_t times : {1, 2, 4}) {
        Spread a = spread(
            over_seeds(r, arm, s.seeds, [&](const json& j) { return j["at_length"][std::to_string(times * kLength)]["accuracy"].get<double>(); }));
        row.push_back(show(a, 2));
        at[fmt::format("{} {} {}", task, name, times)] = a.mean;
      }
      t.rows.push_back(row);
    }
    f.charts.push_back(c);
  }
  f.answer = "Stack at the trained length, at twice and at four times it:";
  for (const auto& [name, set] : kArms)
    f.answer += fmt::format(" {} {:.2f}, {:.2f}, {:.2f};", name, at["stack " + name + " 1"], at["stack " + name + " 2"], at["stack " + name + " 4"]);
  f.answer.back() = '.';
  f.notes = {"The hybrid: " + size_line(job_of(s, "stack", kArms[0].second)) +
                 " Only the RoPE arm rotates queries and keys (their last eight channels, theta 10000).",
             "The notes derive NoPE from a DeltaNet transform of queries and keys; K3 has none, position comes from the KDA layers, and the identity "
             "needs reflections (see identity)."};
  f.tables = {t};
  return f;
}

}  // namespace

const Experiment kNope{"nope", "Do KDA layers take the place of position encoding?", units, conclude};

}  // namespace k3::lab

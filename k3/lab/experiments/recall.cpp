// Palindrome, MQAR and Stack: two layers, each mixer at equal width, accuracy at the scored tokens (training.md 11.4).
#include <fmt/format.h>

#include "k3/lab/learn.h"

namespace k3::lab {

namespace {

const std::vector<std::pair<std::string, std::string>> kMixers = {{"kda", "mixers=kda"},
                                                                  {"gdn", "mixers=gdn"},
                                                                  {"deltanet", "mixers=deltanet"},
                                                                  {"mla", "mixers=mla"},
                                                                  {"3 kda : 1 mla", "mixers=kda,kda,kda,mla"}};
const char* const kTasks[] = {"palindrome", "mqar", "stack"};

std::vector<int64_t> lengths(const Setting& s) { return s.quick ? std::vector<int64_t>{32} : std::vector<int64_t>{32, 64}; }

Job job_of(const Setting& s, const std::string& task, int64_t length, const std::string& mixers) {
  Job job;
  job.model = {mixers};
  if (mixers == kMixers.back().second) job.model.push_back("num_hidden_layers=4");
  job.train = {"learning_rate=0.005", "optimizer=adamw", "weight_decay=0"};
  job.task = {task, task == "mqar" ? 64 : 16}, job.length = length, job.sequences = 8, job.steps = s.pick(120, 600), job.looks = s.pick(4, 12);
  return job;
}

std::vector<Unit> units(const Setting& s) {
  std::vector<Unit> out;
  for (const char* task : kTasks)
    for (int64_t length : lengths(s))
      for (const auto& [name, set] : kMixers)
        for (int64_t seed = 1; seed <= s.seeds; ++seed)
          out.push_back(unit_of(s, fmt::format("{} {} {}", task, length, name), job_of(s, task, length, set), seed));
  return out;
}

Findings conclude(const Setting& s, const Results& r) {
  Findings f;
  Table t{"Accuracy at the scored tokens, mean over seeds (range)", {"task", "length"}, {}};
  for (const auto& [name, set] : kMixers) t.columns.push_back(name);
  std::map<std::string, double> last;
  for (const char* task : kTasks)
    for (int64_t length : lengths(s)) {
      Chart c{Chart::curves, fmt::format("{}, length {}", task, length), "step", "accuracy", {}, {}, false, false};
      std::vector<std::string> row = {task, std::to_string(length)};
      for (const auto& [name, set] : kMixers) {
        const std::string arm = fmt::format("{} {} {}", task, length, name);
        c.series.push_back(curve(r, arm, s.seeds, "accuracy"));
        c.series.back().name = name;
        Spread a = spread(over_seeds(r, arm, s.seeds, [](const json& j) { return j["accuracy"].back().get<double>(); }));
        row.push_back(show(a, 2));
        last[name] += a.mean / double(std::size(kTasks) * lengths(s).size());
      }
      t.rows.push_back(row), f.charts.push_back(c);
    }
  f.answer = "Mean accuracy over tasks and lengths:";
  for (const auto& [name, set] : kMixers) f.answer += fmt::format(" {} {:.2f},", name, last[name]);
  f.answer.back() = '.';
  f.notes = {"KDA on Palindrome: " + size_line(job_of(s, "palindrome", lengths(s).back(), "mixers=kda")) +
                 " The hybrid has four layers, so that one is MLA, and about twice the parameters. MQAR has 32 keys and 32 values; Stack 8 stacks.",
             "Published (width and batch not given; heads of 128, up to 20,000 steps, lengths 256 / 512 / 1024 / 2048): Palindrome KDA "
             "100/100/100/42, GDN 100/100/97/37; MQAR KDA 100/100/100/48, "
             "GDN 100/100/79/29; Stack 100 for both. The setting here is smaller: compare the order, not the numbers."};
  f.tables = {t};
  return f;
}

}  // namespace

const Experiment kRecall{"recall", "Which mixer learns to recall: Palindrome, MQAR and Stack?", units, conclude};

}  // namespace k3::lab

// Load of the experts over steps, for each rule, on simulated skewed routers (the very histogram and rules of training) and in real training.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "k3/core/rng.h"
#include "k3/core/threads.h"
#include "k3/lab/learn.h"
#include "k3/ops/moe/balance.h"

namespace k3::lab {

namespace {

struct Rule {
  const char* name;
  double sign = 0;
  int64_t bins = 0;  // -1: exact
  double ema = 0;
};
constexpr Rule kRules[] = {{"none"},
                           {"sign 0.0001", 1e-4},
                           {"sign 0.001", 1e-3},
                           {"sign 0.01", 1e-2},
                           {"quantile exact", 0, -1},
                           {"histogram 100", 0, 100},
                           {"histogram 1000", 0, 1000},
                           {"histogram 10000", 0, 10000},
                           {"histogram 1000, EMA 0.8", 0, 1000, 0.8}};

// Scores sigmoid(a_j + z_ij): experts that are liked by all tokens (a) and tokens that differ (z), anew in each step.
struct Simulated {
  int64_t experts, top_k, tokens;
  std::vector<float> scores;

  void draw(uint64_t seed, uint64_t step) {
    scores.resize(size_t(tokens * experts));
    parallel_for(tokens, [&](int64_t i) {
      const Rng z{seed, 1000 + step}, a{seed, 1};
      for (int64_t j = 0; j < experts; ++j) {
        double x = 0.7 * a.normal(uint64_t(j)) + z.normal(uint64_t(i * experts + j));
        scores[size_t(i * experts + j)] = float(1 / (1 + std::exp(-x)));
      }
    });
  }
  // Loads and cutoffs under a bias.
  void route(const std::vector<float>& bias, std::vector<int64_t>& load, std::vector<float>& cutoff) const {
    load.assign(size_t(experts), 0), cutoff.resize(size_t(tokens));
    std::vector<std::vector<int32_t>> chosen(static_cast<size_t>(tokens));
    parallel_for(tokens, [&](int64_t i) {
      std::vector<std::pair<float, int32_t>> s;
      for (int64_t j = 0; j < experts; ++j) s.emplace_back(-(scores[size_t(i * experts + j)] + bias[size_t(j)]), int32_t(j));
      std::nth_element(s.begin(), s.begin() + top_k, s.end());  // pairs: ties go to the lower index
      cutoff[size_t(i)] = -s[size_t(top_k)].first;
      for (int64_t n = 0; n < top_k; ++n) chosen[size_t(i)].push_back(s[size_t(n)].second);
    });
    for (const auto& c : chosen)
      for (int32_t e : c) ++load[size_t(e)];
  }
};

double max_over_mean(const std::vector<int64_t>& load) {
  int64_t total = 0;
  for (int64_t n : load) total += n;
  return double(*std::max_element(load.begin(), load.end())) * double(load.size()) / double(total);
}

json simulate(Simulated s, int64_t steps, uint64_t seed, const Tick& tick) {
  constexpr size_t kCount = std::size(kRules);
  std::vector<std::vector<float>> bias(kCount, std::vector<float>(size_t(s.experts), 0.0f));
  json out;
  std::vector<int64_t> load;
  std::vector<float> cutoff;
  for (int64_t t = 0; t < steps; ++t) {
    s.draw(seed, uint64_t(t));
    for (size_t r = 0; r < kCount; ++r) {
      const Rule& rule = kRules[r];
      std::vector<float>& b = bias[r];
      s.route(b, load, cutoff);
      out[rule.name].push_back(max_over_mean(load));
      std::vector<float> next;
      if (rule.sign > 0) next = sign_bias(b, load, float(rule.sign));
      if (rule.bins == -1) {
        std::vector<float> margins(s.scores.size());
        for (size_t i = 0; i < margins.size(); ++i) margins[i] = cutoff[i / size_t(s.experts)] - s.scores[i];
        next = quantile_bias_exact(margins, s.experts, s.top_k);
      } else if (rule.bins > 0) {
        MarginHistogram h(Tensor(b.data(), DType::f32, {s.experts}), rule.bins);
        Routing routing;
        routing.scores = Tensor(s.scores.data(), DType::f32, {s.tokens, s.experts});
        routing.cutoff = Tensor(cutoff.data(), DType::f32, {s.tokens});
        observe(h, routing, Batch::one(s.tokens));
        next = quantile_bias(h, s.top_k);
      }
      for (size_t j = 0; j < next.size(); ++j) b[j] = float(rule.ema) * b[j] + float(1 - rule.ema) * next[j];
      tick((double(t) + double(r + 1) / double(kCount)) / double(steps));
    }
  }
  return out;
}

constexpr struct { int64_t experts, top_k; } kSizes[] = {{64, 6}, {384, 8}, {896, 16}};

const std::vector<std::pair<std::string, std::string>> kTrained = {
    {"none", "balance=none"}, {"sign 0.001", "balance=sign"}, {"histogram 1000", "balance=quantile"}, {"quantile exact", "balance=quantile_exact"}};

Job job_of(const Setting& s, const std::string& balance) {
  Job job;
  job.model = {"num_experts=32",       "num_experts_per_token=4",      "moe_intermediate_size=32",
               "num_shared_experts=1", "routed_expert_hidden_size=32", "latent_moe_use_norm=true"};
  job.train = {balance, "learning_rate=0.01"};
  job.task = {"language", 16}, job.steps = s.pick(40, 200), job.looks = 4, job.sequences = 8;
  return job;
}

std::vector<Unit> units(const Setting& s) {
  std::vector<Unit> out;
  for (auto size : kSizes)
    for (int64_t seed = 1; seed <= s.seeds; ++seed) {
      const int64_t share = s.pick(48, 96), steps = s.pick(8, 24);  // tokens an expert should get
      const Simulated sim{size.experts, size.top_k, share * size.experts / size.top_k, {}};
      out.push_back({fmt::format("simulated-{}-{}", size.experts, seed),
                     double(sim.tokens * size.experts * steps) * 2.5e-7,
                     {{"experts", size.experts}, {"top_k", size.top_k}, {"tokens", sim.tokens}, {"steps", steps}, {"rules", 1}},
                     [=](const Tick& tick) { return simulate(sim, steps, uint64_t(seed), tick); }});
    }
  for (const auto& [name, set] : kTrained)
    for (int64_t seed = 1; seed <= s.seeds; ++seed) out.push_back(unit_of(s, "trained " + name, job_of(s, set), seed));
  return out;
}

Findings conclude(const Setting& s, const Results& r) {
  Findings f;
  Table t{"Load, max over mean (MaxVio is this minus 1)", {"experts", "rule", "step 1", "step 2", "step 3", "last"}, {}};
  std::map<std::string, double> last;
  for (auto size : kSizes) {
    Chart c{Chart::curves,
            fmt::format("{} experts, {} chosen, simulated: load over steps", size.experts, size.top_k),
            "step",
            "max / mean",
            {},
            {},
            false,
            true};
    for (const Rule& rule : kRules) {
      Series line{rule.name, {}, {}, {}, {}};
      const size_t steps = r.at(fmt::format("simulated-{}-1", size.experts))[rule.name].size();
      for (size_t i = 0; i < steps; ++i) {
        Spread sp =
            spread(over_seeds(r, fmt::format("simulated-{}", size.experts), s.seeds, [&](const json& j) { return j[rule.name][i].get<double>(); }));
        line.x.push_back(double(i + 1)), line.y.push_back(sp.mean), line.low.push_back(sp.low), line.high.push_back(sp.high);
      }
      last[fmt::format("{} {}", size.experts, rule.name)] = line.y.back();
      t.rows.push_back({std::to_string(size.experts), rule.name, fmt::format("{:.2f}", line.y[0]), fmt::format("{:.2f}", line.y[1]),
                        fmt::format("{:.2f}", line.y[2]), fmt::format("{:.2f}", line.y.back())});
      c.series.push_back(line);
    }
    f.charts.push_back(c);
  }
  Chart c{Chart::curves, "Real training, 32 experts, 4 chosen: load of the fuller layer", "step", "max / mean", {}, {}, false, false};
  Table trained{"Real training", {"rule", "load, mean of the last quarter", "held-out loss"}, {}};
  for (const auto& [name, set] : kTrained) {
    Series line = curve(r, "trained " + name, s.seeds, "load");
    c.series.push_back(line);
    double tail = 0;
    const size_t n = line.y.size(), q = std::max<size_t>(1, n / 4);
    for (size_t i = n - q; i < n; ++i) tail += line.y[i] / double(q);
    trained.rows.push_back({name, fmt::format("{:.2f}", tail), show(spread(over_seeds(r, "trained " + name, s.seeds, final_loss)))});
  }
  f.charts.push_back(c);
  f.tables = {t, trained};
  const std::string big = "896 ";
  f.answer = fmt::format(
      "At 896 experts the fullest expert ends at {:.2f} times the mean with the exact quantile, {:.2f} with a histogram of 1000 bins ({:.2f} with "
      "100, {:.2f} with "
      "10000), {:.2f} with the sign rule at 0.001 and {:.2f} without a rule; the quantile is there after one update.",
      last[big + "quantile exact"], last[big + "histogram 1000"], last[big + "histogram 100"], last[big + "histogram 10000"],
      last[big + "sign 0.001"], last[big + "none"]);
  const double share = s.pick(48.0, 96.0);
  f.notes = {fmt::format("Simulated scores sigmoid(0.7 a_j + z_ij), fresh tokens each step, {:.0f} tokens an expert: what even a perfect bias leaves "
                         "by chance is about sqrt(2 ln E / q) = {:.2f} "
                         "above 1 at 896.",
                         share, std::sqrt(2 * std::log(896.0) / share)),
             "Real training: " + size_line(job_of(s, "balance=quantile")),
             "The notes want one global quantile of scores in [0,1]; it is one quantile an expert, of margins on [min b - 1, max b + 1] (report, "
             "section 2.3.3).",
             "The notes reduce one vector of B bins; it is E x B integers a layer: 896 x 1000.",
             "The notes say no hyper-parameter; none like a learning rate, but the bins and the optional EMA remain."};
  return f;
}

}  // namespace

const Experiment kBalance{"balance", "How fast and how evenly does each balancing rule load the experts?", units, conclude};

}  // namespace k3::lab

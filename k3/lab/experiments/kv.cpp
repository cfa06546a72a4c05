// One cache size, several ways to spend it: K3's sizes by the closed forms, and small models of an eighth of that cache in training.
#include <fmt/format.h>

#include "k3/lab/learn.h"
#include "k3/plan/closed_forms.h"

namespace k3::lab {

namespace {

struct Way {
  std::string name, mixer;
  std::vector<std::string> full, small;  // at K3's width; at an eighth of the cache
};
const std::vector<Way>& ways() {
  static const std::vector<Way> all = {
      {"MLA 512/64", "mla", {}, {"kv_lora_rank=64", "qk_rope_head_dim=8", "qk_nope_head_dim=16"}},
      {"MLA 576/0",
       "mla",
       {"kv_lora_rank=576", "qk_rope_head_dim=0", "qk_nope_head_dim=192"},
       {"kv_lora_rank=72", "qk_rope_head_dim=0", "qk_nope_head_dim=24"}},
      {"MLA 448/128",
       "mla",
       {"kv_lora_rank=448", "qk_rope_head_dim=128", "qk_nope_head_dim=64"},
       {"kv_lora_rank=56", "qk_rope_head_dim=16", "qk_nope_head_dim=8"}},
      {"GQA 2 x 144", "gqa", {"num_key_value_heads=2", "attention_head_dim=144"}, {"num_key_value_heads=2", "attention_head_dim=18"}},
      {"MFA 288 + 288", "mfa", {"attention_head_dim=288"}, {"attention_head_dim=36", "q_lora_rank=48"}},
      {"MQA shared 576", "mqa", {"attention_head_dim=576"}, {"attention_head_dim=72"}},
  };
  return all;
}

Job job_of(const Setting& s, const Way& w) {
  Job job;
  job.model = {"mixers=kda," + w.mixer, "num_attention_heads=4", "num_heads=4", "head_dim=16", "v_head_dim=16"};
  job.model.insert(job.model.end(), w.small.begin(), w.small.end());
  job.train = {"learning_rate=0.01"};
  job.task = {"language", 16}, job.steps = s.pick(50, 250), job.looks = s.pick(4, 10), job.sequences = 8;
  return job;
}

std::string arm_of(const Way& w) {
  std::string n = w.name;
  for (char& c : n)
    if (c == '/') c = '-';
  return n;
}

std::vector<Unit> units(const Setting& s) {
  std::vector<Unit> out;
  for (const Way& w : ways())
    for (int64_t seed = 1; seed <= s.seeds; ++seed) out.push_back(unit_of(s, arm_of(w), job_of(s, w), seed));
  return out;
}

Findings conclude(const Setting& s, const Results& r) {
  Findings f;
  const plan::Architecture k3 = plan::load_architecture("k3");
  Table t{"A layer at K3's width and 96 heads, by the closed forms",
          {"way", "cache a token", "weights", "prefill FLOPs a pair", "decode FLOPs a pair", "held-out loss of the small one"},
          {}};
  Chart loss{Chart::curves, "Held-out loss of the small models", "step", "loss", {}, {}, false, false};
  Chart cost{Chart::bars, "FLOPs of one query-key pair, all heads", "", "FLOPs", {{"prefill", {}, {}, {}, {}}, {"decode", {}, {}, {}, {}}}, {}, false,
             false};
  std::vector<std::pair<std::string, double>> cache, small_cache;
  std::string best, worst;
  double low = 1e300, high = 0;
  for (const Way& w : ways()) {
    Config c = k3.config;
    for (const std::string& set : w.full) c.set(set);
    c.mixers = {w.mixer}, c.kda_layers.clear(), c.full_attn_layers.clear();
    c.finish();
    const plan::MixerForm form = plan::mixer_form(c, w.mixer);
    Spread l = spread(over_seeds(r, arm_of(w), s.seeds, final_loss));
    cache.emplace_back(w.name, double(form.cached));
    small_cache.emplace_back(w.name, double(plan::mixer_form(config_of(job_of(s, w)), w.mixer).cached));
    t.rows.push_back({w.name, std::to_string(form.cached), fmt::format("{:.1f} M", double(form.matrices) / 1e6),
                      fmt::format("{:.0f}", form.pair_prefill), fmt::format("{:.0f}", form.pair_decode), show(l)});
    cost.names.push_back(w.name), cost.series[0].y.push_back(form.pair_prefill), cost.series[1].y.push_back(form.pair_decode);
    loss.series.push_back(curve(r, arm_of(w), s.seeds, "loss"));
    loss.series.back().name = w.name;
    if (l.mean < low) low = l.mean, best = w.name;
    if (l.mean > high) high = l.mean, worst = w.name;
  }
  f.answer = fmt::format(
      "At a cache of 576 numbers a token, held-out loss runs from {:.3f} ({}) to {:.3f} ({}); MLA 512/64 prefills at {:.0f} FLOPs a pair against "
      "{:.0f} for MFA and {:.0f} for shared MQA.",
      low, best, high, worst, cost.series[0].y[0], cost.series[0].y[4], cost.series[0].y[5]);
  f.notes = {held_equal("cached numbers a token at K3's width", cache, 0), held_equal("cached numbers a token in the small models", small_cache, 0),
             "What must be cached is counted. This program's own cache holds shared MQA's one vector twice, as key and as value.",
             "Small models, one KDA layer and one of the kind compared, four heads, an eighth of the cache: " + size_line(job_of(s, ways()[0])),
             "Widths 512/64 and the comparison with GQA and MFA are the notes'; the report gives no MLA width."};
  f.tables = {t}, f.charts = {loss, cost};
  return f;
}

}  // namespace

const Experiment kKv{"kv", "At one fixed cache size, how should it be spent: MLA (which split?), GQA, MFA or MQA?", units, conclude};

}  // namespace k3::lab

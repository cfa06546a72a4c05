#include "k3/lab/learn.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "k3/core/error.h"
#include "k3/core/gpu.h"
#include "k3/model/init.h"
#include "k3/ops/depth_mix/depth_mix_ref.h"
#include "k3/ops/loss/loss.h"
#include "k3/tape/tape.h"
#include "k3/train/balance.h"
#include "k3/train/optimizer.h"
#include "k3/train/schedule.h"
#include "k3/train/step_memory.h"

namespace k3::lab {

namespace {

constexpr uint64_t kHeldOut = 1ull << 40;  // numbers of sequences that are never trained on

struct Tokens {
  std::vector<int32_t> ids, targets;
  Batch batch;
  int64_t counted() const {
    return std::count_if(targets.begin(), targets.end(), [](int32_t t) { return t >= 0; });
  }
};
Tokens tokens(const Job& job, uint64_t first, int64_t sequences, int64_t length) {
  Tokens t;
  for (int64_t s = 0; s < sequences; ++s) job.task.make(uint64_t(job.seed), first + uint64_t(s), length, t.ids, t.targets);
  t.batch = Batch::of_lengths(std::vector<int64_t>(size_t(sequences), length));
  return t;
}
// Loss and backward; the memory is the caller's to take back.
Loss step_of(Model& model, Context& c, const Tokens& t, float weight) {
  Tape tape;
  c.tape = &tape;
  const int64_t n = t.batch.tokens();
  Loss loss = cross_entropy(model.forward(c, lend_ids(c, t.ids, n), t.batch), model.lm_head(), lend_ids(c, t.targets, n), weight);
  tape.run_backward();
  c.tape = nullptr;
  return loss;
}

struct Null {  // the model on the null device
  Model model;
  explicit Null(const Config& config) : model(config) {
    model.params().allocate(Device::null);
    model.params().allocate_grads();
  }
  size_t bytes = 0;
  double flops = 0;
  void step(int64_t sequences, int64_t length) {
    Arena arena(0, Device::null);
    Context c{.device = Device::null, .arena = &arena, .observe = true};
    flops = 0;
    c.on_cost = [&](std::string_view, const Cost& cost) { flops += cost.flops; };
    Tokens t;
    t.batch = Batch::of_lengths(std::vector<int64_t>(size_t(sequences), length));
    step_of(model, c, t, 1);
    bytes = arena.peak();
  }
};

struct Score {
  double loss = 0, accuracy = 0;
};
// Memory: logits of all tokens, in one piece.
Score score(Model& model, const Job& job, int64_t sequences, int64_t length) {
  Score s;
  int64_t counted = 0, right = 0;
  const int64_t V = model.config().vocab_size;
  for (int64_t i = 0; i < sequences; i += 8) {
    Tokens t = tokens(job, kHeldOut + uint64_t(i), std::min<int64_t>(8, sequences - i), length);
    Arena arena(size_t(4) << 30, model.params().device());  // resident only where written
    Context c{.device = arena.device(), .arena = &arena};
    const int64_t n = t.batch.tokens();
    const HostCopy l(logits(model.forward(c, lend_ids(c, t.ids, n), t.batch), model.lm_head()));
    for (int64_t r = 0; r < n; ++r) {
      if (t.targets[size_t(r)] < 0) continue;
      const float* row = l.f32() + r * V;
      const float top = *std::max_element(row, row + V);
      double sum = 0;
      for (int64_t v = 0; v < V; ++v) sum += std::exp(double(row[v] - top));
      s.loss += std::log(sum) + double(top) - double(row[t.targets[size_t(r)]]);
      right += std::max_element(row, row + V) - row == t.targets[size_t(r)];
      ++counted;
    }
  }
  s.loss /= double(std::max<int64_t>(1, counted)), s.accuracy = double(right) / double(std::max<int64_t>(1, counted));
  return s;
}

double rms(const float* x, int64_t n) {
  double s = 0;
  for (int64_t i = 0; i < n; ++i) s += double(x[i]) * x[i];
  return std::sqrt(s / double(std::max<int64_t>(1, n)));
}

// The weights of attention over depth, mean over tokens: a row for each reader (mixer and ffn of each layer, then the output), a column for each
// source (the embedding, the blocks, the running sum), worked out from what the sublayers gave (residual.h).
json depth_weights(Model& model, const std::vector<float>& embedding, const std::vector<std::vector<float>>& outputs) {
  const Config& config = model.config();
  const int64_t d = config.hidden_size, n = int64_t(embedding.size()) / d, block = config.attn_res_block_size;
  std::vector<std::vector<float>> blocks;
  std::vector<float> sum = embedding;
  json rows = json::array();
  for (size_t i = 0; i <= outputs.size(); ++i) {
    const std::string reader =
        i == outputs.size() ? "model.output_attn_res" : fmt::format("model.layers.{}.{}_res", i / 2, i % 2 ? "mlp" : "self_attention");
    const HostCopy norm(model.params().find(reader + "_norm.weight")->value), query(model.params().find(reader + "_proj.weight")->value);
    std::vector<double> w(norm.f32(), norm.f32() + d), q(query.f32(), query.f32() + d), mean(blocks.size() + 1, 0.0), r, s, a;
    for (int64_t t = 0; t < n; ++t) {
      std::vector<std::vector<double>> rows_of;
      for (const auto& b : blocks) rows_of.emplace_back(b.begin() + t * d, b.begin() + (t + 1) * d);
      rows_of.emplace_back(sum.begin() + t * d, sum.begin() + (t + 1) * d);
      std::vector<const double*> v;
      for (const auto& row : rows_of) v.push_back(row.data());
      ref::depth_weights(v, w.data(), q.data(), config.rms_norm_eps, d, r, s, a);
      for (size_t j = 0; j < a.size(); ++j) mean[j] += a[j] / double(n);
    }
    rows.push_back(mean);
    if (i == outputs.size()) break;
    if (int64_t(i) % (2 * block) == 0) {
      blocks.push_back(sum), sum = outputs[i];
    } else {
      for (size_t e = 0; e < sum.size(); ++e) sum[e] += outputs[i][e];
    }
  }
  return rows;
}

// What the trained model does over its depth, on one held-out batch.
json probe(Model& model, const Job& job) {
  json out;
  const int64_t L = model.config().num_hidden_layers;
  std::vector<double> sum(size_t(L), 0), sublayer(size_t(2 * L), 0), routed(size_t(L), 0), shared(size_t(L), 0), gradient(size_t(L), 0);
  std::vector<float> embedding;
  std::vector<std::vector<float>> outputs(size_t(2 * L));
  Arena arena(size_t(4) << 30, model.params().device());
  Context c{.device = arena.device(), .arena = &arena};
  c.on_record = [&](std::string_view name, const Tensor& anywhere) {
    const size_t dot = name.rfind('.');
    const std::string_view kind = name.substr(0, dot);
    const size_t l = size_t(std::atoll(std::string(name.substr(dot + 1)).c_str()));
    if (anywhere.dtype() != DType::f32) return;
    const HostCopy copy(anywhere);
    const Tensor& t = copy.tensor();
    if (name == "hidden.0") embedding.assign(t.f32(), t.f32() + t.size());
    if (kind == "attn_out" || kind == "ffn_out") outputs[2 * l + (kind == "ffn_out")].assign(t.f32(), t.f32() + t.size());
    if (kind == "partial_sum") sum[l] = rms(t.f32(), t.size());
    if (kind == "attn_out") sublayer[2 * l] = rms(t.f32(), t.size());
    if (kind == "ffn_out") sublayer[2 * l + 1] = rms(t.f32(), t.size());
    if (kind == "routed_out") routed[l] = rms(t.f32(), t.size());
    if (kind == "shared_out") shared[l] = rms(t.f32(), t.size());
  };
  Tokens t = tokens(job, kHeldOut, 8, job.length);
  model.params().zero_grads();
  step_of(model, c, t, float(1 / double(std::max<int64_t>(1, t.counted()))));
  for (const Param& p : model.params().all()) {
    if (!p.name.starts_with("model.layers.") || p.grad.empty() || p.role.kind != Role::Kind::matrix) continue;
    const size_t l = size_t(std::atoll(p.name.c_str() + 13));
    double r = rms(HostCopy(p.grad).f32(), p.grad.size());
    gradient[l] += r * r * double(p.grad.size());
  }
  for (double& g : gradient) g = std::sqrt(g);
  model.params().zero_grads();
  out["hidden_rms"] = sum, out["sublayer_rms"] = sublayer, out["gradient"] = gradient;
  std::vector<double> share;
  for (int64_t l = 0; l < L; ++l)
    if (routed[size_t(l)] > 0 && shared[size_t(l)] > 0) share.push_back(routed[size_t(l)] / (routed[size_t(l)] + shared[size_t(l)]));
  out["routed_share"] = share;
  if (model.config().attn_res_block_size) out["depth_weights"] = depth_weights(model, embedding, outputs);
  return out;
}

}  // namespace

json Job::to_json() const {
  json j = {{"model", model}, {"train", train}, {"task", task.name}, {"symbols", task.symbols}, {"length", length}, {"sequences", sequences},
            {"steps", steps}, {"looks", looks}, {"seed", seed},      {"lengths", lengths},      {"probe", probe},   {"init_scale", init_scale}};
  if (device == Device::cuda) j["device"] = bf16 ? "cuda, bf16" : "cuda";  // other bits
  return j;
}

Config base() {
  Config c;
  c.model_type = "kimi_k3", c.hidden_size = 64, c.intermediate_size = 192, c.num_hidden_layers = 2, c.num_attention_heads = 2, c.rms_norm_eps = 1e-5;
  c.hidden_act = "situ", c.activation_situ_beta = 4, c.activation_situ_linear_beta = 25, c.q_lora_rank = 0, c.kv_lora_rank = 32;
  c.qk_nope_head_dim = 32, c.qk_rope_head_dim = 8, c.v_head_dim = 32, c.mla_use_output_gate = true, c.kda_num_heads = 2, c.kda_head_dim = 32;
  c.gate_lower_bound = -5.0, c.use_full_rank_gate = true, c.mixers = {"kda"};
  return c;
}

Config config_of(const Job& job) {
  Config c = base();
  for (const std::string& s : job.model) c.set(s);
  c.vocab_size = job.task.vocabulary();
  c.finish();
  return c;
}

Size size_of(const Job& job) {
  Null null(config_of(job));
  null.step(job.sequences, job.length);
  return {null.model.params().count(), null.flops};
}

double work_of(const Job& job) { return size_of(job).flops * double(job.steps) / 1.5e10; }

std::string size_line(const Job& job) {
  const Config c = config_of(job);
  const Size size = size_of(job);
  std::string train;
  for (const std::string& s : job.train) train += (train.empty() ? "" : ", ") + s;
  return fmt::format("{} layers of width {}, {:.0f} thousand parameters, {} steps of {} x {} tokens, {:.2g} GFLOP a step, {} symbols; {}.",
                     c.num_hidden_layers, c.hidden_size, double(size.parameters) / 1e3, job.steps, job.sequences, job.length, size.flops / 1e9,
                     job.task.symbols, train);
}

json learn(const Job& job, const Tick& tick) {
  TrainOptions options;
  options.steps = job.steps, options.batch_tokens = job.sequences * job.length, options.sequence_length = job.length, options.warmup_ratio = 0.05;
  for (const std::string& s : job.train) options.set(s.substr(0, s.find('=')), s.substr(s.find('=') + 1));
  options.finish();
  Model model(config_of(job));
  model.params().allocate(Device::cpu);
  initialize(model, uint64_t(job.seed));
  if (job.init_scale != 1)
    for (Param& p : model.params().all())
      for (int64_t i = 0; p.role.kind == Role::Kind::matrix && i < p.value.size(); ++i) p.value.f32()[i] *= float(job.init_scale);
  model.params().move_to(job.device);
  model.params().allocate_grads();
  model.bf16_products = job.bf16;
  Optimizer optimizer(model.params(), options, job.device);
  Balance balance(model, options);
  Null null(model.config());
  null.step(job.sequences, job.length);
  std::unique_ptr<Arena> room;
  make_room(room, null.bytes + (size_t(1) << 30), job.device);  // the optimizer's scratch too; resident only where written
  Arena& arena = *room;
  json r = {{"steps", json::array()}, {"loss", json::array()}, {"accuracy", json::array()}, {"train_loss", json::array()}, {"load", json::array()}};
  r["parameters"] = model.params().count(), r["flops"] = null.flops;
  double recent = 0;
  int64_t recent_steps = 0;
  for (int64_t s = 0; s < job.steps; ++s) {
    Tokens t = tokens(job, uint64_t(s) * uint64_t(job.sequences), job.sequences, job.length);
    arena.rewind(0);
    model.params().zero_grads();
    balance.begin_step();
    Context c{.device = job.device, .arena = &arena, .bf16_products = job.bf16, .observe = true};
    Loss loss = step_of(model, c, t, float(1 / double(std::max<int64_t>(1, t.counted()))));
    arena.rewind(0);
    recent += loss.sum / double(std::max<int64_t>(1, loss.count)), ++recent_steps;
    Optimizer::Result u = optimizer.step(c, learning_rate(options, s));
    K3_CHECK(u.bad.empty(), "[lab] step {}: the gradient of {} is not finite", s + 1, u.bad);
    std::vector<double> load = balance.load();
    if (!load.empty()) r["load"].push_back(*std::max_element(load.begin(), load.end()));
    balance.clip(c), balance.update_bias();
    if ((s + 1) * job.looks / job.steps != s * job.looks / job.steps) {
      Score e = score(model, job, 32, job.length);
      r["steps"].push_back(s + 1), r["loss"].push_back(e.loss), r["accuracy"].push_back(e.accuracy),
          r["train_loss"].push_back(recent / double(recent_steps));
      recent = 0, recent_steps = 0;
    }
    tick(double(s + 1) / double(job.steps));
  }
  for (int64_t n : job.lengths) {
    Score e = score(model, job, 16, n);
    r["at_length"][std::to_string(n)] = {{"loss", e.loss}, {"accuracy", e.accuracy}};
  }
  if (job.probe) r["probe"] = probe(model, job);
  return r;
}

std::string held_equal(const std::string& what, const std::vector<std::pair<std::string, double>>& arms, double tolerance) {
  double low = 1e300, high = 0;
  std::string list;
  for (const auto& [name, v] : arms) {
    low = std::min(low, v), high = std::max(high, v);
    list += fmt::format("{}{} {:.4g}", list.empty() ? "" : ", ", name, v);
  }
  K3_CHECK(high <= low * (1 + tolerance), "[lab] the arms should have equal {} but differ by {:.1f} %: {}", what, 100 * (high / low - 1), list);
  return fmt::format("Equal {}, by the counters: {} (within {:.1f} %).", what, list, 100 * (high / low - 1));
}

Spread spread(const std::vector<double>& values) {
  Spread s{0, 1e300, -1e300};
  for (double v : values) s.mean += v / double(values.size()), s.low = std::min(s.low, v), s.high = std::max(s.high, v);
  return s;
}

std::vector<double> over_seeds(const Results& r, const std::string& arm, int64_t seeds, const std::function<double(const json&)>& value) {
  std::vector<double> v;
  for (int64_t s = 1; s <= seeds; ++s) v.push_back(value(r.at(fmt::format("{}-{}", arm, s))));
  return v;
}

Series curve(const Results& r, const std::string& arm, int64_t seeds, const std::string& key) {
  Series out{arm, {}, {}, {}, {}};
  const json& first = r.at(arm + "-1");
  for (size_t i = 0; i < first[key].size(); ++i) {
    Spread s = spread(over_seeds(r, arm, seeds, [&](const json& j) { return j[key][i].get<double>(); }));
    out.x.push_back(first[key].size() == first["steps"].size() ? first["steps"][i].get<double>() : double(i + 1));
    out.y.push_back(s.mean), out.low.push_back(s.low), out.high.push_back(s.high);
  }
  return out;
}

std::string show(const Spread& s, int digits) {
  if (s.low == s.high) return fmt::format("{:.{}f}", s.mean, digits);
  return fmt::format("{:.{}f} ({:.{}f} to {:.{}f})", s.mean, digits, s.low, digits, s.high, digits);
}

Unit unit_of(const Setting& setting, const std::string& arm, Job job, int64_t seed) {
  job.seed = seed, job.device = setting.device, job.bf16 = setting.bf16;
  return {fmt::format("{}-{}", arm, seed), work_of(job), job.to_json(), [job](const Tick& tick) { return learn(job, tick); }};
}

}  // namespace k3::lab

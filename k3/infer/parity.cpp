#include "k3/infer/parity.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "k3/core/error.h"
#include "k3/core/gpu.h"
#include "k3/infer/session.h"
#include "k3/ops/loss/loss.h"
#include "k3/ops/sample/sample.h"
#include "k3/tape/tape.h"

namespace k3 {

namespace {

using Recorded = std::map<std::string, std::vector<float>>;

std::vector<float> floats(const Tensor& anywhere) {
  const HostCopy copy(anywhere);
  const Tensor& t = copy.tensor();
  if (t.dtype() == DType::f32) return {t.f32(), t.f32() + t.size()};
  std::vector<float> v(static_cast<size_t>(t.size()));
  if (t.dtype() == DType::i32)
    std::copy_n(t.i32(), t.size(), v.begin());
  else if (t.dtype() == DType::i64)
    std::transform(t.as<int64_t>(), t.as<int64_t>() + t.size(), v.begin(), [](int64_t x) { return float(x); });
  else
    fail("[verify] a recorded tensor is {}, but F32, I32 and I64 are understood", name_of(t.dtype()));
  return v;
}

ParityRow compare(const std::string& name, const std::vector<float>& got, const std::vector<float>& want, double limit) {
  ParityRow row{name, 0, 0, -1, limit, ""};
  K3_CHECK(got.size() == want.size(), "[verify] {} has {} values here but {} in the recording", name, got.size(), want.size());
  double difference = 0, norm = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    double d = std::abs(double(got[i]) - double(want[i]));
    if (!(d <= row.worst)) row.worst = d, row.at = int64_t(i);  // NaN is worst
    difference += d * d, norm += double(want[i]) * double(want[i]);
  }
  row.relative = norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
  if (std::isnan(row.relative)) row.relative = INFINITY, row.note = "not a number";
  return row;
}

struct Input {
  std::vector<int32_t> ids;
  int64_t rows, length;
  Batch batch() const { return Batch::of_lengths(std::vector<int64_t>(size_t(rows), length)); }
  Tensor tensor() const { return Tensor(const_cast<int32_t*>(ids.data()), DType::i32, {rows * length}); }
  // next-token targets within each row
  std::vector<int32_t> targets() const {
    std::vector<int32_t> t(ids.size(), kIgnored);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = 0; i + 1 < length; ++i) t[size_t(r * length + i)] = ids[size_t(r * length + i + 1)];
    return t;
  }
};

Input input_of(const Tensor& t) {
  K3_CHECK(t.rank() == 2, "[verify] input_ids must be [rows, tokens], not {}", to_string(t.shape()));
  Input in{{}, t.dim(0), t.dim(1)};
  for (float x : floats(t)) in.ids.push_back(int32_t(x));
  return in;
}

Tensor recorded(const Snapshot& s, const std::string& name) {
  const StoredTensor* t = s.find(name);
  K3_CHECK(t, "[verify] the recording {} has no {}", s.folder(), name);
  return s.view(*t);
}

// One forward with states; everything that `wanted` names, and the routing, ends in the map.
Recorded run_forward(Model& model, const Input& in, const std::function<bool(const std::string&)>& wanted, double* loss) {
  const Device device = model.params().device();
  Arena arena(size_t(64) << 30, device);
  Context c;
  c.device = device, c.arena = &arena;
  Recorded out;
  c.on_record = [&](std::string_view name, const Tensor& t) {
    std::string n(name);
    if (wanted(n) || n.starts_with("routes.") || n.starts_with("router_margin.")) out[n] = floats(t);
  };
  Batch batch = in.batch();
  for (int64_t r = 0; r < in.rows; ++r) batch.slots.push_back(int32_t(r));
  ModelState state = model.new_state(in.rows, device, true);
  Var h = model.forward(c, in.tensor(), batch, &state);
  out["logits"] = floats(logits(h, model.lm_head()));
  std::vector<int32_t> targets = in.targets();
  Loss l = cross_entropy(h, model.lm_head(), Tensor(targets.data(), DType::i32, {int64_t(targets.size())}), 1.0f);
  if (loss) *loss = l.sum / double(l.count);
  const Config& config = model.config();
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    std::string name = "kda_state." + std::to_string(layer);
    if (!wanted(name) || config.mixer_of_layer[size_t(layer)] != "kda") continue;
    size_t size = size_t(config.kda_num_heads * config.kda_head_dim * config.kda_head_dim);
    std::vector<float>& all = out[name];
    for (int64_t r = 0; r < in.rows; ++r) {
      std::vector<float> one(size);
      state.layer(layer)->dense(r, one);
      all.insert(all.end(), one.begin(), one.end());
    }
  }
  int64_t nth = 0;  // expert_load counts MoE layers
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    if (!config.is_moe(layer)) continue;
    std::vector<float>& load = out["expert_load." + std::to_string(nth++)];
    load.assign(size_t(config.num_experts), 0);
    for (float e : out["routes." + std::to_string(layer)])
      if (e >= 0) ++load[size_t(e)];
  }
  return out;
}

ParityRow compare_greedy(Model& model, const std::vector<float>& want, double gap) {
  constexpr size_t kPrompt = 20;
  K3_CHECK(want.size() > kPrompt, "[verify] greedy must hold {} prompt ids and a continuation", kPrompt);
  Session session(model, {});
  std::vector<int32_t> ids(want.begin(), want.begin() + kPrompt);
  session.read(ids);
  ParityRow row{"greedy", 0, 0, -1, 0, ""};
  int within = 0;
  for (size_t i = kPrompt; i < want.size(); ++i) {
    int32_t id = sample(session.logits(), session.vocabulary(), {}, 0);
    const auto recorded = int32_t(want[i]);
    if (id != recorded) {
      std::vector<float> log_p(size_t(session.vocabulary()));
      log_probabilities(session.logits(), session.vocabulary(), log_p.data());
      const double below = log_p[size_t(id)] - log_p[size_t(recorded)];
      if (!(below <= gap)) {
        row.relative = 1, row.worst = 1, row.at = int64_t(i);
        row.note = fmt::format("token {} is {} but {} was recorded; the two are {:.3g} apart{}", i, id, recorded, below,
                               gap > 0 ? fmt::format(", rounding allows {:.3g}", gap) : "");
        return row;
      }
      row.worst = std::max(row.worst, below), ++within, id = recorded;
    }
    session.read({&id, 1});
  }
  row.note = fmt::format("{} tokens identical", want.size() - kPrompt - size_t(within));
  if (within) row.note += fmt::format(", {} within {:.3g} of the best", within, gap);
  return row;
}

// The recorded choices of experts, while this lives.
class Forced {
 public:
  Forced(Model& model, const Snapshot& recording, const Input& in, bool on) : model_(model), routes_(size_t(model.config().num_hidden_layers)) {
    for (int64_t l = 0; on && l < model.config().num_hidden_layers; ++l)
      if (model.config().is_moe(l)) {
        routes_[size_t(l)] = recorded(recording, "routes." + std::to_string(l)).reshape({in.rows * in.length, model.config().num_experts_per_token});
        model.ffn(l).force_routes(&routes_[size_t(l)]);
      }
  }
  ~Forced() {
    for (int64_t l = 0; l < model_.config().num_hidden_layers; ++l) model_.ffn(l).force_routes(nullptr);
  }
  Forced(const Forced&) = delete;

 private:
  Model& model_;
  std::vector<Tensor> routes_;
};

// Of the mean next-token cross entropy, by parameter.
std::map<std::string, std::vector<float>> gradients_of(Model& model, const Input& in) {
  Arena arena(size_t(64) << 30, model.params().device());
  Tape tape;
  Context c;
  c.device = arena.device(), c.arena = &arena, c.tape = &tape;
  model.params().allocate_grads();
  std::vector<int32_t> targets = in.targets();
  int64_t count = std::count_if(targets.begin(), targets.end(), [](int32_t t) { return t != kIgnored; });
  Var h = model.forward(c, in.tensor(), in.batch());
  cross_entropy(h, model.lm_head(), Tensor(targets.data(), DType::i32, {int64_t(targets.size())}), 1.0f / float(count));
  tape.run_backward();
  std::map<std::string, std::vector<float>> all;
  for (const Param& p : model.params().all())
    if (!p.grad.empty()) all[p.name] = floats(p.grad);
  return all;
}

bool is_choice(const std::string& name) { return name.starts_with("routes.") || name.starts_with("expert_load."); }

double limit_of(const ParityOptions& o, const std::string& name, double exact) {
  const auto it = o.limits.find(name);
  return it == o.limits.end() ? exact : std::max(exact, it->second);
}

}  // namespace

ParityReport compare_forward(Model& model, const Snapshot& recording, const ParityOptions& o) {
  ParityReport report;
  Input in = input_of(recorded(recording, "input_ids"));
  double loss = 0;
  Recorded got;
  {
    const Forced forced(model, recording, in, o.force_routing);
    got = run_forward(
        model, in, [&](const std::string& n) { return recording.find(n) != nullptr; }, &loss);
  }
  got["loss"] = {float(loss)};
  for (const StoredTensor& t : recording.tensors()) {
    if (t.name == "input_ids") continue;
    std::vector<float> want = floats(recording.view(t));
    if (t.name == "greedy") {
      report.rows.push_back(compare_greedy(model, want, o.greedy_gap));
    } else if (t.name.starts_with("routes.") || t.name.starts_with("router_margin.")) {
      ParityRow row = compare(t.name, got[t.name], want, limit_of(o, t.name, t.name.starts_with("routes.") ? 0 : o.rtol * 10));
      report.rows.push_back(row);
    } else {
      auto it = got.find(t.name);
      K3_CHECK(it != got.end(), "[verify] the recording holds {}, which this model does not compute", t.name);
      ParityRow row = compare(t.name, it->second, want, limit_of(o, t.name, t.name.starts_with("expert_load.") ? 0 : o.rtol));
      report.rows.push_back(row);
    }
    report.good = report.good && report.rows.back().good();
  }
  for (auto& [name, margins] : got)
    if (name.starts_with("router_margin."))
      for (size_t i = 0; i < margins.size(); ++i)
        if (margins[i] < o.tie) report.ties.push_back(fmt::format("layer {} token {}: margin {:.2g}", name.substr(14), i, margins[i]));
  return report;
}

ParityReport compare_gradients(Model& model, const Snapshot& recording, const Snapshot& gradients, const ParityOptions& o) {
  Input in = input_of(recorded(recording, "input_ids"));
  const auto gradient = gradients_of(model, in);
  ParityReport report;
  size_t found = 0;
  for (const Param& p : model.params().all()) {
    const StoredTensor* t = find_parameter(gradients, model.config(), p.name);
    if (!t) continue;  // an expert that no token chose has no recorded gradient
    ++found;
    std::vector<float> want = floats(gradients.view(*t)), got = gradient.at(p.name);
    if (want.size() > got.size() && p.name.ends_with(".A_log")) got.resize(want.size(), 0.0f);
    report.rows.push_back(compare("d " + p.name, got, want, limit_of(o, "d " + p.name, o.gradient_rtol)));
    report.good = report.good && report.rows.back().good();
  }
  K3_CHECK(found == gradients.tensors().size(), "[verify] {} of the {} recorded gradients belong to no parameter of this model",
           gradients.tensors().size() - found, gradients.tensors().size());
  return report;
}

void allow_bf16(Model& exact, const Snapshot& recording, const Snapshot* gradients, ParityOptions& o) {
  const Input in = input_of(recorded(recording, "input_ids"));
  Recorded before, after;
  std::map<std::string, std::vector<float>> gradients_before, gradients_after;
  auto run = [&](Recorded& out, std::map<std::string, std::vector<float>>& slopes) {
    double loss = 0;
    {
      const Forced forced(exact, recording, in, o.force_routing);
      out = run_forward(
          exact, in, [&](const std::string& n) { return recording.find(n) != nullptr; }, &loss);
    }
    out["loss"] = {float(loss)};
    if (gradients) slopes = gradients_of(exact, in);
  };
  run(before, gradients_before);
  for (Param& p : exact.params().all())
    for (int64_t i = 0; p.shape.rank >= 2 && i < p.value.size(); ++i) p.value.f32()[i] = to_float(to_bf16(p.value.f32()[i]));
  run(after, gradients_after);
  for (const auto& [name, values] : before)
    o.limits[name] = is_choice(name) && !o.force_routing ? INFINITY : kBf16Factor * compare(name, after[name], values, 0).relative;
  for (const auto& [name, values] : gradients_before) o.limits["d " + name] = kBf16Factor * compare(name, gradients_after[name], values, 0).relative;
  double squares = 0;
  for (float x : before["logits"]) squares += double(x) * x;
  o.greedy_gap = 2 * o.limits["logits"] * std::sqrt(squares / double(std::max<size_t>(1, before["logits"].size())));
  if (const StoredTensor* greedy = recording.find("greedy"))  // a flipped expert moves one token's logits by more than all tokens' mean
    o.greedy_gap = std::max(o.greedy_gap, 2 * compare_greedy(exact, floats(recording.view(*greedy)), INFINITY).worst);
}

void record(Model& model, const Tensor& input_ids, const std::string& path) {
  Input in = input_of(input_ids);
  double loss = 0;
  Recorded got = run_forward(
      model, in, [](const std::string& n) { return !n.starts_with("log_decay") && !n.starts_with("output_gate"); }, &loss);
  got["loss"] = {float(loss)};
  std::vector<NamedTensor> tensors = {{"input_ids", in.tensor().reshape({in.rows, in.length})}};
  std::vector<std::vector<int32_t>> whole;
  whole.reserve(got.size());
  for (auto& [name, values] : got) {
    bool ids = name.starts_with("routes.") || name.starts_with("expert_load.");
    if (ids) {
      auto& v = whole.emplace_back(values.begin(), values.end());
      tensors.push_back({name, Tensor(v.data(), DType::i32, {int64_t(v.size())})});
    } else {
      tensors.push_back({name, Tensor(values.data(), DType::f32, {int64_t(values.size())})});
    }
  }
  write_safetensors(path, tensors);
}

}  // namespace k3

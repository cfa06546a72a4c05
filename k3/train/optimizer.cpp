#include "k3/train/optimizer.h"

#include <cmath>
#include <map>

#include "k3/core/error.h"
#include "k3/core/gpu.h"

namespace k3 {

namespace {

// "model.layers.3.mlp.experts.17.w1.weight" becomes "layers.*.mlp.experts.*.w1": a thousand names are then a dozen.
std::string folded(const std::string& name) {
  std::string out;
  for (size_t at = 0; at < name.size();) {
    size_t end = std::min(name.find('.', at), name.size());
    std::string part = name.substr(at, end - at);
    bool number = part.find_first_not_of("0123456789") == std::string::npos;
    if (!(part == "model" && at == 0) && part != "weight") out += (out.empty() ? "" : ".") + (number ? "*" : part);
    at = end + 1;
  }
  return out;
}

std::string listed(const char* what, const std::vector<std::string>& names) {
  if (names.empty()) return "";
  std::vector<std::pair<std::string, int>> groups;
  std::map<std::string, size_t> place;
  for (const std::string& n : names) {
    auto [it, fresh] = place.emplace(folded(n), groups.size());
    if (fresh) groups.emplace_back(it->first, 0);
    ++groups[it->second].second;
  }
  std::string text = fmt::format("{}, {} tensors:", what, names.size());
  for (const auto& [name, count] : groups) text += " " + name + (count > 1 ? fmt::format(" x{}", count) : "") + ",";
  text.back() = '\n';
  return text;
}

}  // namespace

Optimizer::Optimizer(ParamSet& params, const TrainOptions& options, Device device) : options_(options) {
  size_t bytes = 0;
  auto room = [&](const Param& p) { return (size_t(p.shape.size()) * 4 + 63) / 64 * 64; };
  const bool muon = options.optimizer != "adamw";
  for (Param& p : params.all()) {
    if (p.role.kind == Role::Kind::fixed) {
      fixed_.push_back(p.name);
      continue;
    }
    all_.push_back(&p);
    if (p.role.kind == Role::Kind::matrix && muon) {
      muon_.push_back({&p, options.optimizer == "muon_per_head" ? p.role.blocks : 1, {}});
      bytes += room(p);
    } else {
      adamw_.push_back({&p, p.role.kind != Role::Kind::vector, {}, {}});
      bytes += 2 * room(p);
    }
  }
  K3_CHECK(!muon || !muon_.empty(), "[train] optimizer is {} but the model has no matrix for it; use optimizer=adamw", options.optimizer);
  memory_ = Buffer(bytes, device);
  size_t at = 0;
  auto take = [&](const Param& p) {
    Tensor t = memory_.view(DType::f32, p.shape, at);
    at += room(p);
    return t;
  };
  for (Muon& m : muon_) m.momentum = take(*m.param);
  for (AdamW& a : adamw_) a.m = take(*a.param), a.v = take(*a.param);
}

void Optimizer::step(Context& c, double learning_rate, Result& result) {
  const double clip = options_.gradient_clip;
  auto finite = [&result](const GradientNorm& g) {
    result = {g.norm, g.bad};
    if (result.bad.empty() && !std::isfinite(g.norm)) result.bad = "the sum of all";
    return result.bad.empty();
  };
  if (c.device == Device::cuda) {
    if (!resident_) {
      std::vector<ResidentUpdate::AdamW> adamw;
      for (const AdamW& a : adamw_) adamw.push_back({a.param, a.m, a.v, a.decay});
      std::vector<ResidentUpdate::Muon> muon;
      for (const Muon& m : muon_) muon.push_back({m.param, m.momentum, m.blocks});
      resident_ = std::make_unique<ResidentUpdate>(all_, adamw, muon);
    }
    const float lr = float(learning_rate), decay = float(options_.weight_decay);
    resident_->step(c, {lr, float(options_.adam_beta1), float(options_.adam_beta2), float(options_.adam_eps), decay, updates + 1},
                    {lr, float(options_.muon_momentum), decay, 1, options_.muon_nesterov}, clip,
                    [this, finite](const GradientNorm& g) { updates += finite(g); });
    return;
  }
  const GradientNorm g = gradient_norm(c, all_);
  if (!finite(g)) return;
  const float scale = clip > 0 && g.norm > clip ? float(clip / g.norm) : 1.0f;
  ++updates;
  if (!muon_.empty()) {
    std::vector<MuonMatrix> list;
    for (const Muon& m : muon_) list.push_back({m.param->value, m.param->grad, m.momentum, m.blocks});
    muon_step(c, list, {float(learning_rate), float(options_.muon_momentum), float(options_.weight_decay), scale, options_.muon_nesterov});
  }
  for (const AdamW& a : adamw_)
    adamw_step(c, a.param->value, a.param->grad, a.m, a.v,
               {float(learning_rate), float(options_.adam_beta1), float(options_.adam_beta2), float(options_.adam_eps),
                a.decay ? float(options_.weight_decay) : 0.0f, updates, scale});
}

void Optimizer::set(double learning_rate) {
  if (resident_) resident_->set(float(learning_rate), float(learning_rate), updates + 1);
}

int64_t Optimizer::muon_blocks() const {
  int64_t n = 0;
  for (const Muon& m : muon_) n += m.blocks;
  return n;
}

std::string Optimizer::split() const {
  std::vector<std::string> heads, whole, decay, plain;
  for (const Muon& m : muon_) (m.blocks > 1 ? heads : whole).push_back(m.param->name);
  for (const AdamW& a : adamw_) (a.decay ? decay : plain).push_back(a.param->name);
  return listed("muon, each head by itself", heads) + listed("muon, whole", whole) + listed("adamw with decay", decay) +
         listed("adamw without decay", plain) + listed("no optimizer", fixed_);
}

std::vector<NamedTensor> Optimizer::moments() const {
  std::vector<NamedTensor> list;
  for (const AdamW& a : adamw_)
    if (a.param->catch_up) a.param->catch_up(nullptr, a.param->value.rows());
  for (const Muon& m : muon_) list.push_back({"muon." + m.param->name, m.momentum});
  for (const AdamW& a : adamw_) list.push_back({"adamw.m." + a.param->name, a.m}), list.push_back({"adamw.v." + a.param->name, a.v});
  return list;
}

void Optimizer::load_moments(const Snapshot& from) {
  auto mine = moments();
  for (const NamedTensor& t : mine) {
    const StoredTensor* s = from.find(t.name);
    K3_CHECK(s, "[train] {} lacks {}; go on from another step folder by writing its name into LATEST", from.folder(), t.name);
    K3_CHECK(s->dtype == DType::f32 && s->shape == t.value.shape(), "[train] {} in {} is {} {} but must be F32 {}", t.name, from.folder(),
             name_of(s->dtype), to_string(s->shape), to_string(t.value.shape()));
    write(t.value, from.view(*s).data());
  }
  K3_CHECK(from.tensors().size() == mine.size(), "[train] {} holds {} tensors but this model and optimizer need {}", from.folder(),
           from.tensors().size(), mine.size());
}

}  // namespace k3

#include "k3/plan/counts.h"

#include <fmt/ranges.h>

#include "k3/core/error.h"
#include "k3/model/choices.h"
#include "k3/ops/loss/loss.h"
#include "k3/plan/closed_forms.h"
#include "k3/tape/tape.h"
#include "k3/train/optimizer.h"

namespace k3::plan {

namespace {

const char* const kProducts[] = {"linear", "experts", "mla_attention", "attention", "delta_rule", "cross_entropy", "logits"};

struct Listener {
  Arena arena{0, Device::null};
  Context context{.device = Device::null, .arena = &arena};
  Count count;
  Listener() {
    context.deterministic = false;
    context.on_cost = [this](std::string_view op, const Cost& c) {
      OperatorCount& o = count.operators[std::string(op)];
      ++o.calls, o.flops += c.flops, o.bytes += c.bytes;
    };
  }
  Count take() {
    count.arena_peak = arena.peak();
    return std::move(count);
  }
};

Tensor ids(int64_t n) { return Tensor(nullptr, DType::i32, {n}, Device::null); }

Batch batch_of(int64_t sequences, int64_t tokens) {
  Batch b = Batch::of_lengths(std::vector<int64_t>(size_t(sequences), tokens));
  for (int64_t s = 0; s < sequences; ++s) b.slots.push_back(int32_t(s));
  return b;
}

double kv_b_flops(const Architecture& a) {  // of one token, whole model
  double n = 0;
  for (const auto& [mixer, layers] : a.mixers())
    if (mixer == "mla") n += double(layers);
  const Config& c = a.config;
  return n * 2 * double(c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim) * c.kv_lora_rank);
}

double delta_flops(const Architecture& a, double factor_kv, double factor_c) {  // of one token
  double n = 0;
  for (const auto& [mixer, layers] : a.mixers())
    if (mixer_form(a.config, mixer).state) n += double(layers);
  const double k = double(a.config.kda_head_dim);
  return n * double(a.config.kda_num_heads) * (factor_kv * k * k + factor_c * 16 * 2 * k);
}

double experts_flops(const Architecture& a) { return 2.0 * double(a.moe_layers() * a.config.num_experts_per_token) * double(parameters(a).expert); }

}  // namespace

double Count::flops() const {
  double n = 0;
  for (const auto& [name, o] : operators) n += o.flops;
  return n;
}
double Count::bytes() const {
  double n = 0;
  for (const auto& [name, o] : operators) n += o.bytes;
  return n;
}
double Count::of(const std::string& name) const {
  auto it = operators.find(name);
  return it == operators.end() ? 0 : it->second.flops;
}
double Count::products() const {
  double n = 0;
  for (const char* name : kProducts) n += of(name);
  return n;
}

CountedModel::CountedModel(const Architecture& a, For use, DType storage) : architecture_(a), model_(a.config) {
  K3_CHECK(a.runs(), "[plan] {} has a mixer that the model code lacks; only its closed forms can be printed (known: {})", a.name,
           fmt::format("{}", fmt::join(mixer_names(), ", ")));
  model_.params().allocate(Device::null);
  if (use == For::training) {
    model_.params().allocate_grads();
    return;
  }
  if (storage == DType::f32) return;
  for (Param& p : model_.params().all())
    if (p.role.kind == Role::Kind::matrix || p.role.kind == Role::Kind::scalar_row) p.value = Tensor(nullptr, storage, p.shape, Device::null);
}

Count CountedModel::prefill(int64_t tokens, int64_t cached) {
  ModelState state = model_.new_state(1, Device::null, false);
  if (cached > 0) {
    Listener before;
    model_.forward(before.context, ids(cached), batch_of(1, cached), &state);
  }
  Listener l;
  Var h = model_.forward(l.context, ids(tokens), batch_of(1, tokens), &state);
  logits(Var(l.context, h.value().row_range(tokens - 1, tokens)), model_.lm_head());
  return l.take();
}

Count CountedModel::decode(int64_t batch, int64_t context, int64_t tokens) {
  ModelState state = model_.new_state(batch, Device::null, false);
  if (context > 0) {
    Listener before;
    model_.forward(before.context, ids(context), batch_of(1, context), &state);
    for (int64_t s = 1; s < batch; ++s) state.copy(s, 0);
  }
  Listener l;
  Var h = model_.forward(l.context, ids(batch * tokens), batch_of(batch, tokens), &state);
  logits(h, model_.lm_head());
  return l.take();
}

Count CountedModel::train(int64_t sequences, int64_t tokens, bool recompute) {
  Listener l;
  Tape tape;
  l.context.tape = &tape, l.context.deterministic = true, l.context.observe = true;
  model_.recompute = recompute;
  Batch batch = batch_of(sequences, tokens);
  batch.slots.clear();
  Var h = model_.forward(l.context, ids(sequences * tokens), batch);
  cross_entropy(h, model_.lm_head(), ids(sequences * tokens), 1);
  tape.run_backward();
  model_.recompute = false;
  return l.take();
}

Count CountedModel::optimizer() {
  TrainOptions options;
  Optimizer optimizer(model_.params(), options, Device::null);
  Listener l;
  optimizer.step(l.context, 0);
  return l.take();
}

std::vector<Agreement> agreement(const Architecture& a, CountedModel& model, int64_t batch, int64_t context) {
  const Count c = model.decode(batch, context);
  const double t = double(batch), experts = experts_flops(a), kv_b = kv_b_flops(a);
  const Flops f = decode_flops(a, double(context), 1), own = decode_flops(a, double(context) + 1, 1);
  return {
      {"linear", "kv_b is inside mla_attention", c.of("linear") + c.of("logits"), t * (f.linear - experts - kv_b)},
      {"experts", "", c.of("experts"), t * experts},
      {"attention", "its own key counts; kv_b inside", c.of("mla_attention") + c.of("attention"), t * (own.attention + kv_b)},
      {"delta_rule", "as chunks of 16", c.of("delta_rule"), t * delta_flops(a, 6, 5)},
      {"total", "against the plain closed form", c.products(), t * f.total()},
  };
}

std::vector<Agreement> prefill_agreement(const Architecture& a, CountedModel& model, int64_t tokens) {
  const Count c = model.prefill(tokens);
  const double T = double(tokens), experts = experts_flops(a);
  const Flops f = prefill_flops(a, T);
  return {
      {"linear", "", c.of("linear") + c.of("logits"), f.linear - T * experts},
      {"experts", "", c.of("experts"), T * experts},
      {"attention", "T (T + 1) / 2 pairs", c.of("mla_attention") + c.of("attention"), f.attention * (1 + 1 / T)},
      {"delta_rule", "chunks of 16", c.of("delta_rule"), T * delta_flops(a, 6, 5)},
      {"total", "against the plain closed form", c.products(), f.total()},
  };
}

std::vector<Agreement> training_agreement(const Architecture& a, CountedModel& model, int64_t tokens) {
  const Count c = model.train(1, tokens, false);
  const double T = double(tokens), experts = experts_flops(a), head = 2.0 * double(parameters(a).head);
  const Flops f = training_flops(a, T);
  const double key = double(a.config.qk_nope_head_dim + a.config.qk_rope_head_dim), value = double(a.config.v_head_dim);
  const double backward = (3 * key + 2 * value) / (key + value);
  return {
      {"linear", "", c.of("linear"), T * (f.linear - 3 * (experts + head))},
      {"cross_entropy", "the head", c.of("cross_entropy"), 3 * T * head},
      {"experts", "", c.of("experts"), 3 * T * experts},
      {"mla_attention", "T (T + 1) / 2 pairs; executed backward", c.of("mla_attention"), T * f.attention / 3 * (1 + backward) * (1 + 1 / T)},
      {"delta_rule", "chunks of 16", c.of("delta_rule"), T * (delta_flops(a, 6, 5) + delta_flops(a, 13.5, 10))},
      {"total", "against the plain closed form; executed cores", c.products(),
       T * (f.linear + f.attention / 3 * (1 + backward) + delta_flops(a, 6, 5) + delta_flops(a, 13.5, 10))},
  };
}

}  // namespace k3::plan

// As deep as Kimi-K3: 93 layers. Rounding grows through attention over depth, so a limit on the last hidden state that lets a right model pass lets a
// broken part of one layer pass too. So each sublayer is held to the plain loops in double on its own, with the input that the engine gave it; the
// whole is judged by its distribution and loss.
#include <gtest/gtest.h>

#include <fmt/core.h>

#include <complex>

#include "k3/model/testing.h"
#include "k3/ops/activation/activation_ref.h"
#include "k3/ops/attention/attention_ref.h"
#include "k3/ops/conv/conv_ref.h"
#include "k3/ops/decay/decay_ref.h"
#include "k3/ops/delta_rule/delta_rule_ref.h"
#include "k3/ops/depth_mix/depth_mix_ref.h"
#include "k3/ops/linear/linear_ref.h"
#include "k3/ops/loss/loss.h"
#include "k3/ops/moe/moe_ref.h"
#include "k3/ops/norm/norm_ref.h"
#include "k3/tape/tape.h"

namespace k3 {
namespace {

using Values = std::vector<double>;
constexpr int64_t kLayers = 93, kTokens = 24;

Config deep() {
  Config c = testing::tiny_k3();
  c.hidden_size = 64, c.num_hidden_layers = kLayers, c.attn_res_block_size = 12;
  c.kda_layers.clear(), c.full_attn_layers.clear();
  for (int64_t l = 1; l <= kLayers; ++l) (l % 4 == 0 || l == kLayers ? c.full_attn_layers : c.kda_layers).push_back(l);
  c.finish();
  return c;
}

// Kimi-K3's layers on one sequence, in the plain loops of the operators' references (K3 report eq. 1-11).
class Plain {
 public:
  explicit Plain(Model& model) : model_(model), c_(model.config()) {}

  Values read(const std::string& name, const std::vector<Values>& sources) const {  // attention over depth
    const Values norm = param(name + "_norm.weight"), query = param(name + "_proj.weight");
    std::vector<const double*> at;
    for (const Values& s : sources) at.push_back(s.data());
    Values h(sources[0].size());
    ref::depth_mix(at, norm.data(), query.data(), c_.rms_norm_eps, h.data(), kTokens, c_.hidden_size);
    return h;
  }
  Values norm(const Values& x, const std::string& name, double eps) const {
    const Values w = param(name);
    Values y(x.size());
    ref::rms_norm(x.data(), w.data(), eps, y.data(), int64_t(x.size() / w.size()), int64_t(w.size()));
    return y;
  }
  // Sublayer i: the mixer of layer i / 2, or its experts. `chosen`: the experts to take; null: the router's own choice.
  Values sublayer(int64_t i, const std::vector<Values>& sources, const std::vector<int32_t>* chosen) const {
    const std::string layer = "model.layers." + std::to_string(i / 2) + ".";
    const Values h = read(layer + (i % 2 ? "mlp_res" : "self_attention_res"), sources);
    const Values x = norm(h, layer + (i % 2 ? "post_attention_layernorm.weight" : "input_layernorm.weight"), c_.rms_norm_eps);
    if (i % 2) return c_.is_moe(i / 2) ? moe(layer + "block_sparse_moe.", x, chosen) : glu(layer + "mlp.", x);
    return c_.mixer_of_layer[size_t(i / 2)] == "kda" ? kda(layer + "self_attn.", x) : mla(layer + "self_attn.", x);
  }
  Values logits(const std::vector<Values>& sources) const {
    return linear(norm(read("model.output_attn_res", sources), "model.norm.weight", c_.rms_norm_eps), "lm_head.weight");
  }
  bool opens_block(int64_t i) const { return i % (2 * c_.attn_res_block_size) == 0; }

 private:
  Values param(const std::string& name) const {
    const Param* p = model_.params().find(name);
    if (!p) throw Error("there is no " + name);
    return Values(p->value.f32(), p->value.f32() + p->value.size());
  }
  Values linear(const Values& x, const std::string& name) const {
    const Values w = param(name);
    const int64_t rows = model_.params().find(name)->shape[0], in = int64_t(w.size()) / rows, n = int64_t(x.size()) / in;
    Values y(size_t(n * rows));
    ref::linear(x.data(), w.data(), y.data(), n, rows, in);
    return y;
  }
  Values kda(const std::string& s, const Values& x) const {
    const int64_t H = c_.kda_num_heads, D = c_.kda_head_dim;
    auto short_conv = [&](const char* name) {
      const Values z = linear(x, s + name + "_proj.weight"), w = param(s + name + "_conv1d.weight");
      Values y(z.size());
      ref::conv_silu(z.data(), w.data(), y.data(), kTokens, H * D, c_.short_conv_kernel_size);
      return y;
    };
    auto unit = [&](const Values& z) {
      Values y(z.size());
      ref::l2_norm(z.data(), 1e-6, y.data(), kTokens * H, D);
      return y;
    };
    const Values q = unit(short_conv("q")), k = unit(short_conv("k")), v = short_conv("v");
    Values beta = linear(x, s + "b_proj.weight"), g(q.size()), o(q.size()), y(q.size());
    for (double& b : beta) b = ref::sigmoid(b);
    const Values z = linear(linear(x, s + "f_a_proj.weight"), s + "f_b_proj.weight"), a = param(s + "A_log"), bias = param(s + "dt_bias");
    ref::bounded_decay(z.data(), a.data(), bias.data(), *c_.gate_lower_bound, g.data(), kTokens, H, D);
    for (int64_t h = 0; h < H; ++h) {
      auto head = [&](const Values& all, int64_t d) {
        Values one(size_t(kTokens * d));
        for (int64_t t = 0; t < kTokens; ++t) std::copy_n(all.data() + (t * H + h) * d, d, one.data() + t * d);
        return one;
      };
      Values memory(size_t(D * D)), out(size_t(kTokens * D));
      ref::delta_rule(ref::DeltaGate::channel, head(q, D).data(), head(k, D).data(), head(v, D).data(), head(g, D).data(), head(beta, 1).data(),
                      memory.data(), out.data(), kTokens, D, D, 1 / std::sqrt(double(D)));
      for (int64_t t = 0; t < kTokens; ++t) std::copy_n(out.data() + t * D, D, o.data() + (t * H + h) * D);
    }
    const Values gate = linear(x, s + "g_proj.weight"), w = param(s + "o_norm.weight");
    ref::gated_rms_norm(o.data(), gate.data(), w.data(), c_.rms_norm_eps, y.data(), kTokens * H, D);
    return linear(y, s + "o_proj.weight");
  }
  Values mla(const std::string& s, const Values& x) const {
    const ref::Mla m{c_.num_attention_heads, c_.qk_nope_head_dim, c_.qk_rope_head_dim,
                     c_.v_head_dim,          c_.kv_lora_rank,     1 / std::sqrt(double(c_.qk_nope_head_dim + c_.qk_rope_head_dim))};
    const Values q = linear(norm(linear(x, s + "q_a_proj.weight"), s + "q_a_layernorm.weight", 1e-6), s + "q_b_proj.weight");
    const Values kv = linear(x, s + "kv_a_proj_with_mqa.weight"), kv_b = param(s + "kv_b_proj.weight");
    Values latent(size_t(kTokens * m.rank)), k_pe(size_t(kTokens * m.rope)), o(size_t(kTokens * m.heads * m.value));
    for (int64_t t = 0; t < kTokens; ++t) {
      std::copy_n(kv.data() + t * (m.rank + m.rope), m.rank, latent.data() + t * m.rank);
      std::copy_n(kv.data() + t * (m.rank + m.rope) + m.rank, m.rope, k_pe.data() + t * m.rope);
    }
    latent = norm(latent, s + "kv_a_layernorm.weight", 1e-6);
    ref::mla_attention(q.data(), latent.data(), k_pe.data(), kv_b.data(), o.data(), kTokens, m);
    const Values gate = linear(x, s + "g_proj.weight");
    for (size_t i = 0; i < o.size(); ++i) o[i] = ref::sigmoid_gate(o[i], gate[i]);
    return linear(o, s + "o_proj.weight");
  }
  Activation activation() const { return {Activation::Kind::situ, float(c_.activation_situ_beta), float(c_.activation_situ_linear_beta)}; }
  Values glu(const std::string& s, const Values& x) const {
    Values gate = linear(x, s + "gate_proj.weight");
    const Values up = linear(x, s + "up_proj.weight");
    for (size_t i = 0; i < gate.size(); ++i) gate[i] = ref::glu(gate[i], up[i], activation());
    return linear(gate, s + "down_proj.weight");
  }
  Values moe(const std::string& s, const Values& x, const std::vector<int32_t>* given) const {
    const ref::RouteShape r{kTokens, c_.num_experts, c_.num_experts_per_token, false, c_.moe_renormalize, c_.routed_scaling_factor};
    const ref::ExpertsShape e{kTokens, r.top_k, c_.routed_expert_hidden_size, c_.moe_intermediate_size};
    const Values logits = linear(x, s + "gate.weight"), bias = param(s + "gate.e_score_correction_bias");
    Values scores(logits.size()), cutoff(static_cast<size_t>(kTokens)), weights(size_t(kTokens * r.top_k)), u(size_t(kTokens * e.l));
    std::vector<int32_t> chosen(size_t(kTokens * r.top_k));
    ref::route_scores(logits.data(), scores.data(), r);
    ref::route_choose(scores.data(), bias.data(), chosen.data(), cutoff.data(), r);
    if (given) chosen = *given;
    ref::route_weights(logits.data(), chosen.data(), weights.data(), r);
    auto all = [&](const char* name) {
      Values w;
      for (int64_t j = 0; j < c_.num_experts; ++j) {
        const Values one = param(s + "experts." + std::to_string(j) + "." + name + ".weight");
        w.insert(w.end(), one.begin(), one.end());
      }
      return w;
    };
    const Values z = linear(x, s + "routed_expert_down_proj.weight"), w1 = all("w1"), w2 = all("w2"), w3 = all("w3");
    ref::experts(
        z.data(), weights.data(), chosen.data(), w1.data(), w3.data(), w2.data(), [&](double a, double b) { return ref::glu(a, b, activation()); },
        u.data(), e);
    Values y = linear(norm(u, s + "routed_expert_norm.weight", c_.rms_norm_eps), s + "routed_expert_up_proj.weight");
    const Values shared = glu(s + "shared_experts.", x);
    for (size_t i = 0; i < y.size(); ++i) y[i] += shared[i];
    return y;
  }

  Model& model_;
  const Config& c_;
};

// The engine's run: what each sublayer gave, and the logits.
struct Engine {
  std::map<std::string, Values> records;
  Values logits;
  Engine(Model& model, const std::vector<int32_t>& ids) {
    testing::Step step(false);
    step.context.on_record = [&](std::string_view name, const Tensor& t) {
      if (t.dtype() == DType::f32) records[std::string(name)] = Values(t.f32(), t.f32() + t.size());
      if (t.dtype() == DType::i32) records[std::string(name)] = Values(t.i32(), t.i32() + t.size());
    };
    Var h = model.forward(step.context, testing::tensor_of(ids), Batch::one(kTokens));
    const Tensor l = k3::logits(h, model.lm_head());
    logits = Values(l.f32(), l.f32() + l.size());
  }
};

double relative(const Values& got, const Values& want) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < got.size(); ++i) difference += (got[i] - want[i]) * (got[i] - want[i]), norm += want[i] * want[i];
  return std::sqrt(difference / norm);
}

// Each sublayer of `engine` against the plain loops with `right`'s parameters, from the sources that the engine had.
std::vector<double> errors(const Engine& engine, Model& right) {
  const Plain plain(right);
  std::vector<double> all;
  std::vector<Values> sources = {engine.records.at("hidden.0")};
  for (int64_t i = 0; i < 2 * kLayers; ++i) {
    const std::string l = std::to_string(i / 2);
    const Values& out = engine.records.at((i % 2 ? "ffn_out." : "attn_out.") + l);
    std::vector<int32_t> chosen;
    if (auto r = engine.records.find("routes." + l); r != engine.records.end()) chosen.assign(r->second.begin(), r->second.end());
    all.push_back(relative(out, plain.sublayer(i, sources, chosen.empty() ? nullptr : &chosen)));
    if (plain.opens_block(i))
      sources.push_back(out);
    else
      for (size_t k = 0; k < out.size(); ++k) sources.back()[k] = float(sources.back()[k] + out[k]);  // as the engine adds
  }
  return all;
}

struct Judged {
  double divergence = 0, same = 0;  // KL from `want`; share of tokens with the same best one
};
Judged judge(const Values& got, const Values& want, int64_t vocabulary) {
  Judged j;
  auto log_softmax = [&](const Values& all, int64_t t) {
    Values l(all.begin() + t * vocabulary, all.begin() + (t + 1) * vocabulary);
    const double top = *std::max_element(l.begin(), l.end());
    double sum = 0;
    for (double x : l) sum += std::exp(x - top);
    for (double& x : l) x -= top + std::log(sum);
    return l;
  };
  for (int64_t t = 0; t < kTokens; ++t) {
    const Values p = log_softmax(want, t), q = log_softmax(got, t);
    for (size_t i = 0; i < p.size(); ++i) j.divergence += std::exp(p[i]) * (p[i] - q[i]) / double(kTokens);
    j.same += double(std::max_element(p.begin(), p.end()) - p.begin() == std::max_element(q.begin(), q.end()) - q.begin()) / double(kTokens);
  }
  return j;
}

struct DeepModels {
  Model right{deep()}, other{deep()};
  std::vector<int32_t> ids = testing::some_ids(kTokens, right.config().vocab_size);
  DeepModels() {
    for (Model* m : {&right, &other}) {
      testing::fill(*m);
      uint64_t stream = 0;
      for (Param& p : m->params().all())  // each mix over depth has a query of its own
        if (p.name.ends_with("_res_proj.weight"))
          for (int64_t i = 0; i < p.value.size(); ++i) p.value.f32()[i] = float(0.3 * Rng{5, stream++}.normal(7));
    }
  }
};

// One sublayer: sums of 64 to 200 products after norms, in float32; the largest seen is 6e-7.
constexpr double kPartLimit = 1e-5;

TEST(deep, each_part_of_93_layers_is_its_equation) {
  DeepModels m;
  const std::vector<double> e = errors(Engine(m.right, m.ids), m.right);
  for (size_t i = 0; i < e.size(); ++i) EXPECT_LT(e[i], kPartLimit) << (i % 2 ? "ffn" : "mixer") << " of layer " << i / 2;
}

// The plain loops from end to end with the engine's choice of experts: a choice that is nearly tied is nobody's error.
Values plain_logits(Model& model, const Engine& engine) {
  const Plain plain(model);
  std::vector<Values> sources = {engine.records.at("hidden.0")};
  for (int64_t i = 0; i < 2 * kLayers; ++i) {
    std::vector<int32_t> chosen;
    if (auto r = engine.records.find("routes." + std::to_string(i / 2)); r != engine.records.end()) chosen.assign(r->second.begin(), r->second.end());
    const Values out = plain.sublayer(i, sources, chosen.empty() ? nullptr : &chosen);
    if (plain.opens_block(i))
      sources.push_back(out);
    else
      for (size_t k = 0; k < out.size(); ++k) sources.back()[k] += out[k];
  }
  return plain.logits(sources);
}

TEST(deep, the_whole_has_the_distribution_of_the_whole_in_double) {
  DeepModels m;
  const int64_t vocabulary = m.right.config().vocab_size;
  auto judged = [&](Model& model) {
    const Engine engine(model, m.ids);
    return judge(engine.logits, plain_logits(m.right, engine), vocabulary);
  };
  // Seen: 1.3e-6, though the logits differ by 2e-3 (relative L2), a thousand times what a part does; a lost gate in one layer of 93 makes it 0.03.
  const Judged right = judged(m.right);
  EXPECT_LT(right.divergence, 1e-4);
  EXPECT_GT(right.same, 0.95);  // the two best of one token are nearly tied
  Tensor gate = m.other.params().find("model.layers.50.self_attn.g_proj.weight")->value;
  std::fill_n(gate.f32(), gate.size(), 0.0f);
  const Judged broken = judged(m.other);
  EXPECT_GT(broken.divergence, 1e-2);
  EXPECT_LT(broken.same, 0.9);
}

// A fault of one part of one layer out of 186 is found there, and nowhere else: the other parts got its output as their input.
void expect_found(const std::vector<double>& e, std::vector<size_t> at) {
  for (size_t i = 0; i < e.size(); ++i) {
    if (std::find(at.begin(), at.end(), i) == at.end())
      EXPECT_LT(e[i], kPartLimit) << i;
    else
      EXPECT_GT(e[i], 100 * kPartLimit) << i;
  }
}

TEST(deep, a_lost_output_gate_of_one_layer_is_found) {
  for (int64_t layer : {50, 51}) {  // kda; mla
    DeepModels m;
    Tensor gate = m.other.params().find(fmt::format("model.layers.{}.self_attn.g_proj.weight", layer))->value;
    std::fill_n(gate.f32(), gate.size(), 0.0f);
    expect_found(errors(Engine(m.other, m.ids), m.right), {size_t(2 * layer)});
  }
}

TEST(deep, two_exchanged_blocks_are_found) {
  DeepModels m;  // two mixes over depth take each other's query
  auto query = [&](const char* name) { return m.other.params().find(name)->value; };
  Tensor a = query("model.layers.50.mlp_res_proj.weight"), b = query("model.layers.70.self_attention_res_proj.weight");
  std::swap_ranges(a.f32(), a.f32() + a.size(), b.f32());
  expect_found(errors(Engine(m.other, m.ids), m.right), {101, 140});
}

TEST(deep, an_expert_in_anothers_place_is_found) {
  DeepModels m;
  auto weight = [&](int e) { return m.other.params().find(fmt::format("model.layers.60.block_sparse_moe.experts.{}.w2.weight", e))->value; };
  Tensor a = weight(3), b = weight(4);
  std::swap_ranges(a.f32(), a.f32() + a.size(), b.f32());
  expect_found(errors(Engine(m.other, m.ids), m.right), {121});
}

// The config has fields of a rotation that the model does not make (mla_use_nope): they may say anything.
TEST(deep, no_theta_changes_a_model_without_positions) {
  std::vector<Values> all;
  for (double theta : {1.0, 10000.0, 1e9}) {
    Config c = deep();
    c.rope_theta = theta;
    c.finish();
    Model model(c);
    testing::fill(model);
    all.push_back(Engine(model, testing::some_ids(kTokens, c.vocab_size)).logits);
  }
  EXPECT_EQ(all[0], all[1]);
  EXPECT_EQ(all[0], all[2]);
  Config turned = deep();  // and one that does rotate hears it
  turned.mla_use_nope = false, turned.rope_theta = 100;
  turned.finish();
  Model model(turned);
  testing::fill(model);
  EXPECT_NE(Engine(model, testing::some_ids(kTokens, turned.vocab_size)).logits, all[0]);
}

}  // namespace
}  // namespace k3

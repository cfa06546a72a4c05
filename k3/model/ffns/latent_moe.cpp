// Mixture of experts, at full width (Kimi-Linear) or in a latent space with a norm (Stable LatentMoE, K3 report eq. 11; model.md 5.4).
#include "k3/core/gpu.h"
#include "k3/model/choices.h"
#include "k3/model/loading.h"
#include "k3/ops/activation/activation.h"
#include "k3/ops/linear/linear.h"
#include "k3/ops/moe/moe.h"
#include "k3/ops/norm/norm.h"

namespace k3 {

namespace {

class LatentMoe : public Ffn {
 public:
  LatentMoe(const Config& c, const Scope& s, int64_t layer)
      : layer_(layer),
        eps_(float(c.rms_norm_eps)),
        activation_(activation_of(c)),
        options_{c.num_experts_per_token, c.moe_router_activation_func == "softmax",
                 c.moe_renormalize,       float(c.routed_scaling_factor),
                 c.num_expert_group,      c.topk_group},
        gate_(s.matrix("gate", c.num_experts, c.hidden_size)),
        bias_(s.set.add(s.prefix + "gate.e_score_correction_bias", {c.num_experts}, {Role::Kind::fixed})) {
    bool latent = c.routed_expert_hidden_size > 0;
    int64_t width = c.latent_size(), m = c.moe_intermediate_size;
    if (latent) down_ = &s.matrix("routed_expert_down_proj", width, c.hidden_size);
    if (c.latent_moe_norm == "down" || c.latent_moe_norm == "both") down_norm_ = &s.gain("routed_expert_down_norm", width);
    if (c.latent_moe_norm == "up" || c.latent_moe_norm == "both") up_norm_ = &s.gain("routed_expert_norm", width);
    if (latent) up_ = &s.matrix("routed_expert_up_proj", c.hidden_size, width);
    for (int64_t e = 0; e < c.num_experts; ++e) {
      Scope expert = s.in("experts." + std::to_string(e));
      weights_.gate.push_back(&expert.matrix("w1", m, width));
      weights_.down.push_back(&expert.matrix("w2", width, m));
      weights_.up.push_back(&expert.matrix("w3", m, width));
    }
    if (c.num_shared_experts > 0) shared_ = make_glu(c, s.in("shared_experts"), c.num_shared_experts * m);
    watch_.bias = &bias_, watch_.top_k = options_.top_k;
    watch_.load.assign(size_t(c.num_experts), 0);
  }

  Var forward(Var x, const Batch& batch) override {
    Routing routing = route(x, gate_, bias_, options_, batch, forced_);
    watch(x.context(), routing, batch);
    Var z = down_ ? linear(x, *down_) : x;
    if (down_norm_) z = rms_norm(z, *down_norm_, eps_);
    x.context().part("experts");
    Var u = experts(z, routing, weights_, activation_);
    x.context().part("ffn");
    if (up_norm_) u = rms_norm(u, *up_norm_, eps_);  // on the weighted sum: the scale of the experts cancels
    if (up_) u = linear(u, *up_);
    if (!shared_) return u;
    Var y = shared_->forward(x, batch);
    x.context().record("routed_out." + std::to_string(layer_), u.value());
    x.context().record("shared_out." + std::to_string(layer_), y.value());
    return add(y, u);
  }
  RouterWatch* router() override { return &watch_; }
  ExpertWeights& weights() { return weights_; }
  void force_routes(const Tensor* routes) override { forced_ = routes; }

 private:
  void watch(Context& c, const Routing& r, const Batch& batch) {
    c.record("routes." + std::to_string(layer_), r.experts);
    c.record("router_margin." + std::to_string(layer_), r.margin);
    if (!c.observe || c.recomputing || c.device == Device::null) return;
    count_load(r, batch, watch_.load.data());
    if (watch_.histogram.bins) observe(watch_.histogram, r, batch);
    if (!watch_.keep_margins) return;
    const HostCopy cutoff(r.cutoff), scores(r.scores);
    for (int64_t i = 0, e = r.scores.cols(); i < r.scores.rows(); ++i)
      for (int64_t j = 0; j < e && (batch.padding.empty() || !batch.padding[size_t(i)]); ++j)
        watch_.margins.push_back(cutoff.f32()[i] - scores.f32()[i * e + j]);
  }

  int64_t layer_;
  float eps_;
  Activation activation_;
  RouteOptions options_;
  Param &gate_, &bias_;
  Param *down_ = nullptr, *down_norm_ = nullptr, *up_norm_ = nullptr, *up_ = nullptr;
  ExpertWeights weights_;
  std::unique_ptr<Ffn> shared_;
  RouterWatch watch_;
  const Tensor* forced_ = nullptr;
};

}  // namespace

ExpertWeights* expert_weights(Ffn& ffn) {
  auto* moe = dynamic_cast<LatentMoe*>(&ffn);
  return moe ? &moe->weights() : nullptr;
}

std::unique_ptr<Ffn> make_latent_moe(const Config& c, const Scope& s, int64_t layer) { return std::make_unique<LatentMoe>(c, s, layer); }

}  // namespace k3

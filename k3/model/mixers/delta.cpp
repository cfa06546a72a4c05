// The delta-rule family, one layer with three gates (K3 report eq. 1-6, model.md 3):
//   kda        Kimi Delta Attention: one log decay a key channel, bounded (K3) or softplus (Kimi-Linear)
//   gdn        Gated DeltaNet: one a head, softplus
//   deltanet   none: nothing is forgotten but what is overwritten
#include <cmath>

#include "k3/model/choices.h"
#include "k3/model/mixers/delta_state.h"
#include "k3/ops/activation/activation.h"
#include "k3/ops/conv/conv.h"
#include "k3/ops/delta_rule/gated_delta_rule.h"
#include "k3/ops/linear/linear.h"
#include "k3/ops/norm/norm.h"

namespace k3 {

namespace {

enum class Gate { channel, head, none };

class Delta : public Mixer {
 public:
  Delta(const Config& c, const Scope& s, int64_t layer, Gate gate)
      : layer_(layer),
        gate_(gate),
        heads_(c.kda_num_heads),
        dim_(c.kda_head_dim),
        width_(c.short_conv_kernel_size),
        eps_(float(c.rms_norm_eps)),
        lower_bound_(c.gate_lower_bound),
        full_rank_gate_(c.use_full_rank_gate),
        q_proj_(s.matrix("q_proj", heads_ * dim_, c.hidden_size, heads_)),
        k_proj_(s.matrix("k_proj", heads_ * dim_, c.hidden_size, heads_)),
        v_proj_(s.matrix("v_proj", heads_ * dim_, c.hidden_size, heads_)),
        q_conv_(s.vector("q_conv1d.weight", {heads_ * dim_, 1, width_})),
        k_conv_(s.vector("k_conv1d.weight", {heads_ * dim_, 1, width_})),
        v_conv_(s.vector("v_conv1d.weight", {heads_ * dim_, 1, width_})),
        b_proj_(s.set.add(s.prefix + "b_proj.weight", {heads_, c.hidden_size}, {Role::Kind::scalar_row})),
        g_proj_(full_rank_gate_ ? &s.matrix("g_proj", heads_ * dim_, c.hidden_size) : nullptr),
        g_a_proj_(full_rank_gate_ ? nullptr : &s.matrix("g_a_proj", dim_, c.hidden_size)),
        g_b_proj_(full_rank_gate_ ? nullptr : &s.matrix("g_b_proj", heads_ * dim_, dim_)),
        o_norm_(s.gain("o_norm", dim_)),
        o_proj_(s.matrix("o_proj", c.hidden_size, heads_ * dim_)) {
    if (gate_ == Gate::none) return;
    A_log_ = &s.vector("A_log", {heads_});
    dt_bias_ = &s.vector("dt_bias", {gate_ == Gate::channel ? heads_ * dim_ : heads_});
    if (gate_ == Gate::channel) {
      f_a_proj_ = &s.matrix("f_a_proj", dim_, c.hidden_size);
      f_b_proj_ = &s.matrix("f_b_proj", heads_ * dim_, dim_);
    } else {
      a_proj_ = &s.set.add(s.prefix + "a_proj.weight", {heads_, c.hidden_size}, {Role::Kind::scalar_row});
    }
  }

  Var forward(Var x, const Batch& batch, State* state) override {
    auto* s = static_cast<DeltaLayerState*>(state);
    const std::vector<Var> qkv = linears(x, {&q_proj_, &k_proj_, &v_proj_});
    const std::vector<Var> convolved =
        conv_silu(qkv, {&q_conv_, &k_conv_, &v_conv_}, batch, {s ? &s->q : nullptr, s ? &s->k : nullptr, s ? &s->v : nullptr});
    Var q = convolved[0], k = convolved[1], v = convolved[2];  // eq. 2
    Var b = linear(x, b_proj_), z = decay_logits(x);
    Var o = gated_delta_rule(q, k, v, z, b, decay(), shape(), batch, s ? &s->memory : nullptr);  // eq. 1
    Var gate = full_rank_gate_ ? linear(x, *g_proj_) : linear(linear(x, *g_a_proj_), *g_b_proj_);
    x.context().record("output_gate." + std::to_string(layer_), gate.value());
    return linear(gated_rms_norm(o, gate, o_norm_, eps_), o_proj_);  // eq. 6
  }
  std::unique_ptr<State> new_state(int64_t slots, Device device, bool) const override {
    return std::make_unique<DeltaLayerState>(shape(), slots, width_, device);
  }

 private:
  Var decay_logits(Var x) {
    if (gate_ == Gate::none) return {};
    return gate_ == Gate::channel ? linear(linear(x, *f_a_proj_), *f_b_proj_) : linear(x, *a_proj_);
  }
  DecayGate decay() const {  // eq. 5, or softplus
    const bool bounded = gate_ == Gate::channel && lower_bound_;
    return {A_log_, dt_bias_, bounded ? std::optional(float(*lower_bound_)) : std::nullopt, "log_decay." + std::to_string(layer_)};
  }
  DeltaShape shape() const {
    return {heads_, dim_, dim_, float(1 / std::sqrt(double(dim_))), gate_ == Gate::channel && lower_bound_ && *lower_bound_ >= -5};
  }

  int64_t layer_;
  Gate gate_;
  int64_t heads_, dim_, width_;
  float eps_;
  std::optional<double> lower_bound_;
  bool full_rank_gate_;
  Param &q_proj_, &k_proj_, &v_proj_, &q_conv_, &k_conv_, &v_conv_, &b_proj_;
  Param *A_log_ = nullptr, *dt_bias_ = nullptr, *f_a_proj_ = nullptr, *f_b_proj_ = nullptr, *a_proj_ = nullptr;
  Param *g_proj_, *g_a_proj_, *g_b_proj_;
  Param &o_norm_, &o_proj_;
};

}  // namespace

std::unique_ptr<Mixer> make_kda(const Config& c, const Scope& s, int64_t layer) { return std::make_unique<Delta>(c, s, layer, Gate::channel); }
std::unique_ptr<Mixer> make_gdn(const Config& c, const Scope& s, int64_t layer) { return std::make_unique<Delta>(c, s, layer, Gate::head); }
std::unique_ptr<Mixer> make_deltanet(const Config& c, const Scope& s, int64_t layer) { return std::make_unique<Delta>(c, s, layer, Gate::none); }

}  // namespace k3

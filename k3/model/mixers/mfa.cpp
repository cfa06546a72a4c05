// Multi-matrix factorisation attention: one key and one value head of attention_head_dim (unset: twice v_head_dim, 256 + 256 at K3's sizes), and
// many wide query heads whose projection is factored through q_lora_rank with a norm between, so that they cost few parameters:
//
//   q = W_qb rms_norm(W_qa x)    (N, H*C)        k = W_k x,  v = W_v x    (N, C)        y = W_o [sigmoid(W_g x) * attention(q, k, v)]
//
// The cache is 2 C numbers a token. q_lora_rank 0: one q_proj.
#include <cmath>

#include "k3/model/choices.h"
#include "k3/model/mixers/kv_state.h"
#include "k3/ops/activation/activation.h"
#include "k3/ops/attention/attention.h"
#include "k3/ops/linear/linear.h"
#include "k3/ops/norm/norm.h"

namespace k3 {

namespace {

class Mfa : public Mixer {
 public:
  Mfa(const Config& c, const Scope& s, int64_t layer)
      : layer_(layer),
        eps_(float(c.rms_norm_eps)),
        shape_(shape_of(c)),
        q_a_proj_(c.q_lora_rank ? &s.matrix("q_a_proj", c.q_lora_rank, c.hidden_size) : nullptr),
        q_a_layernorm_(c.q_lora_rank ? &s.gain("q_a_layernorm", c.q_lora_rank) : nullptr),
        q_proj_(s.matrix(c.q_lora_rank ? "q_b_proj" : "q_proj", shape_.heads * shape_.key_dim, c.q_lora_rank ? c.q_lora_rank : c.hidden_size,
                         shape_.heads)),
        k_proj_(s.matrix("k_proj", shape_.key_dim, c.hidden_size)),
        v_proj_(s.matrix("v_proj", shape_.value_dim, c.hidden_size)),
        g_proj_(c.mla_use_output_gate ? &s.matrix("g_proj", shape_.heads * shape_.value_dim, c.hidden_size) : nullptr),
        o_proj_(s.matrix("o_proj", c.hidden_size, shape_.heads * shape_.value_dim)) {}

  Var forward(Var x, const Batch& batch, State* state) override {
    Var q = q_a_proj_ ? linear(rms_norm(linear(x, *q_a_proj_), *q_a_layernorm_, eps_), q_proj_) : linear(x, q_proj_);
    Var o = attention(q, linear(x, k_proj_), linear(x, v_proj_), shape_, batch, state ? &static_cast<KvState*>(state)->cache : nullptr);
    if (g_proj_) {
      Var gate = linear(x, *g_proj_);
      x.context().record("output_gate." + std::to_string(layer_), gate.value());
      o = sigmoid_gate(o, gate);
    }
    return linear(o, o_proj_);
  }
  std::unique_ptr<State> new_state(int64_t slots, Device device, bool) const override { return std::make_unique<KvState>(slots, shape_, device); }

 private:
  static AttentionShape shape_of(const Config& c) {
    int64_t dim = c.attention_head_dim ? c.attention_head_dim : 2 * c.v_head_dim;
    return {c.num_attention_heads, 1, dim, dim, float(1 / std::sqrt(double(dim)))};
  }

  int64_t layer_;
  float eps_;
  AttentionShape shape_;
  Param *q_a_proj_, *q_a_layernorm_;
  Param &q_proj_, &k_proj_, &v_proj_;
  Param* g_proj_;
  Param& o_proj_;
};

}  // namespace

std::unique_ptr<Mixer> make_mfa(const Config& c, const Scope& s, int64_t layer) { return std::make_unique<Mfa>(c, s, layer); }

}  // namespace k3

// Softmax attention with a cache of plain keys and values, without position encoding; two alternatives that MLA is compared with.
//   gqa   num_attention_heads queries of attention_head_dim share num_key_value_heads keys and values
//   mqa   one head of width attention_head_dim that is key and value at once: one vector a token to remember. KvCache keeps it twice, as a column
//         among keys and as a row among values, which is how the kernels read them; the planner counts it once
// Both may have K3's output gate (mla_use_output_gate).
#include <cmath>

#include "k3/model/choices.h"
#include "k3/model/mixers/kv_state.h"
#include "k3/ops/activation/activation.h"
#include "k3/ops/attention/attention.h"
#include "k3/ops/linear/linear.h"

namespace k3 {

namespace {

enum class Kind { gqa, mqa };

class GroupedAttention : public Mixer {
 public:
  GroupedAttention(const Config& c, const Scope& s, int64_t layer, Kind kind) : layer_(layer), shape_(shape_of(c, kind)) {
    const int64_t q_rows = shape_.heads * shape_.key_dim, d = c.hidden_size;
    q_proj_ = &s.matrix("q_proj", q_rows, d, shape_.heads);
    k_proj_ = &s.matrix("k_proj", shape_.kv_heads * shape_.key_dim, d, shape_.kv_heads);
    if (kind != Kind::mqa) v_proj_ = &s.matrix("v_proj", shape_.kv_heads * shape_.value_dim, d, shape_.kv_heads);
    if (c.mla_use_output_gate) g_proj_ = &s.matrix("g_proj", shape_.heads * shape_.value_dim, d);
    o_proj_ = &s.matrix("o_proj", d, shape_.heads * shape_.value_dim);
  }

  Var forward(Var x, const Batch& batch, State* state) override {
    Var q = linear(x, *q_proj_), k = linear(x, *k_proj_);
    Var v = v_proj_ ? linear(x, *v_proj_) : k;
    Var o = attention(q, k, v, shape_, batch, state ? &static_cast<KvState*>(state)->cache : nullptr);
    if (g_proj_) {
      Var gate = linear(x, *g_proj_);
      x.context().record("output_gate." + std::to_string(layer_), gate.value());
      o = sigmoid_gate(o, gate);
    }
    return linear(o, *o_proj_);
  }
  std::unique_ptr<State> new_state(int64_t slots, Device device, bool) const override { return std::make_unique<KvState>(slots, shape_, device); }

 private:
  static AttentionShape shape_of(const Config& c, Kind kind) {
    int64_t dim = c.attention_head_dim ? c.attention_head_dim : c.v_head_dim;
    return {c.num_attention_heads, kind == Kind::gqa ? c.num_key_value_heads : 1, dim, dim, float(1 / std::sqrt(double(dim)))};
  }

  int64_t layer_;
  AttentionShape shape_;
  Param *q_proj_, *k_proj_, *v_proj_ = nullptr, *g_proj_ = nullptr, *o_proj_;
};

}  // namespace

std::unique_ptr<Mixer> make_gqa(const Config& c, const Scope& s, int64_t layer) { return std::make_unique<GroupedAttention>(c, s, layer, Kind::gqa); }
std::unique_ptr<Mixer> make_mqa(const Config& c, const Scope& s, int64_t layer) { return std::make_unique<GroupedAttention>(c, s, layer, Kind::mqa); }

}  // namespace k3

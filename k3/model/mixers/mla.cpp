// Gated multi-head latent attention without position encoding (K3 report eq. 7, model.md 4); with mla_use_nope = false it rotates, to compare.
#include <algorithm>
#include <cmath>

#include "k3/model/choices.h"
#include "k3/model/mixers/latent_state.h"
#include "k3/ops/activation/activation.h"
#include "k3/ops/attention/attention.h"
#include "k3/ops/linear/linear.h"
#include "k3/ops/norm/norm.h"
#include "k3/ops/rope/rope.h"

namespace k3 {

namespace {

class Mla : public Mixer {
 public:
  Mla(const Config& c, const Scope& s, int64_t layer)
      : layer_(layer),
        shape_{c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim,
               c.v_head_dim,          c.kv_lora_rank,     float(1 / std::sqrt(double(c.qk_nope_head_dim + c.qk_rope_head_dim)))},
        q_a_proj_(c.q_lora_rank ? &s.matrix("q_a_proj", c.q_lora_rank, c.hidden_size) : nullptr),
        q_a_layernorm_(c.q_lora_rank ? &s.gain("q_a_layernorm", c.q_lora_rank) : nullptr),
        q_proj_(s.matrix(c.q_lora_rank ? "q_b_proj" : "q_proj", shape_.heads * (shape_.nope + shape_.rope),
                         c.q_lora_rank ? c.q_lora_rank : c.hidden_size, shape_.heads)),
        kv_a_proj_(s.matrix("kv_a_proj_with_mqa", shape_.rank + shape_.rope, c.hidden_size)),
        kv_a_layernorm_(s.gain("kv_a_layernorm", shape_.rank)),
        // K and V of a head are matrices of their own to Muon where they have equal rows
        kv_b_proj_(s.matrix("kv_b_proj", shape_.heads * (shape_.nope + shape_.value), shape_.rank,
                            shape_.nope == shape_.value ? 2 * shape_.heads : shape_.heads)),
        g_proj_(c.mla_use_output_gate ? &s.matrix("g_proj", shape_.heads * shape_.value, c.hidden_size) : nullptr),
        o_proj_(s.matrix("o_proj", c.hidden_size, shape_.heads * shape_.value)),
        rope_theta_(c.mla_use_nope ? 0 : c.rope_theta),
        clip_{std::vector<float>(size_t(shape_.heads), -INFINITY), &q_proj_, &kv_b_proj_, shape_.nope, shape_.rope, shape_.value} {}

  Var forward(Var x, const Batch& batch, State* state) override {
    Context& c = x.context();
    Var q = q_a_proj_ ? linear(rms_norm(linear(x, *q_a_proj_), *q_a_layernorm_, kLatentNormEps), q_proj_) : linear(x, q_proj_);
    Var latent = rms_norm(linear_rows(x, kv_a_proj_, 0, shape_.rank), kv_a_layernorm_, kLatentNormEps);
    Var k_pe = linear_rows(x, kv_a_proj_, shape_.rank, shape_.rank + shape_.rope);  // never normed
    if (rope_theta_ > 0) {
      std::vector<int64_t> first;
      for (size_t i = 0; state && i < batch.slots.size(); ++i) first.push_back(batch.slots[i] < 0 ? 0 : state->tokens(batch.slots[i]));
      q = rope(q, {shape_.heads, shape_.nope, shape_.rope, rope_theta_}, batch, first);
      k_pe = rope(k_pe, {1, 0, shape_.rope, rope_theta_}, batch, first);
    }
    bool watch = c.observe && !c.recomputing;
    Tensor largest = watch ? c.arena->lend(DType::f32, {shape_.heads}) : Tensor();
    Var o = mla_attention(q, latent, k_pe, kv_b_proj_, shape_, batch, state ? &static_cast<LatentState*>(state)->cache : nullptr,
                          watch ? &largest : nullptr);
    if (watch) c.read(largest, [this](const void* p) { watch_logits(static_cast<const float*>(p)); });
    if (g_proj_) {
      Var gate = linear(x, *g_proj_);
      c.record("output_gate." + std::to_string(layer_), gate.value());
      o = sigmoid_gate(o, gate);
    }
    return linear(o, o_proj_);
  }
  std::unique_ptr<State> new_state(int64_t slots, Device device, bool deterministic) const override {
    // deterministic decode uses the expanded form: cheaper to keep its rows than to expand the whole context anew for every token
    return std::make_unique<LatentState>(slots, shape_, deterministic, device);
  }
  QkClip* qk_clip() override { return &clip_; }

 private:
  void watch_logits(const float* largest) {
    for (size_t h = 0; h < clip_.max_logits.size(); ++h) clip_.max_logits[h] = std::max(clip_.max_logits[h], largest[h]);
  }

  int64_t layer_;
  MlaShape shape_;
  Param *q_a_proj_, *q_a_layernorm_;
  Param &q_proj_, &kv_a_proj_, &kv_a_layernorm_, &kv_b_proj_;
  Param* g_proj_;
  Param& o_proj_;
  double rope_theta_;  // 0: no rotation
  QkClip clip_;
};

}  // namespace

std::unique_ptr<Mixer> make_mla(const Config& c, const Scope& s, int64_t layer) { return std::make_unique<Mla>(c, s, layer); }

}  // namespace k3

#pragma once
// Model: embedding, layers, head. The constructor only declares parameters; memory comes with allocate() (model/param_set.h) or from a
// snapshot (model/checkpoint.h).
//
//   Model model(config);
//   load(model, Snapshot(folder), {});
//   ModelState state = model.new_state(1, Device::cpu, true);
//   Var h = model.forward(context, ids, batch, &state);      // (N, hidden_size), after the final norm
//   Tensor l = logits(h, model.lm_head());
#include <memory>
#include <vector>

#include "k3/model/config.h"
#include "k3/model/ffn.h"
#include "k3/model/mixer.h"
#include "k3/model/param_set.h"
#include "k3/model/residual.h"

namespace k3 {

// What all layers remember of each sequence.
class ModelState {
 public:
  explicit ModelState(std::vector<std::unique_ptr<State>> layers, int64_t slots) : layers_(std::move(layers)), slots_(slots) {}
  int64_t slots() const { return slots_; }
  State* layer(int64_t l) const { return layers_[size_t(l)].get(); }
  int64_t tokens(int64_t slot) const { return layers_[0]->tokens(slot); }
  void reset(int64_t slot) {
    for (auto& s : layers_) s->reset(slot);
  }
  void copy(int64_t to, int64_t from) {
    for (auto& s : layers_) s->copy(to, from);
  }
  bool drop(int64_t slot, int64_t n);  // all layers or none
  void save(int64_t slot, Blob& to) const;
  void load(int64_t slot, Blob& from);
  int64_t bytes_per_slot() const;
  int64_t bytes_per_token() const;

 private:
  std::vector<std::unique_ptr<State>> layers_;
  int64_t slots_;
};

class Model {
 public:
  // The extra prediction layer that a config with num_nextn_predict_layers = 1 names serves training only: `with_mtp` declares it, else it is left
  // out, and a file's tensors of it are passed over.
  explicit Model(Config config, bool with_mtp = false);

  // `features`, if given: (N, hidden_size) before the final norm, what mtp_forward() reads.
  Var forward(Context& c, const Tensor& ids, const Batch& batch, ModelState* state = nullptr, Var* features = nullptr);

  // Multi-token prediction (training.md 8; DeepSeek-V3 report, arXiv 2412.19437, eq. 21-23): one more block over the features h and the next tokens,
  //   e_t = embed(x_t+1),   h'_t = block(eh_proj [hnorm(h_t); enorm(e_t)]),   lm_head(norm h'_t) predicts x_t+2       embedding and head are shared
  // next_ids (N) i32: x_t+1; rows without one must be padding in `batch`. The block is the last layer's kind, with plain residuals.
  bool has_mtp() const { return mtp_ != nullptr; }
  Var mtp_forward(Var features, const Tensor& next_ids, const Batch& batch);

  ModelState new_state(int64_t slots, Device device, bool deterministic) const;

  const Config& config() const { return config_; }
  ParamSet& params() { return params_; }
  const ParamSet& params() const { return params_; }
  Param& lm_head() { return *lm_head_; }
  Param& embed_tokens() { return *embed_tokens_; }
  // Layers 0 .. num_hidden_layers - 1, then the one of multi-token prediction if it is there.
  int64_t layers() const { return int64_t(layers_.size()) + has_mtp(); }
  Mixer& mixer(int64_t layer) { return *at(layer).mixer; }
  Ffn& ffn(int64_t layer) { return *at(layer).ffn; }

  // Keep only each sublayer's result and compute the inside again in the backward.
  bool recompute = false;
  // On a GPU: matrix products in bfloat16 (Context::bf16_products).
  bool bf16_products = false;

 private:
  struct Layer {
    std::unique_ptr<Mixer> mixer;
    std::unique_ptr<Ffn> ffn;
    Param *input_layernorm, *post_attention_layernorm;
  };
  struct Mtp {
    Layer layer;
    Param *enorm, *hnorm, *eh_proj, *norm;
  };
  const Layer& at(int64_t layer) const { return layer < int64_t(layers_.size()) ? layers_[size_t(layer)] : mtp_->layer; }
  static Layer make_layer(const Config& c, const Scope& s, int64_t layer);

  Config config_;
  ParamSet params_;
  Param *embed_tokens_, *norm_, *lm_head_;
  std::vector<Layer> layers_;
  std::unique_ptr<Mtp> mtp_;
  std::unique_ptr<Residual> residual_;
};

}  // namespace k3

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
  explicit Model(Config config);

  Var forward(Context& c, const Tensor& ids, const Batch& batch, ModelState* state = nullptr);
  ModelState new_state(int64_t slots, Device device, bool deterministic) const;

  const Config& config() const { return config_; }
  ParamSet& params() { return params_; }
  const ParamSet& params() const { return params_; }
  Param& lm_head() { return *lm_head_; }
  Mixer& mixer(int64_t layer) { return *layers_[size_t(layer)].mixer; }
  Ffn& ffn(int64_t layer) { return *layers_[size_t(layer)].ffn; }

  // Keep only each sublayer's result and compute the inside again in the backward.
  bool recompute = false;

 private:
  struct Layer {
    std::unique_ptr<Mixer> mixer;
    std::unique_ptr<Ffn> ffn;
    Param *input_layernorm, *post_attention_layernorm;
  };
  Config config_;
  ParamSet params_;
  Param *embed_tokens_, *norm_, *lm_head_;
  std::vector<Layer> layers_;
  std::unique_ptr<Residual> residual_;
};

}  // namespace k3

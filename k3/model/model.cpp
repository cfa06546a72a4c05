#include "k3/model/model.h"

#include "k3/core/error.h"
#include "k3/model/choices.h"
#include "k3/ops/activation/activation.h"
#include "k3/ops/concat/concat.h"
#include "k3/ops/embedding/embedding.h"
#include "k3/ops/linear/linear.h"
#include "k3/ops/norm/norm.h"
#include "k3/tape/checkpoint.h"

namespace k3 {

Model::Layer Model::make_layer(const Config& c, const Scope& s, int64_t l) {
  Layer layer;
  layer.input_layernorm = &s.gain("input_layernorm", c.hidden_size);
  layer.mixer = make_mixer(c, s.in("self_attn"), l);
  layer.post_attention_layernorm = &s.gain("post_attention_layernorm", c.hidden_size);
  layer.ffn = make_ffn(c, s, l);
  return layer;
}

Model::Model(Config config, bool with_mtp) : config_(std::move(config)) {
  if (!with_mtp) config_.num_nextn_predict_layers = 0;
  const Config& c = config_;
  const int64_t L = c.num_hidden_layers, d = c.hidden_size;
  Scope top{params_, "model."};
  embed_tokens_ = &params_.add("model.embed_tokens.weight", {c.vocab_size, d}, {Role::Kind::scalar_row});
  for (int64_t l = 0; l < L; ++l) layers_.push_back(make_layer(c, top.in("layers." + std::to_string(l)), l));
  residual_ = make_residual(c, params_);
  norm_ = &top.gain("norm", d);
  lm_head_ = &params_.add("lm_head.weight", {c.vocab_size, d}, {Role::Kind::scalar_row});
  if (c.num_nextn_predict_layers == 0) return;
  Config one_more = c;
  one_more.mixer_of_layer.push_back(c.mixer_of_layer.back());
  Scope s = top.in("layers." + std::to_string(L));
  mtp_ = std::make_unique<Mtp>();
  mtp_->enorm = &s.gain("enorm", d), mtp_->hnorm = &s.gain("hnorm", d), mtp_->eh_proj = &s.matrix("eh_proj", d, 2 * d);
  mtp_->layer = make_layer(one_more, s, L);
  mtp_->norm = &s.in("shared_head").gain("norm", d);
}

Var Model::mtp_forward(Var features, const Tensor& next_ids, const Batch& batch) {
  K3_CHECK(mtp_, "[model] there is no layer of multi-token prediction; set num_nextn_predict_layers=1 and train");
  Context& c = features.context();
  const float eps = float(config_.rms_norm_eps);
  Var e = rms_norm(embedding(c, next_ids, *embed_tokens_), *mtp_->enorm, eps);
  Var h = linear(concat(rms_norm(features, *mtp_->hnorm, eps), e), *mtp_->eh_proj);
  h = add(h, mtp_->layer.mixer->forward(rms_norm(h, *mtp_->layer.input_layernorm, eps), batch, nullptr));
  h = add(h, mtp_->layer.ffn->forward(rms_norm(h, *mtp_->layer.post_attention_layernorm, eps), batch));
  return rms_norm(h, *mtp_->norm, eps);
}

Var Model::forward(Context& c, const Tensor& ids, const Batch& batch, ModelState* state, Var* features) {
  K3_CHECK(ids.size() == batch.tokens(), "[model] {} token ids but the batch has {} tokens", ids.size(), batch.tokens());
  c.bf16_products = bf16_products;
  const float eps = float(config_.rms_norm_eps);
  c.part("rest");
  residual_->begin(embedding(c, ids, *embed_tokens_));
  c.record("hidden.0", residual_->sources(0).back().value());
  auto sublayer = [&](int64_t i, const char* name, const char* part, Param* norm, auto f) {
    // everything by value: a checkpointed sublayer runs again when this function is long over
    auto body = [this, &c, i, name, part, norm, eps, f](const std::vector<Var>& in) {
      Var x = rms_norm(residual_->read(i, in), *norm, eps);
      c.part(part);
      Var y = f(x);
      c.part("rest");
      c.record(name + std::to_string(i / 2), y.value());
      return residual_->combine(i, in, y);
    };
    auto in = residual_->sources(i);
    residual_->advance(i, recompute ? checkpoint(c, in, body) : body(in));
  };
  const int64_t L = config_.num_hidden_layers;
  for (int64_t l = 0; l < L; ++l) {
    const Layer* layer = &layers_[size_t(l)];
    State* s = state ? state->layer(l) : nullptr;
    sublayer(2 * l, "attn_out.", "attention", layer->input_layernorm, [=](Var x) { return layer->mixer->forward(x, batch, s); });
    sublayer(2 * l + 1, "ffn_out.", "ffn", layer->post_attention_layernorm, [=](Var x) { return layer->ffn->forward(x, batch); });
    Var sum = residual_->sources(2 * l + 2).back();
    c.record("partial_sum." + std::to_string(l), sum.value());
    if (l + 1 < L) c.record("hidden." + std::to_string(l + 1), sum.value());
  }
  Var last = residual_->read(2 * L, residual_->sources(2 * L));
  if (features) *features = last;
  Var h = rms_norm(last, *norm_, eps);
  c.record("hidden." + std::to_string(L), h.value());
  return h;
}

ModelState Model::new_state(int64_t slots, Device device, bool deterministic) const {
  std::vector<std::unique_ptr<State>> states;
  for (const Layer& l : layers_) states.push_back(l.mixer->new_state(slots, device, deterministic));
  return ModelState(std::move(states), slots);
}

bool ModelState::drop(int64_t slot, int64_t n) {
  // The delta rule is the one that may refuse; ask it first, so that all layers drop or none.
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (layers_[i]->bytes_per_token() != 0) continue;
    if (!layers_[i]->drop(slot, n)) {
      K3_CHECK(i == 0 || layers_[0]->bytes_per_token() != 0, "[state] layer {} refused to drop {} tokens that an earlier layer dropped", i, n);
      return false;
    }
  }
  for (auto& s : layers_)
    if (s->bytes_per_token() != 0) s->drop(slot, n);
  return true;
}

void ModelState::save(int64_t slot, Blob& to) const {
  to.put_value("layers", int64_t(layers_.size()));
  for (auto& s : layers_) s->save(slot, to);
}

void ModelState::load(int64_t slot, Blob& from) {
  int64_t n = from.get_value<int64_t>("layers");
  K3_CHECK(n == int64_t(layers_.size()), "[state] the bytes are of a model with {} layers, this one has {}", n, layers_.size());
  try {
    for (auto& s : layers_) s->load(slot, from);
    int64_t read = tokens(slot);
    for (auto& s : layers_)
      K3_CHECK(s->tokens(slot) == read, "[state] the layers have read different numbers of tokens ({} and {}); the bytes are damaged",
               s->tokens(slot), read);
    K3_CHECK(from.at_end(), "[state] there are bytes left over");
  } catch (...) {
    reset(slot);
    throw;
  }
}

int64_t ModelState::bytes_per_slot() const {
  int64_t n = 0;
  for (auto& s : layers_) n += s->bytes_per_slot();
  return n;
}

int64_t ModelState::bytes_per_token() const {
  int64_t n = 0;
  for (auto& s : layers_) n += s->bytes_per_token();
  return n;
}

}  // namespace k3

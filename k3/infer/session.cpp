#include "k3/infer/session.h"

#include <algorithm>
#include <cstring>

#include "k3/core/error.h"
#include "k3/core/gpu.h"
#include "k3/core/memory.h"
#include "k3/ops/loss/loss.h"

namespace k3 {

// Slot 0 is the sequence, slot 1 the mark.

static SessionOptions settled(SessionOptions o, const Model& model) {
  o.captured = o.captured && !o.listen;
  if (o.captured && FusedStep::why_not(model).empty()) o.deterministic = false;
  return o;
}

Session::Session(Model& model, const SessionOptions& options)
    : model_(model),
      options_(settled(options, model)),
      arena_(address_space(), model.params().device()),
      state_(model.new_state(2, model.params().device(), options_.deterministic)),
      logits_(size_t(model.config().vocab_size) * sizeof(float)) {
  K3_CHECK(options.prefill_chunk >= 1, "[session] prefill_chunk is {} but must be at least 1", options.prefill_chunk);
  const DecoderOptions decode{.deterministic = options_.deterministic};
  if (!options_.captured || !Decoder::why_not(model, decode).empty()) return;
  decoder_ = std::make_unique<Decoder>(model, state_, decode);
  last_room_ = Buffer(logits_.bytes(), arena_.device());
  last_ = last_room_.view(DType::f32, {1, vocabulary()});
}

// Forgets what next() gave; a step that has read it is taken back (the delta rule keeps its open rows, so the last token always can be).
void Session::settle() {
  given_ = -1;
  if (!ahead_) return;
  ahead_ = 0, has_logits_ = false;
  K3_CHECK(state_.drop(0, 1), "[session] the step that ran ahead can't be taken back");
}

int32_t Session::next(const SampleOptions& options) {
  if (decoder_) return next_captured(options);
  if (const int32_t id = given_; id >= 0) read({&id, 1});
  return given_ = sample(logits(), vocabulary(), options, uint64_t(tokens()));
}

int32_t Session::next_captured(const SampleOptions& options) {
  if (!ahead_) {
    logits();  // there must be some
    const DecodeRow row{0, options};
    decoder_->begin({&row, 1});
    decoder_->draw(last_);
  }
  decoder_->step();
  ahead_ = 1, has_logits_ = false;
  return given_ = decoder_->result(decoder_->drawn() - 2, 0);
}

void Session::read(std::span<const int32_t> ids, const std::function<void(int64_t)>& progress) {
  settle();
  const int64_t total = int64_t(ids.size());
  for (int64_t at = 0; at < total;) {
    int64_t n = std::min(options_.prefill_chunk, total - at);
    Context c;
    c.device = arena_.device(), c.arena = &arena_;
    c.deterministic = options_.deterministic;
    if (options_.listen) options_.listen(c);
    arena_.rewind(0);
    Batch batch = Batch::one(n);
    batch.slots = {0};
    Tensor piece(const_cast<int32_t*>(ids.data() + at), DType::i32, {n});
    has_logits_ = false;
    Var h = model_.forward(c, piece, batch, &state_);
    at += n;
    if (at == total) {  // logits of the last token only
      c.part("head");
      Tensor last = k3::logits(Var(c, h.value().row_range(n - 1, n)), model_.lm_head());
      const HostCopy here(last);
      std::memcpy(logits_.data(), here.tensor().data(), last.bytes());
      if (decoder_) copy_values(last_, last);
      has_logits_ = true;
    }
    c.part("");
    if (progress) progress(at);
  }
}

void Session::mark() {
  settle();
  for (int64_t l = 0; l < model_.config().num_hidden_layers; ++l)
    if (State* s = state_.layer(l); s->bytes_per_token() == 0) s->copy(1, 0);
  marked_ = tokens();
}

void Session::back() {
  settle();
  for (int64_t l = 0; l < model_.config().num_hidden_layers; ++l) {
    State* s = state_.layer(l);
    if (s->bytes_per_token() == 0)
      marked_ == 0 ? s->reset(0) : s->copy(0, 1);
    else
      K3_CHECK(s->drop(0, s->tokens(0) - marked_), "[session] layer {} cannot go back from {} tokens to {}", l, s->tokens(0), marked_);
  }
  has_logits_ = false;
}

const float* Session::logits() const {
  K3_CHECK(has_logits_, "[session] there are no logits before a token is read");
  return reinterpret_cast<const float*>(logits_.data());
}

}  // namespace k3

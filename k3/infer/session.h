#pragma once
// Session: one sequence being read and continued.
//
//   Session s(model, {});
//   s.read(prompt_ids);                                   // prefill, in pieces
//   int32_t id = s.next(options);                         // decode: the token that follows, and so on
//
// How the tokens were cut into calls never changes the logits: in deterministic mode not by one bit.
#include <functional>
#include <memory>
#include <span>

#include "k3/infer/decoder.h"
#include "k3/model/model.h"
#include "k3/ops/sample/sample.h"

namespace k3 {

struct SessionOptions {
  int64_t prefill_chunk = 256;  // tokens read at once: bounds the memory of a long prompt
  bool captured = true;         // on a GPU, where the model allows it and nobody listens: next() is a captured step
  // false: absorbed MLA decode, less memory a token; equal to rounding. A model in bfloat16 on a GPU whose decode step can be fused (FusedStep) is
  // never deterministic: its products' sums depend on the cut already.
  bool deterministic = true;
  std::function<void(Context&)> listen;  // sees each step's Context before it runs (StepClock::listen)
};

class Session {
 public:
  Session(Model& model, const SessionOptions& options);
  Session(const Session&) = delete;  // its decoder knows where the state is

  // Reads tokens. `progress` is told after each piece how many of them are read.
  void read(std::span<const int32_t> ids, const std::function<void(int64_t done)>& progress = nullptr);
  // Reads the token that the last next() gave, and draws the one after it. So what next() gave last is not part of the sequence until it is called
  // again; anything else that is called forgets it. On a GPU the reading is a captured step that is already on its way when next() returns, so that
  // steps follow each other without waiting; `options` stay the same while next() follows next().
  int32_t next(const SampleOptions& options);
  bool captured() const { return decoder_ != nullptr; }  // whether next() decodes so
  const char* how() const { return !decoder_ ? "" : decoder_->fused() ? " (captured, fused steps)" : " (captured steps)"; }  // for a speed line
  const Decoder* decoder() const { return decoder_.get(); }

  bool drop(int64_t n) { return settle(), state_.drop(0, n); }  // unread the last n tokens; false when that is too far back
  void reset() { settle(), state_.reset(0), marked_ = 0, has_logits_ = false; }
  // Remembers this place; back() unreads everything since, in no time and to the bit. What a mark costs is the memory of a sequence that does not
  // grow with its length: the rest is cut off. One mark at a time; a new session is marked at its beginning.
  void mark();
  void back();
  int64_t marked() const { return marked_; }

  const float* logits() const;  // after the last token that read() read
  int64_t vocabulary() const { return model_.config().vocab_size; }
  int64_t tokens() const { return state_.tokens(0) - ahead_; }
  ModelState& state() { return settle(), state_; }
  size_t peak_bytes() const { return arena_.peak(); }

 private:
  void settle();
  int32_t next_captured(const SampleOptions& options);

  Model& model_;
  SessionOptions options_;
  Arena arena_;
  ModelState state_;
  Buffer logits_;
  int64_t marked_ = 0;
  bool has_logits_ = false;
  int32_t given_ = -1;  // by next(), and not read yet
  std::unique_ptr<Decoder> decoder_;
  Tensor last_;  // logits on the device
  Buffer last_room_;
  int64_t ahead_ = 0;  // 1: a step that reads a token which next() gave is on its way
};

}  // namespace k3

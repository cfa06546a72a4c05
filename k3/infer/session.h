#pragma once
// Session: one sequence being read and continued.
//
//   Session s(model, {});
//   s.read(prompt_ids);                                   // prefill, in pieces
//   int32_t id = sample(s.logits(), s.vocabulary(), options, s.tokens());
//   s.read({&id, 1});                                     // decode
//
// How the tokens were cut into calls never changes the logits: in deterministic mode not by one bit.
#include <functional>
#include <span>

#include "k3/model/model.h"

namespace k3 {

struct SessionOptions {
  int64_t prefill_chunk = 256;           // tokens read at once: bounds the memory of a long prompt
  bool deterministic = true;             // false: absorbed MLA decode, less memory a token; equal to rounding
  std::function<void(Context&)> listen;  // sees each step's Context before it runs (StepClock::listen)
};

class Session {
 public:
  Session(Model& model, const SessionOptions& options);

  // Reads tokens. `progress` is told after each piece how many of them are read.
  void read(std::span<const int32_t> ids, const std::function<void(int64_t done)>& progress = nullptr);
  bool drop(int64_t n) { return state_.drop(0, n); }  // unread the last n tokens; false when that is too far back
  void reset() { state_.reset(0), marked_ = 0, has_logits_ = false; }
  // Remembers this place; back() unreads everything since, in no time and to the bit. What a mark costs is the memory of a sequence that does not
  // grow with its length: the rest is cut off. One mark at a time; a new session is marked at its beginning.
  void mark();
  void back();
  int64_t marked() const { return marked_; }

  const float* logits() const;  // after the last token read
  int64_t vocabulary() const { return model_.config().vocab_size; }
  int64_t tokens() const { return state_.tokens(0); }
  ModelState& state() { return state_; }
  size_t peak_bytes() const { return arena_.peak(); }

 private:
  Model& model_;
  SessionOptions options_;
  Arena arena_;
  ModelState state_;
  Buffer logits_;
  int64_t marked_ = 0;
  bool has_logits_ = false;
};

}  // namespace k3

#pragma once
// Mixer: what a layer does along the sequence. One forward serves training (no state), prefill (a state, many tokens) and decode (a state,
// one token). A new mixer is one file in mixers/, one row in choices.cpp and one line in mixers/mixer_test.cpp.
#include <memory>
#include <string>
#include <vector>

#include "k3/core/batch.h"
#include "k3/core/blob.h"
#include "k3/model/config.h"
#include "k3/model/param_set.h"
#include "k3/tape/var.h"

namespace k3 {

// What one mixer remembers of each sequence (slot). Who holds a State does not know its form.
class State {
 public:
  virtual ~State() = default;
  virtual int64_t tokens(int64_t slot) const = 0;  // read so far
  virtual void reset(int64_t slot) = 0;
  virtual void copy(int64_t to, int64_t from) = 0;  // fork
  virtual bool drop(int64_t slot, int64_t n) = 0;   // unread the last n tokens; false (and nothing done) when they can't be
  // A decode step on the device will read one more token: room is made, and the counters here go on. open() is the delta rule's open rows; -1: none.
  virtual void count(int64_t slot) = 0;
  virtual int64_t open(int64_t) const { return -1; }
  virtual void save(int64_t slot, Blob& to) const = 0;
  virtual void load(int64_t slot, Blob& from) = 0;  // refuses another kind or shape by name
  virtual int64_t bytes_per_slot() const = 0;       // whatever the length
  virtual int64_t bytes_per_token() const = 0;
  virtual void dense(int64_t, std::vector<float>&) const {}  // the delta rule's S (H, K, V), for parity tools
};

// Declares parameters below one prefix: "model.layers.3.self_attn.".
struct Scope {
  ParamSet& set;
  std::string prefix;
  Scope in(const std::string& name) const { return {set, prefix + name + "."}; }
  // (out, in); `blocks` equal blocks of rows are one matrix each to Muon
  Param& matrix(const std::string& name, int64_t out, int64_t in, int64_t blocks = 1) const {
    return set.matrix(prefix + name + ".weight", out, in, blocks);
  }
  Param& gain(const std::string& name, int64_t size) const { return set.vector(prefix + name + ".weight", {size}); }
  Param& vector(const std::string& name, Shape shape) const { return set.vector(prefix + name, shape); }
};

// For QK-clip: the largest logit of each head since the trainer last looked, and the matrices to scale.
struct QkClip {
  std::vector<float> max_logits;  // (H)
  Param *q, *kv_b;
  int64_t nope, shared, value;
};

class Mixer {
 public:
  virtual ~Mixer() = default;
  virtual Var forward(Var x, const Batch& batch, State* state) = 0;  // (N, hidden_size) to (N, hidden_size)
  virtual std::unique_ptr<State> new_state(int64_t slots, Device device, bool deterministic) const = 0;
  virtual QkClip* qk_clip() { return nullptr; }
};

}  // namespace k3

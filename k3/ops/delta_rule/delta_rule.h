#pragma once
// The gated delta rule: a memory S [K, V] a head that forgets by its gate, then writes what it did not yet predict.
//
//   S_t = (I - beta_t k_t k_t^T) Diag(exp g_t) S_{t-1} + beta_t k_t v_t^T        o_t = scale * S_t^T q_t        K3 report eq. 1-2
//
//   q, k (N, H*K), L2-normalised per head      v (N, H*V)      beta (N, H)      result (N, H*V)
//   g    log of the decay, <= 0:  empty   DeltaNet, no forgetting
//                                 (N, H)  Gated DeltaNet, one a head
//                                 (N, H*K) KDA, one a key channel
//
// Without a state each sequence of the batch starts from an empty memory at its first token. With one, sequence s goes on from what slot
// batch.slots[s] has read, and the slot reads these tokens too. Rows of batch.padding touch nothing and give zeros.
//
// Chunks of 16 tokens are counted from a sequence's first token, and a token's numbers are formed from its own row and the rows before it,
// in one order: prefill cut anywhere, decode one token at a time, any batch, any thread count and the training forward give the same bits.
//
// Any K and V (padded to 16 inside). Errors: sizes that disagree; g neither empty, (N, H) nor (N, H*K); a slot out of range or named twice;
// a state of another shape; a state under a tape (the backward ends where the sequence begins).
#include <cstdint>
#include <vector>

#include "k3/core/batch.h"
#include "k3/core/blob.h"
#include "k3/core/buffer.h"
#include "k3/tape/var.h"

namespace k3 {

struct DeltaShape {
  int64_t heads, key_dim, value_dim;
  float scale;           // on the output; head_dim^-1/2 in K3
  bool bounded = false;  // the gate promises g >= -5 (K3); kernels on matrix units may then anchor a chunk's exponents at its first row
};

// What `slots` sequences remember: for each head the memory after the last closed chunk, and the rows of the open one (at most 16 tokens).
class DeltaState {
 public:
  DeltaState(const DeltaShape& shape, int64_t slots, Device device = Device::cpu);

  int64_t slots() const { return int64_t(tokens_.size()); }
  int64_t tokens(int64_t slot) const { return tokens_[slot]; }  // how many it has read
  void reset(int64_t slot) { tokens_[slot] = open_[slot] = 0; }
  void copy(int64_t to, int64_t from);  // fork
  void count(int64_t slot);             // one more token was read, on the device
  int64_t open(int64_t slot) const { return open_[slot]; }
  bool closed(int64_t slot) const { return tokens_[slot] > open_[slot]; }  // whether its memory holds something
  bool drop(int64_t slot, int64_t n);        // unread the last n tokens if the open chunk holds them; otherwise false, and nothing happens
  void dense(int64_t slot, float* s) const;  // S [H, K, V] as of now

  void save(int64_t slot, Blob& to) const;
  void load(int64_t slot, Blob& from);  // refuses another shape or a damaged blob by name, leaving the slot as it was

  // For operators: the slots that a call names, checked; where kernels find the memories; and the mark that n more tokens are in a slot's memory,
  // which has no open rows now.
  void check(const DeltaShape& shape, const Batch& batch) const;
  float* memories() const { return slot(0); }
  void closed_with(int64_t slot, int64_t n) { tokens_[slot] += n, open_[slot] = 0; }

  int64_t bytes_per_slot() const { return bytes_per_slot(shape_); }
  // For kernels of a decode step: slots lie bytes_per_slot() apart (delta_rule_kernels.h).
  float* memory() const { return slot(0); }
  const DeltaShape& shape() const { return shape_; }
  static int64_t bytes_per_slot(const DeltaShape& shape);

 private:
  friend Var delta_rule(Var, Var, Var, Var, Var, const DeltaShape&, const Batch&, DeltaState*);
  Var step(Var q, Var k, Var v, Var g, Var beta, int64_t columns, const DeviceStep& step);
  float* slot(int64_t i) const;
  Tensor whole(int64_t slot) const;
  template <class F>
  void parts(int64_t tokens, int64_t open, F f) const;

  DeltaShape shape_;
  Buffer memory_;                // (slots, heads, closed memory and open rows: delta_rule_kernels.h)
  std::vector<int64_t> tokens_;  // (slots)
  std::vector<int64_t> open_;    // (slots) how many of them are rows of the open chunk; it is closed when the next one comes
};

Var delta_rule(Var q, Var k, Var v, Var g, Var beta, const DeltaShape& shape, const Batch& batch, DeltaState* state);

}  // namespace k3

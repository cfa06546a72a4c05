#pragma once
// conv_silu: causal depthwise short convolution, then SiLU (K3 report eq. 2).
//
//   a_t[c] = sum_j w[c, j] x_{t - (width-1) + j}[c],   y = a sigmoid(a)         x, y (N, C); w (C, width) or (C, 1, width); width 1..8
//
// Tap width-1 multiplies the current token. Before a sequence's first token there are zeros: packed documents don't see each other. With a
// state the sequence goes on where its slot stopped, and the bits are the same however it was cut. A padding row reads and changes nothing,
// gives zeros, and is as if it were not there for the rows after it.
// Errors: another number of channels; a width beyond 8; a batch of other rows or slots than x and the state have; a state under a tape.
#include <cstdint>
#include <vector>

#include "k3/core/batch.h"
#include "k3/core/blob.h"
#include "k3/core/buffer.h"
#include "k3/tape/param.h"
#include "k3/tape/var.h"

namespace k3 {

// ConvState: what each slot's sequence must remember, its last inputs. width-1 are enough to go on; kUndo more let the last tokens be
// dropped (rejected guesses). Token p lies in row p mod history(), so nothing moves when a token is added.
class ConvState {
 public:
  static constexpr int64_t kUndo = 16;  // a delta-rule chunk: what that state can drop, this one can too

  ConvState(int64_t slots, int64_t channels, int64_t width, Device device = Device::cpu);

  int64_t slots() const { return int64_t(at_.size()); }
  int64_t channels() const { return channels_; }
  int64_t width() const { return width_; }
  int64_t history() const { return kUndo + width_ - 1; }
  int64_t tokens(int64_t slot) const;
  size_t bytes_per_slot() const { return size_t(history() * channels_) * sizeof(float); }

  void reset(int64_t slot);
  void copy(int64_t to, int64_t from);
  void drop(int64_t slot, int64_t n);  // forget the last n tokens; Error when the slot no longer holds what came before them
  void save(int64_t slot, Blob& blob) const;
  void load(int64_t slot, Blob& blob);

  // For the operator: the row of token p, and the mark that `n` more tokens were written.
  int64_t row(int64_t slot, int64_t token) const { return slot * history() + token % history(); }
  void advance(int64_t slot, int64_t n);
  Tensor rows() const { return buffer_.view(DType::f32, {slots() * history(), channels_}); }

 private:
  struct Span {
    int64_t first = 0, count = 0;  // tokens first..count-1 are in memory
  };
  void check(int64_t slot) const;
  int64_t channels_, width_;
  std::vector<Span> at_;
  Buffer buffer_;  // (slots, history, channels)
};

Var conv_silu(Var x, Param& w, const Batch& batch, ConvState* state = nullptr);
// Several, each by itself; on a GPU those of one shape without a state share their launches. `states`: one each, null for none.
std::vector<Var> conv_silu(const std::vector<Var>& xs, const std::vector<Param*>& ws, const Batch& batch, const std::vector<ConvState*>& states);

}  // namespace k3

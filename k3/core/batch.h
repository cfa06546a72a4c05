#pragma once
// Batch says where sequences begin in a flat run of tokens. Training, packed documents, prefill and decode differ in the Batch, not in the
// code: sequence s is rows cu_seqlens[s] .. cu_seqlens[s+1]-1 of every (N, ...) tensor.
#include <cstdint>
#include <vector>

#include "k3/core/device_step.h"

namespace k3 {

struct Batch {
  std::vector<int64_t> cu_seqlens{0};  // (S + 1), from 0 to N; a sequence may have no tokens in this call
  std::vector<int32_t> slots;          // (S) where each sequence's state lives; empty when there is no state (training)
  // Tokens that don't exist: rows with padding[i] != 0 touch no state, no expert, no loss and no statistic. Empty = none.
  std::vector<uint8_t> padding;
  // Decode on a GPU: every sequence is one row, and slots, padding and positions are looked up on the device; `slots` and `padding` stay empty.
  const DeviceStep* step = nullptr;

  static Batch of_lengths(const std::vector<int64_t>& lengths) {
    Batch b;
    for (int64_t n : lengths) b.cu_seqlens.push_back(b.cu_seqlens.back() + n);
    return b;
  }
  static Batch one(int64_t tokens) { return of_lengths({tokens}); }

  int64_t sequences() const { return int64_t(cu_seqlens.size()) - 1; }
  int64_t tokens() const { return cu_seqlens.back(); }
  int64_t begin(int64_t s) const { return cu_seqlens[s]; }
  int64_t length(int64_t s) const { return cu_seqlens[s + 1] - cu_seqlens[s]; }
};

}  // namespace k3

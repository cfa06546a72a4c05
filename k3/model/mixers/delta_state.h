#pragma once
// What a layer of the delta-rule family remembers: the memory, and the last inputs of its three convolutions.
#include "k3/model/mixer.h"
#include "k3/ops/conv/conv.h"
#include "k3/ops/delta_rule/delta_rule.h"

namespace k3 {

struct DeltaLayerState : State {
  ConvState q, k, v;
  DeltaState memory;
  DeltaLayerState(const DeltaShape& s, int64_t slots, int64_t width, Device device)
      : q(slots, s.heads * s.key_dim, width, device),
        k(slots, s.heads * s.key_dim, width, device),
        v(slots, s.heads * s.value_dim, width, device),
        memory(s, slots, device) {}
  int64_t tokens(int64_t slot) const override { return memory.tokens(slot); }
  void reset(int64_t slot) override { q.reset(slot), k.reset(slot), v.reset(slot), memory.reset(slot); }
  void copy(int64_t to, int64_t from) override { q.copy(to, from), k.copy(to, from), v.copy(to, from), memory.copy(to, from); }
  bool drop(int64_t slot, int64_t n) override {
    if (!memory.drop(slot, n)) return false;
    q.drop(slot, n), k.drop(slot, n), v.drop(slot, n);  // they remember longer than an open chunk
    return true;
  }
  void count(int64_t slot) override { q.advance(slot, 1), k.advance(slot, 1), v.advance(slot, 1), memory.count(slot); }
  int64_t open(int64_t slot) const override { return memory.open(slot); }
  void save(int64_t slot, Blob& to) const override { q.save(slot, to), k.save(slot, to), v.save(slot, to), memory.save(slot, to); }
  void load(int64_t slot, Blob& from) override { q.load(slot, from), k.load(slot, from), v.load(slot, from), memory.load(slot, from); }
  int64_t bytes_per_slot() const override { return memory.bytes_per_slot() + int64_t(q.bytes_per_slot() + k.bytes_per_slot() + v.bytes_per_slot()); }
  int64_t bytes_per_token() const override { return 0; }
  void dense(int64_t slot, std::vector<float>& out) const override { memory.dense(slot, out.data()); }
};

}  // namespace k3

#pragma once
// What attention with plain keys and values remembers: the rows themselves, whatever head count they have (gqa, mqa, mfa).
#include "k3/model/mixer.h"
#include "k3/ops/attention/cache.h"

namespace k3 {

struct KvState : State {
  KvCache cache;
  KvState(int64_t slots, const AttentionShape& s, Device device) : cache(slots, s, device) {}
  int64_t tokens(int64_t slot) const override { return cache.tokens(slot); }
  void reset(int64_t slot) override { cache.reset(slot); }
  void copy(int64_t to, int64_t from) override { cache.copy(to, from); }
  bool drop(int64_t slot, int64_t n) override { return n <= cache.tokens(slot) && (cache.truncate(slot, n), true); }
  void count(int64_t slot) override { cache.extend(slot, 1); }
  void save(int64_t slot, Blob& to) const override { cache.save(slot, to); }
  void load(int64_t slot, Blob& from) override { cache.load(slot, from); }
  int64_t bytes_per_slot() const override { return 0; }
  int64_t bytes_per_token() const override { return int64_t(cache.bytes_per_token()); }
};

}  // namespace k3

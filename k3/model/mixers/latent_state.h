#pragma once
// What an MLA layer remembers, and a constant that all who compute one need.
#include "k3/model/mixer.h"
#include "k3/ops/attention/cache.h"

namespace k3 {

// The published code takes its class default for the two latent norms, not rms_norm_eps (model.md 2.1).
inline constexpr float kLatentNormEps = 1e-6f;

struct LatentState : State {
  LatentCache cache;
  LatentState(int64_t slots, const MlaShape& s, bool keep_expanded, Device device) : cache(slots, s, keep_expanded, device) {}
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

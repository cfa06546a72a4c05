#pragma once
// The token caches of attention: what earlier tokens of a sequence left for later ones. A slot is one sequence.
//
//   LatentCache cache(slots, shape);
//   mla_attention(q, c, k_pe, kv_b, shape, batch, &cache);   // appends the batch's tokens to batch.slots, then attends
//   cache.copy(7, 3);                                          // slot 7 goes on from slot 3's tokens (a fork)
//
// Memory comes in blocks of 128 tokens, taken as a slot grows and given back by reset and truncate. A fork shares blocks: only the block
// that one of the two then writes is copied.
//
// Bytes a token (float32), and K3's 96 heads of 128+64 / 128 over rank 512:
//   KvCache                          4 * kv_heads * (key_dim + value_dim)
//   LatentCache                      4 * (rank + rope)                           2,304    deterministic mode expands the whole context anew in
//                                                                                        every call: 2*rank*heads*(nope+value) FLOPs a token
//   LatentCache, keep_expanded       4 * (rope + heads * (nope + value))        98,560    each token is expanded once; always the expanded form
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "k3/core/blob.h"
#include "k3/core/buffer.h"

namespace k3 {

struct AttentionShape {
  int64_t heads, kv_heads, key_dim, value_dim;
  float scale;
};

struct MlaShape {
  int64_t heads, nope, rope, value, rank;
  float scale;
};

// Slots of blocks; what a block holds is the business of the operators.
class TokenCache {
 public:
  static constexpr int64_t kBlockTokens = 128;  // also the tile of keys that the softmax runs over

  int64_t slots() const { return int64_t(slots_.size()); }
  int64_t tokens(int64_t slot) const { return at(slot).tokens; }
  const std::string& name() const { return name_; }
  size_t bytes_per_token() const { return sizeof(float) * size_t(floats_per_token_); }

  void reset(int64_t slot) { truncate(slot, tokens(slot)); }
  void copy(int64_t to, int64_t from);
  void truncate(int64_t slot, int64_t n);  // forgets the last n tokens
  void save(int64_t slot, Blob& to) const;
  void load(int64_t slot, Blob& from);  // throws Error when the bytes are of another kind or shape; the slot is then unchanged

  // For the operators: room for n more tokens, which count from now on; a block that another slot shares is copied before it is written.
  void extend(int64_t slot, int64_t n);
  // Where the kernels of a decode step find blocks: (slots, kTableBlocks) addresses on the device, up to date from the first time on. The host
  // extends a slot before each step.
  static constexpr int64_t kTableBlocks = 8192;  // a million tokens a slot
  float* const* table();
  float* block(int64_t slot, int64_t i) const { return reinterpret_cast<float*>(at(slot).blocks[size_t(i)]->data()); }

 protected:
  TokenCache(std::string name, int64_t slots, int64_t floats_per_token, Device device);

 private:
  struct Slot {
    int64_t tokens = 0;
    std::vector<std::shared_ptr<Buffer>> blocks;  // owners: the slots that have this prefix in common
  };
  const Slot& at(int64_t slot) const;
  Slot& at(int64_t slot) { return const_cast<Slot&>(std::as_const(*this).at(slot)); }
  std::shared_ptr<Buffer> new_block() const;

  std::string name_;  // kind and shape: what the saved bytes are called and errors say
  int64_t floats_per_token_;
  Device device_;
  void tell(int64_t slot, size_t from);
  std::vector<Slot> slots_;
  Buffer table_;
};

class KvCache : public TokenCache {
 public:
  KvCache(int64_t slots, const AttentionShape& shape, Device device = Device::cpu);
};

class LatentCache : public TokenCache {
 public:
  LatentCache(int64_t slots, const MlaShape& shape, bool keep_expanded = false, Device device = Device::cpu);
  bool keep_expanded() const { return keep_expanded_; }

 private:
  bool keep_expanded_;
};

}  // namespace k3

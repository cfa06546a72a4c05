#pragma once
// What attention and mla_attention have in common: keys and values per head that lie in tensors, a tile of keys at a time.
#include <vector>

#include "k3/core/batch.h"
#include "k3/ops/attention/attention_kernels.h"
#include "k3/ops/attention/cache.h"
#include "k3/tape/var.h"

namespace k3 {

// Which rows of a call are real, which sequence they belong to, what that sequence sees. With a cache the call's tokens join their slots.
struct AttentionPlan {
  std::vector<int32_t> rows;  // without padding, sequence by sequence
  std::vector<cpu::AttentionSequence> sequences;
  std::vector<cpu::QueryTile> query_tiles;
  std::vector<float*> blocks;
  double pairs = 0;     // (query token, key) pairs that are attended to
  int64_t longest = 0;  // the most queries of a sequence

  AttentionPlan(const Batch& batch, int64_t group, TokenCache* cache);
  void lend_blocks(Scratch& scratch, const cpu::KeyTiles& tiles);           // when there is no cache
  void fill(cpu::AttentionArgs& a, Device device, Scratch& scratch) const;  // the lists, where that device's kernels read them
};
std::vector<cpu::QueryTile> query_tiles(const std::vector<cpu::AttentionSequence>& sequences, int64_t group);

struct Expanded {
  const char* name;  // of the operator
  cpu::KeyTiles tiles;
  int64_t group;
  float scale;
  Var q, keys, values, shared;                            // shared may be empty
  int64_t key_head_stride, value_head_stride, values_at;  // head g's values begin at column values_at + g * value_head_stride
};
void expanded_attention(const Expanded& e, const Var& y, const Batch& batch, TokenCache* cache, Tensor* max_logit);

void check_attention_call(const char* name, const Context& c, int64_t tokens, int64_t heads, int64_t key_dim, int64_t value_dim, const Batch& batch,
                          const TokenCache* cache, const Tensor* max_logit);
void clear_padding(const Tensor& y, const Batch& batch);

}  // namespace k3

#pragma once
#include <cstdint>

#include "k3/core/isa.h"

namespace k3::cpu {

constexpr int64_t kAbsorbedRows = 64;    // rows (token, head) of one work item
constexpr int64_t kAbsorbedChunks = 16;  // a long context is cut into at most so many pieces that are attended to in parallel

struct AbsorbedSequence {
  int64_t tokens_at;                  // its tokens are rows[tokens_at ...] and q_latent[tokens_at ...]
  int64_t queries, first, blocks_at;  // as in AttentionSequence
  int64_t chunks;                     // pieces of the context; chunk c's row i is partial_at + c * queries * heads + i
  int64_t partial_at;
};
struct AbsorbedItem {
  int64_t sequence, first_row, chunk, t0, t1;  // key tiles t0 .. t1-1
};

struct AbsorbedArgs {
  int64_t heads, nope, rope, value, rank;
  float scale;
  const int32_t* rows;
  int64_t token_count;  // in rows
  const AbsorbedSequence* sequences;
  const AbsorbedItem* items;  // those of chunk 0 first
  int64_t item_count, first_chunk_items;
  const float* const* blocks;  // of the cache: (128, rank + rope), rows [c | k_pe]
  const float* q;              // (N, heads*(nope+rope))
  const void* kv_b;            // (heads*(nope+value), rank) float or bfloat16
  bool kv_b_is_bf16;
  float* q_latent;               // (token_count, heads, rank+rope) scratch: [W_UK^T q_nope | q_rope]; later sum p c in its first rank
  float* partial;                // (partial rows, rank) scratch
  float *partial_m, *partial_l;  // (partial rows)
  float* m;                      // (N, heads) the largest logit of each row
  float* y;                      // (N, heads*value)
};

struct AbsorbedKernels {
  void (*forward)(const AbsorbedArgs&);
};
K3_KERNEL_TABLE(AbsorbedKernels, absorbed)

}  // namespace k3::cpu

#pragma once
#include <cstdint>

#include "k3/core/isa.h"

namespace k3::cpu {

constexpr int64_t kKeyTile = 128;     // keys per softmax tile, counted from the sequence's start
constexpr int64_t kQueryTile = 64;    // query rows per work item; no bit depends on it
constexpr int64_t kMaxHeadDim = 256;  // key and value channels of a head: the kernels' tiles live on the stack

// A tile of keys and values, the same in a cache's block and in scratch. Keys lie transposed, so that lanes run over keys:
//   shared (shared, 128)   then for each kv head:   keys (own, 128), values (128, value)
// A head's key has `own` channels of its own followed by `shared` ones that all heads have in common (MLA's k_pe).
struct KeyTiles {
  int64_t kv_heads, own, shared, value;
  int64_t keys_at(int64_t g) const { return kKeyTile * (shared + g * (own + value)); }
  int64_t values_at(int64_t g) const { return keys_at(g) + kKeyTile * own; }
  int64_t floats() const { return kKeyTile * (shared + kv_heads * (own + value)); }
};

// One sequence's part of a call. Padding rows are not in it.
struct AttentionSequence {
  int64_t rows_at;    // its rows in q and y are rows[rows_at ...]
  int64_t queries;    // how many
  int64_t first;      // keys before this call: query i sees keys 0 .. first + i
  int64_t blocks_at;  // its tiles are blocks[blocks_at ...]
};
// kQueryTile rows of one sequence and one kv head. Row i of the sequence is token i / group, query head g * group + i % group.
struct QueryTile {
  int64_t sequence, first_row;
};

struct AttentionArgs {
  KeyTiles tiles;
  int64_t tokens, group;  // group: query heads that share a kv head
  float scale;
  const int32_t* rows;
  float* const* blocks;
  const AttentionSequence* sequences;
  int64_t sequence_count;
  const QueryTile* query_tiles;  // all of them, the longest first
  int64_t query_tile_count;

  const float* q;  // (tokens, heads*(own+shared))
  // Where a token's keys and values come from: head g of row n is at keys + n*key_stride + g*key_head_stride.
  const float *keys, *values, *shared;
  int64_t key_stride, key_head_stride, value_stride, value_head_stride, shared_stride;
  float* y;      // (tokens, heads*value)
  float *m, *l;  // (tokens, heads) running maximum and sum; in the end l is the log-sum-exp

  // backward
  const float* dy;         // (tokens, heads*value)
  float* d;                // (tokens, heads) scratch: rowsum(dy * y)
  float* dq;               // added to
  float *dkeys, *dvalues;  // added to, laid out as keys and values
  float* dshared;          // (kv_heads, tokens, shared) scratch, zero at first; its sum over heads is added to dshared_sum
  float* dshared_sum;      // (tokens, shared)
};

struct AttentionKernels {
  void (*append)(const AttentionArgs&);  // the call's keys and values into their tiles
  // Attends to tiles t0 .. t1-1; a row is finished with its last tile. Ranges must follow each other from 0 on.
  void (*forward)(const AttentionArgs&, int64_t t0, int64_t t1);
  void (*backward)(const AttentionArgs&);
  void (*max_logit)(const AttentionArgs&, float* out);  // (heads): the largest m of each head
};
K3_KERNEL_TABLE(AttentionKernels, attention)

}  // namespace k3::cpu

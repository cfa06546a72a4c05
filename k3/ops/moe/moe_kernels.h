#pragma once
#include <cstdint>

#include "k3/core/isa.h"

namespace k3::cpu {

constexpr int64_t kMaxTopK = 1024, kMaxGroups = 256;  // what the selection keeps on its stack

// Scores, choice and weights of each row, and the way back.
struct RouteArgs {
  const float* logits;     // (rows, experts)
  const float* bias;       // (experts)
  const uint8_t* padding;  // (rows), or null
  const int32_t* forced;   // (rows, top_k), or null
  int64_t rows, experts, top_k, groups, top_groups;
  bool softmax, renormalize;
  float scale;
  float* scores;           // (rows, experts)
  int32_t* chosen;         // (rows, top_k)
  float* weights;          // (rows, top_k)
  float *cutoff, *margin;  // (rows)
  const float* dweights;   // (rows, top_k)
  float* dlogits;          // (rows, experts), added to
};

// Moving rows of width d between tokens and the pairs (token, slot) sorted by expert. pairs <= tokens * slots.
struct DispatchArgs {
  const int32_t* pair_of_row;  // (pairs)          token * slots + slot
  const int32_t* row_of_pair;  // (tokens * slots) -1: not dispatched
  int64_t tokens, slots, pairs, d;
  const float* from;
  const float* weights;  // (tokens, slots); null: all 1
  float* to;
};

// Between the two halves of the experts' backward: dp = e.h, then e becomes dh = p e and h becomes p h. Rows first..last-1.
struct PairArgs {
  const int32_t* pair_of_row;  // (pairs)
  const float* weights;        // p (tokens * slots)
  int64_t first, last, m;
  float *e, *h;     // (pairs, m)
  float* dweights;  // (tokens * slots), added to
};

struct MoeKernels {
  void (*route_forward)(const RouteArgs&);
  void (*route_backward)(const RouteArgs&);
  void (*gather)(const DispatchArgs&);       // to[row] = from[token of row]
  void (*combine)(const DispatchArgs&);      // to[token] = sum over slots of weight * from[row], in slot order
  void (*combine_add)(const DispatchArgs&);  // to[token] += the same
  void (*weigh_pairs)(const PairArgs&);      // on the calling thread
};
K3_KERNEL_TABLE(MoeKernels, moe)

}  // namespace k3::cpu

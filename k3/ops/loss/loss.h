#pragma once
// cross_entropy: projection to the vocabulary and -log softmax of the target, in pieces of rows, so that logits are formed once and never
// stored whole.
//
//   l_n = head x_n,   loss_n = log sum_v e^{l_n[v]} - l_n[target_n]           x (N, d), head (V, d), targets i32 (N), kIgnored = not counted
//   dl_n[v] = weight (softmax(l_n)[v] - [v = target_n]),   dx_n += head^T dl_n,   dhead += sum_n dl_n x_n^T
//
// It is the root of the tape: there is no dy, so with a tape both gradients are added at once, during the call. `weight` is what one counted
// token weighs in the step's loss, usually 1 / (tokens of the whole step); micro-batches simply add up.
// Ignored rows cost nothing and may hold anything, NaN too. A row's loss has the same bits in any batch and piece, and equals
// log_probabilities() of sample.h.
// Scratch: a few megabytes, at least 32 rows of logits (21 MB for 163,840 tokens), whatever N is; on a GPU that multiplies in bfloat16 up to 2 GB of
// logits, in bfloat16.
// Errors: x and head of different widths, a target outside the vocabulary (with its position).
#include <cstdint>

#include "k3/tape/param.h"
#include "k3/tape/var.h"

namespace k3 {

inline constexpr int32_t kIgnored = -100;

struct Loss {
  Tensor per_token;   // f32 (N): -log p of the target, 0 where ignored
  double sum = 0;     // over the counted tokens, in row order; NaN while Context::later holds the losses back (read per_token)
  int64_t count = 0;  // counted tokens
};

Loss cross_entropy(Var x, Param& head, const Tensor& targets, float weight);

// The rows themselves, for generation: (N, V).
Tensor logits(Var x, Param& head);

}  // namespace k3

#pragma once
// Causal softmax attention in float32 over packed sequences, without position encoding.
//
//   attention       o_t = sum_{s<=t} p_ts v_s,   p_t = softmax_s(scale * q_t . k_s)            per head; query heads share key heads (GQA, MQA)
//     q (N, heads*key_dim)   k (N, kv_heads*key_dim)   v (N, kv_heads*value_dim)   ->  (N, heads*value_dim)
//     Query head h reads key head h / (heads / kv_heads). Passing one Var as k and v shares them; its gradient is the sum of both.
//
//   mla_attention   the same with keys and values made from a latent (model.md 4, training.md 7.1):
//     q (N, heads*(nope+rope))   c (N, rank), already normed   k_pe (N, rope), one for all heads   ->  (N, heads*value)
//     kv_b (heads*(nope+value), rank): head by head, nope rows W_UK, then value rows W_UV; float32, or bfloat16 without a tape
//       expanded   k_h = [W_UK c | k_pe],  v_h = W_UV c;                               training, prefill
//       absorbed   q_L = W_UK^T q_nope,  score = q_L . c + q_rope . k_pe,  o = W_UV sum p c;   decode: the cache is read once for all heads
//     With a tape or without a cache: expanded. With a cache: expanded in deterministic mode or when the cache keeps expanded rows;
//     otherwise, for each sequence, the form of fewer FLOPs.
//
// Softmax runs over tiles of 128 keys counted from the sequence's first token, in order. So a row's bits depend on its own sequence's tokens
// up to itself, whatever the cut into calls, the batch, the number of threads. (The absorbed form rounds differently, and which form a
// sequence gets depends on its part of the call: outside deterministic mode the cut shows in the last bits, batch and threads do not.)
// A score matrix never exists beyond one tile. Padding rows are no keys; their results and gradients are 0.
//
// max_logit, if given: (heads), set to the largest scale * q_t . k_s, s <= t, of this call's tokens (QK-clip, training.md 1.3); -infinity
// when there is no token.
//
// Errors: heads not a multiple of kv_heads; a tensor or a cache of another shape; a cache without slots in the batch; a cache with a tape.
#include "k3/core/batch.h"
#include "k3/ops/attention/cache.h"
#include "k3/tape/param.h"
#include "k3/tape/var.h"

namespace k3 {

Var attention(Var q, Var k, Var v, const AttentionShape& shape, const Batch& batch, KvCache* cache = nullptr, Tensor* max_logit = nullptr);
Var mla_attention(Var q, Var c, Var k_pe, Param& kv_b, const MlaShape& shape, const Batch& batch, LatentCache* cache = nullptr,
                  Tensor* max_logit = nullptr);

}  // namespace k3

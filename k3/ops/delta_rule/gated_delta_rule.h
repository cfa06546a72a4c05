#pragma once
// The gated delta rule with what surrounds it in a layer: the norms of q and k, the gate from its projection, beta from its logit.
//
//   gated_delta_rule(q, k, v, z, b) = delta_rule(l2_norm(q), l2_norm(k), v, log_decay(z), sigmoid(b))
//
//   q, k (N, H*K)   v (N, H*V)   b (N, H)   z (N, H*K): a gate a channel (KDA); (N, H): one a head; empty: none   result (N, H*V)
//
// The operators in turn, but on a GPU under Context::bf16_products with heads of 128 and a gate a channel: there kernels over chunks of 32 tokens do
// all of it from bfloat16 rows (delta_rule_cuda.h). They serve training, evaluation, and with a state every sequence that brings at least
// kChunkedTokens tokens.
// They close whatever chunk a slot has open, and leave none: its memory is that after the last token, and no token can be taken back. So a prompt
// that is cut after a multiple of 32 tokens gives the bits of the whole one, any other cut equal results to rounding.
#include <optional>
#include <string>

#include "k3/ops/delta_rule/delta_rule.h"
#include "k3/tape/param.h"

namespace k3 {

struct DecayGate {
  Param *A_log = nullptr, *dt_bias = nullptr;
  std::optional<float> lower_bound;  // bounded_decay; none: softplus_decay
  std::string record_as = {};        // the name that the log decays have for who listens (Context::record); empty: none
};
Var log_decay(Var z, const DecayGate& gate, int64_t heads);  // decay.h; empty for an empty z

constexpr int64_t kChunkedTokens = 32;
Var gated_delta_rule(Var q, Var k, Var v, Var z, Var b, const DecayGate& gate, const DeltaShape& shape, const Batch& batch, DeltaState* state);

}  // namespace k3

#pragma once
// Kimi Delta Attention in a decode step, from the merged projections to the gated norm:
//   q, k, v = silu(conv(..)), q and k normalised;  g = gate(f_b f);  beta = sigmoid(b);  o as in delta_rule.h;  y = rms_norm(o; norm) sigmoid(g_b g)
// with the states of ConvState and DeltaState: float32, in their layouts. The memory is written once in 16 tokens, a token's row else.
#include <cstdint>

#include "k3/core/device_step.h"

namespace k3::cuda {

struct StepConv {
  const float* x;  // (rows, H*D), dense
  const float* w;  // (H*D, width)
  float* ring;     // (slots, history, H*D)
};
struct StepKdaArgs {
  DeviceStep step;
  int rows, heads, dim, width, history;  // dim 16, 32, 64 or 128; width up to 8
  StepConv q, k, v;
  const float* f;   // (rows, D), or (rows, H*D) when there is no f_b
  const void* f_b;  // (H*D, D) bfloat16, or null
  const float* g;   // the same for the output gate
  const void* g_b;
  const float* beta;  // (rows, H) logits
  bool bounded;
  float bound;
  const float *A_log, *dt_bias;  // (H), (H*D)
  float scale, eps;
  const float* norm;  // (D)
  float* memory;      // the first slot's; delta_rule_kernels.h
  int64_t slot_floats;
  float* y;  // (rows, H*D)
};
const char* step_kda(const StepKdaArgs&, void* stream);

}  // namespace k3::cuda

#pragma once
// Latent attention in a decode step, absorbed: q_L = W_UK^T q_nope attends to the cached latents [c | k_pe] of LatentCache, y = W_UV o_L, gated.
// float32 but for the weights. A context is cut into kStepSplits pieces by its own length alone.
#include <cstdint>

#include "k3/core/device_step.h"

namespace k3::cuda {

constexpr int kStepSplits = 64;

struct StepLatentArgs {
  DeviceStep step;
  int rows, heads, nope, rope, value, rank;  // rank up to 512 and rope up to 64, multiples of 4
  float scale, eps;
  const float* q;       // (rows, heads*(nope+rope))
  const float* kv;      // (rows, rank+rope) as projected
  const float* gain;    // (rank) of the latent's norm
  const void* kv_b;     // (heads*(nope+value), rank) bfloat16
  const float* gate;    // (rows, heads*value) logits, or null
  float* const* table;  // (slots, table_blocks): blocks of 128 tokens, rows [c | k_pe]
  int64_t table_blocks;
  float* q_latent;  // workspace (rows, heads, rank+rope)
  float* partial;   // workspace (rows, heads, kStepSplits, rank+2): sum p c, maximum, sum p
  float* y;         // (rows, heads*value)
};
const char* step_latent(const StepLatentArgs&, void* stream);  // three launches

}  // namespace k3::cuda

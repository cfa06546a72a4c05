#pragma once
// Routed experts in a decode step, from the router's logits, whose sigmoids are the scores, to the weighted sum (moe.h), weights bfloat16 or MXFP4 as
// stored:
//   h_j = p_j f(W1_j z, W3_j z)      then      u = sum over slots j of W2_j h_j
// Nothing is sorted: each (row, slot) reads its expert, and rows that share one find it in the second-level cache.
#include <cstdint>

#include "k3/core/device_step.h"
#include "k3/ops/step/product_cuda.h"

namespace k3::cuda {

struct StepExpertMatrix {
  const void* const* values;               // (experts), on the device: (out, in) bfloat16, or (out, in / 2) codes
  const uint8_t* const* scales = nullptr;  // (experts): (out, in / 32); null: bfloat16
};
struct StepExpertsArgs {
  DeviceStep step;
  int rows, experts, top_k, latent, inner;  // top_k up to 64; up to 12000 experts
  bool renormalize;
  float scale;
  const float *logits, *bias;  // (rows, experts), (experts)
  StepInput z;                 // (rows, latent)
  Activation activation;
  StepExpertMatrix w1, w3, w2;
  float* chosen;  // (rows, top_k) numbers of experts
  float* h;       // (rows, top_k, inner)
  float* u;       // (rows, latent)
};
const char* step_experts(const StepExpertsArgs&, void* stream);  // two launches

}  // namespace k3::cuda

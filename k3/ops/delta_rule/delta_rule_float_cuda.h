#pragma once
// The gated delta rule in float32 on the GPU, token by token: any head up to 256 key channels, every gate, packed sequences, states in the layout of
// the CPU (delta_rule_kernels.h). The struct is the CPU's, with all pointers on the device (slots, read, open, first, rows, kept_first too); its
// `scratch` is not used. Fixed order: two runs give the same bits, and so does any cut of a sequence into calls. Null, or a sentence.
#include <cstdint>

#include "k3/ops/delta_rule/delta_rule_kernels.h"

namespace k3::cuda {

const char* delta_float_forward(const cpu::DeltaArgs&, void* stream);

struct DeltaFloatBackward {
  cpu::DeltaArgs a;
  int64_t tokens;   // that exist: first[S]
  int64_t longest;  // at least the largest number of tokens of a sequence
  float* du;        // workspace (N, H*V): gradient of what each token wrote
  float* d_kept;    // workspace, as kept: gradients of those memories
  float* dg;        // workspace (N, H*K) when gate_columns == 1; else null
};
const char* delta_float_backward(const DeltaFloatBackward&, void* stream);

}  // namespace k3::cuda

#pragma once
// Parity: a model against recorded tensors of another implementation, tensor by tensor.
//
// A recording is a safetensors file beside the model: input_ids [B, T] and any of logits, loss, greedy (20 prompt ids and their greedy
// continuation), hidden.l, attn_out.l, ffn_out.l, partial_sum.l, kda_state.l [B, H, K, V], expert_load.i (i-th MoE layer), routes.l [B*T, k];
// gradients of the mean next-token cross entropy under the names of the snapshot's file, in a file of their own.
#include <map>
#include <string>
#include <vector>

#include "k3/model/checkpoint.h"

namespace k3 {

struct ParityRow {
  std::string name;
  double relative = 0;  // |got - want| / |want|, L2
  double worst = 0;     // largest |got - want|
  int64_t at = -1;      // where
  double limit = 0;
  std::string note;
  bool good() const { return relative <= limit; }
};

struct ParityOptions {
  double rtol = 1e-4, gradient_rtol = 1e-3;
  bool force_routing = false;  // feed the recorded routes.l, so that a near tie does not turn into another network
  double tie = 1e-4;           // margins below are near ties
  // Set by allow_bf16(): limits of tensors by name where they are above rtol, and how far below the best a recorded greedy token may lie.
  std::map<std::string, double> limits = {};
  double greedy_gap = 0;
};

struct ParityReport {
  std::vector<ParityRow> rows;
  std::vector<std::string> ties;  // near-tied router choices, with their margins
  bool good = true;
};

ParityReport compare_forward(Model& model, const Snapshot& recording, const ParityOptions& options);
ParityReport compare_gradients(Model& model, const Snapshot& recording, const Snapshot& gradients, const ParityOptions& options);
// Limits for products that read bfloat16. `exact` is the model in float32 on the CPU: every matrix is rounded to bfloat16, and what that moves a
// tensor, to first order the sum of independent errors of half a unit in the last of 8 bits, times kBf16Factor is its limit: root 2 since the other
// operand of each product is rounded too, 2 for the operands of attention and experts that are no weights, and the rest for one draw being one
// draw. Without force_routing a choice of experts may flip, in `exact` as well, and routes and loads are not judged. `exact` stays rounded.
constexpr double kBf16Factor = 4;
void allow_bf16(Model& exact, const Snapshot& recording, const Snapshot* gradients, ParityOptions& options);
// Writes what this program computes for `input_ids` as a recording, routes included.
void record(Model& model, const Tensor& input_ids, const std::string& path);

}  // namespace k3

#pragma once
// MXFP4 matrices of all experts as bfloat16 in workspace, for products of many rows (prefill): one matrix kind of one layer at a time.
#include <cstdint>

namespace k3::cuda {

struct WidenExpertsArgs {
  const void* const* codes;   // (experts), on the device: (out, in / 2), low nibble first
  const void* const* scales;  // (experts): (out, in / 32)
  int64_t experts, out, in;   // in a multiple of 32
  void* to;                   // (experts, out, in) bfloat16
};
const char* widen_experts(const WidenExpertsArgs&, void* stream);

}  // namespace k3::cuda

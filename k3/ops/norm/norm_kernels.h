#pragma once
#include <cstdint>

#include "k3/core/isa.h"

namespace k3::cpu {

// One struct serves the three norms, forward and backward. A row is a token (rms_norm) or a (token, head) pair.
struct NormArgs {
  const float* x;     // (rows, d)
  const float* gate;  // (rows, d)   gated_rms_norm only
  const float* w;     // (d)         not for l2_norm
  float eps;
  int64_t rows, d;
  float* y;           // (rows, d)
  float* r;           // (rows)      1 / root, kept for the backward; may be null in inference
  const float* dy;    // (rows, d)
  float *dx, *dgate;  // (rows, d)   added to; may be null
  float* dw;          // (d)         added to; may be null
  float* partial;     // (row_blocks(rows), d) scratch for dw
};
constexpr int64_t kNormBlock = 64;  // rows that one call of parallel_for takes; also the grain of dw's fixed-order sum
constexpr int64_t norm_row_blocks(int64_t rows) { return (rows + kNormBlock - 1) / kNormBlock; }

struct NormKernels {
  void (*rms_norm_forward)(const NormArgs&);
  void (*rms_norm_backward)(const NormArgs&);
  void (*l2_norm_forward)(const NormArgs&);
  void (*l2_norm_backward)(const NormArgs&);
  void (*gated_rms_norm_forward)(const NormArgs&);
  void (*gated_rms_norm_backward)(const NormArgs&);
};
K3_KERNEL_TABLE(NormKernels, norm)

}  // namespace k3::cpu

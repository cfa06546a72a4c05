#pragma once
#include <cstdint>

#include "k3/core/isa.h"

namespace k3::cpu {

struct DepthMixArgs {
  const float* const* v;  // (n) sources, each (rows, d)
  int64_t n, rows, d;
  const float *w, *query;  // (d)
  float eps;
  float* u;            // (d) scratch: w * query
  float *r, *s, *a;    // (rows, n): 1 / root mean square, score, weight; kept for the backward
  float* h;            // (rows, d)
  const float* dh;     // (rows, d)
  float* ds;           // (rows, n) scratch
  float* const* dv;    // (n) added to
  float *dw, *dquery;  // (d) added to; may be null
  float* partial;      // (depth_mix_row_blocks(rows), d) scratch for du; null when dw and dquery are
};
constexpr int64_t kDepthMixBlock = 32;  // rows that one call of parallel_for takes in the backward; also the grain of du's fixed-order sum
constexpr int64_t depth_mix_row_blocks(int64_t rows) { return (rows + kDepthMixBlock - 1) / kDepthMixBlock; }

struct DepthMixKernels {
  void (*forward)(const DepthMixArgs&);
  void (*backward)(const DepthMixArgs&);
};
K3_KERNEL_TABLE(DepthMixKernels, depth_mix)

}  // namespace k3::cpu

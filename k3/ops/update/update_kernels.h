#pragma once
#include <cstdint>

#include "k3/core/isa.h"

namespace k3::cpu {

struct AdamWArgs {
  int64_t n;
  float* w;        // (n)
  const float* g;  // (n)
  float *m, *v;    // (n)
  float lr, beta1, beta2, eps, weight_decay, grad_scale;
  float correct_m, correct_v;  // 1 / (1 - beta^t)
};

// All run on the calling thread, on elements first..last-1 of what update.cpp cuts.
struct UpdateKernels {
  void (*adamw)(const AdamWArgs&);
  double (*sum_of_squares)(const float* x, int64_t n);
  void (*scale)(float* x, float s, int64_t n);
  // m = mu m + s g;  ahead = mu m + s g with Nesterov, else m
  void (*momentum)(float* m, const float* g, float* ahead, float mu, float s, bool nesterov, int64_t n);
  // z = b x + c z: a step's polynomial in X X^T but for the a on the diagonal
  void (*combine)(const float* x, float* z, float b, float c, int64_t n);
  // rows first..last-1 of c (m, m), right of the diagonal, from the columns below it
  void (*mirror)(float* c, int64_t m, int64_t first, int64_t last);
  // w -= step o + decay w
  void (*apply)(float* w, const float* o, float step, float decay, int64_t n);
};
K3_KERNEL_TABLE(UpdateKernels, update)

}  // namespace k3::cpu

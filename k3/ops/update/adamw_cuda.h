#pragma once
// AdamW on the GPU in one pass: float32 weight and moments, and the bf16 copy that the model reads. Null, or a sentence.
#include <cstdint>

namespace k3::cuda {

struct AdamwArgs {
  float *weight, *m, *v;  // (n)
  const float* grad;      // (n)
  void* copy;             // (n) bf16, or null
  int64_t n, step;        // step from 1
  float lr, beta1, beta2, eps, weight_decay, grad_scale;
};
const char* adamw(const AdamwArgs&, void* stream);

}  // namespace k3::cuda

#pragma once
// Gated units on the GPU, elementwise. bf16 or float32 (`wide`). Null, or a sentence about the argument that cannot be served.
#include <cstdint>

namespace k3::cuda {

// y = beta tanh(g / beta) sigmoid(g) * linear_beta tanh(u / linear_beta)
struct SituArgs {
  const void *gate, *up;  // (n)
  int64_t n;              // a multiple of 8
  float beta, linear_beta;
  bool wide;
  void* y;
  const void* dy;
  void *dgate, *dup;  // written
};
const char* situ_forward(const SituArgs&, void* stream);
const char* situ_backward(const SituArgs&, void* stream);

}  // namespace k3::cuda

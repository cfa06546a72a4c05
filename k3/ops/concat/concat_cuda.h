#pragma once
// concat on the GPU: a (n, p) and b (n, q) beside each other in y (n, p + q). Null, or a sentence about what cannot be served.
#include <cstdint>

namespace k3::cuda {

struct ConcatArgs {
  int64_t n, p, q;
  const float *a, *b;
  float* y;
  const float* dy;
  float *da, *db;  // added to
};
const char* concat_forward(const ConcatArgs&, void* stream);
const char* concat_backward(const ConcatArgs&, void* stream);

}  // namespace k3::cuda

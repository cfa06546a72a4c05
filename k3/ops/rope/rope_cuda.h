#pragma once
// rope on the GPU: float32, a block a token. Null, or a sentence about what cannot be served.
#include <cstdint>

namespace k3::cuda {

struct RopeArgs {
  int64_t rows, heads, plain, width;
  double theta;
  const int64_t* positions;  // (rows)
  const float* x;
  float* y;         // added to when `add`
  float direction;  // 1: by phi, -1: by -phi
  bool add;
};
const char* rope(const RopeArgs&, void* stream);

}  // namespace k3::cuda

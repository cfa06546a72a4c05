#pragma once
// RMS norm on the GPU, bf16 or float32 rows (`wide`: float32). Null, or a sentence about the argument that cannot be served.
#include <cstdint>

namespace k3::cuda {

struct RmsNormArgs {
  const void* x;    // (rows, d)
  const void* add;  // (rows, d) or null: x + add is normed, and stored in `sum` (rounded to the storage type first)
  void* sum;        // (rows, d); may be x
  const float* w;   // (d)
  float eps;
  int64_t rows;
  int d;  // a multiple of 8, at most 8192
  bool wide;
  void* y;         // (rows, d)
  const void* dy;  // (rows, d)
  void* dx;        // (rows, d) written
  float* dw;       // (d) added to
  float* partial;  // (264, d) workspace
};
const char* rms_norm_forward(const RmsNormArgs&, void* stream);
const char* rms_norm_backward(const RmsNormArgs&, void* stream);  // x is what was normed (the sum)

}  // namespace k3::cuda

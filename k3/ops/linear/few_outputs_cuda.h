#pragma once
// A float32 layer with few outputs (a router's): x is read once for y and once for dW, dx once. Fixed order. Null, or a sentence.
#include <cstdint>

namespace k3::cuda {

constexpr int64_t kFewOutputs = 32, kFewRows = 64;
constexpr int64_t few_outputs_parts(int64_t rows) { return (rows + kFewRows - 1) / kFewRows; }
struct FewOutputs {
  const float *x, *dy, *w;  // (rows, in), (rows, out), (out, in)
  float *y, *dx, *dw;
  int64_t rows, out, in;
  float* partial;  // (few_outputs_parts(rows), out, in) workspace of dw
};
const char* few_outputs_forward(const FewOutputs&, void* stream);              // y = x W^T; `in` a multiple of 4
const char* few_outputs_dx(const FewOutputs&, bool accumulate, void* stream);  // dx = or += dy W
const char* few_outputs_dw(const FewOutputs&, void* stream);                   // dW += dy^T x

}  // namespace k3::cuda

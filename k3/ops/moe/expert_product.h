#pragma once
// Products with expert weights: the one place that knows how such a weight is stored.
#include <vector>

#include "k3/core/tensor.h"

namespace k3 {

// y (rows, out) = x (rows, in) W^T, W (out, in) stored as float32 or bfloat16
struct ExpertProduct {
  int64_t rows;
  const float* x;
  const Tensor* w;
  float* y;
};

// Bfloat16 weights are widened kWidenRows rows at a time, by kWidenLanes workers with a buffer each: a part of the weight is then read from
// the cache, and the bits are those that a widened copy would give.
inline constexpr int64_t kWidenLanes = 64, kWidenRows = 64;

// All of them, over all threads, in the order of product.h. `widened` (kWidenLanes, kWidenRows * largest in); empty when all are float32.
void expert_products(const std::vector<ExpertProduct>& list, const Tensor& widened);

}  // namespace k3

#pragma once
#include "k3/core/isa.h"
#include "k3/ops/linear/product.h"

namespace k3::cpu {

// Y = X W^T or Y += X W^T for columns first..last-1 of Y, W read as it is stored (f32 or bf16; codes: codes_kernels.h).
struct WeightArgs {
  Stored stored;
  int64_t rows, in, first, last;
  const float* x;  // (rows, in), rows x_row apart
  int64_t x_row;
  const void* w;     // (out, in)
  int64_t w_stride;  // bytes from row to row
  float* y;          // (rows, out)
  int64_t ldy;
  bool accumulate;
};

struct ProductKernels {
  void (*ordered_product)(const Product&);    // any shape, the order of product.h, on the calling thread
  void (*weight_product)(const WeightArgs&);  // the same order
  // Rows first..last-1 as float32, one after another.
  void (*widen)(const Weight& w, int64_t first, int64_t last, float* to);
};
K3_KERNEL_TABLE(ProductKernels, product_kernels)

}  // namespace k3::cpu

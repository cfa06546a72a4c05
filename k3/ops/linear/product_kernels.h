#pragma once
#include "k3/core/isa.h"
#include "k3/ops/linear/product.h"

namespace k3::cpu {

struct ProductKernels {
  void (*ordered_product)(const Product&);  // any shape, the order of product.h, on the calling thread
};
K3_KERNEL_TABLE(ProductKernels, product_kernels)

}  // namespace k3::cpu

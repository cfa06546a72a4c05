#pragma once
// Products with weights that are codes times scales (mxfp4 and q8): x is made whole numbers, products are summed as such. Order: product.h.
#include "k3/core/isa.h"
#include "k3/ops/linear/product.h"

namespace k3::cpu {

// 128 inputs of a row of x as whole numbers n of 16 (q8) or 23 bits (mxfp4), cut into digits as the level's instructions like them; x[i] = n[i] *
// step. Inputs beyond the row are 0. Where codes are multiplied as unsigned numbers, code + offset, `correction` is offset times -sum of n.
struct alignas(64) FixedX {
  char digits[512];
  int32_t correction[16];  // mxfp4: of four groups of 32, each four times; q8: of eight groups of 16
  float step[16];          // likewise; mxfp4: half of it, as codes are doubled
};

struct FixArgs {
  Stored stored;
  int64_t rows, in;
  const float* x;  // (rows, in)
  FixedX* to;      // (rows, ceil(in / 128))
};

// Columns first..last-1 of Y = X W^T.
struct CodesArgs {
  Stored stored;
  int64_t rows, in, first, last;
  const FixedX* x;
  const void *w, *scale;
  float* y;  // (rows, out)
  int64_t ldy;
};

struct CodesKernels {
  void (*fix)(const FixArgs&);
  void (*codes_product)(const CodesArgs&);
};
K3_KERNEL_TABLE(CodesKernels, codes_kernels)

}  // namespace k3::cpu

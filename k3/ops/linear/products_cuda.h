#pragma once
// Many independent float32 products in one launch on the GPU: experts' rows, blocks of a matrix. Null, or a sentence.
//
// Each element is one chain of fused multiply-adds over k ascending, then C's old value is added when accumulating: its bits depend on the
// operands and k alone, not on the list, the tile or the number of rows.
#include <cstdint>

#include "k3/ops/linear/product.h"

namespace k3::cuda {

struct ListedProduct {
  Product p;       // device pointers
  bool b_is_bf16;  // b then points to bfloat16
  bool lower;      // only the tiles that touch the lower triangle are wanted (C symmetric; mirror it)
};

constexpr int64_t kProductTile = 64, kProductWideTile = 128;
constexpr int64_t product_tiles(int64_t m, int64_t n, bool wide) {
  int64_t t = wide ? kProductWideTile : kProductTile;
  return ((m + t - 1) / t) * ((n + t - 1) / t);
}

struct ProductListArgs {
  const ListedProduct* list;  // (count), on the device
  const int* tile_begins;     // (count + 1), on the device: sum of product_tiles() before each
  int count;
  int64_t tiles;  // blocks to launch: at least tile_begins[count]
  bool wide;      // tiles of 128 x 128: for large products
  bool narrow;    // operands rounded to bfloat16 on their way, products on the tensor units, sums in float32; needs `wide`
  bool split;     // with `narrow`: operands as sums of two bfloat16, three products; errors of 2^-16 in place of 2^-8
};
const char* products(const ProductListArgs&, void* stream);

}  // namespace k3::cuda

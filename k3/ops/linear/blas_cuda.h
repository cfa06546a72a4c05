#pragma once
// Products on the tensor cores through cuBLASLt: bfloat16 operands, float32 sums. Null, or a sentence about what cannot be served.
#include "k3/ops/linear/product.h"

namespace k3::cuda {

// The sizes, transposes and C are the Product's; its a and b are not read. Every matrix begins at 16 bytes, and so do its rows. The same
// shapes give the same bits; other numbers of rows may not.
// `often`: the shape comes again and again, as in training. Its second product then looks for the fastest of the library's algorithms among those
// that gave the bits of its first choice on random matrices; so what is chosen, by a clock, changes no bit.
const char* blas_product(const Product& p, const void* a_bf16, const void* b_bf16, void* stream, bool often = false);

// result = alpha op(A) op(B) + beta C, `count` of them, each matrix `step` elements behind the one before; all bfloat16, or the result and C float32.
// Sizes, transposes and leading dimensions are the Product's; its pointers and `accumulate` are not read. C may be the result.
struct BlasProducts {
  Product p;
  const void *a, *b, *c;
  void* result;
  bool bf16_result;
  float alpha = 1, beta = 0;
  int64_t count = 1, a_step = 0, b_step = 0, c_step = 0;
  bool often = false;
};
const char* blas_products(const BlasProducts&, void* stream);
const char* narrow(const float* from, void* to_bf16, int64_t n, void* stream);
// to (rows, count * n) bfloat16: row r is that of from[0], from[1], ..., each (rows, n), n a multiple of 8
constexpr int64_t kMostSides = 4;
struct Sides {
  const float* from[kMostSides];
};
const char* narrow_side_by_side(const Sides& from, int64_t count, int64_t rows, int64_t n, void* to, void* stream);

}  // namespace k3::cuda

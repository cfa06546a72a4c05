#pragma once
// Products on the tensor cores through cuBLASLt: bfloat16 operands, float32 sums and result. Null, or a sentence about what cannot be served.
#include "k3/ops/linear/product.h"

namespace k3::cuda {

// The sizes, transposes and C are the Product's; its a and b are not read. Every matrix begins at 16 bytes, and so do its rows. The same
// shapes give the same bits; other numbers of rows may not.
const char* blas_product(const Product& p, const void* a_bf16, const void* b_bf16, void* stream);
const char* narrow(const float* from, void* to_bf16, int64_t n, void* stream);

}  // namespace k3::cuda

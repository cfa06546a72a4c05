#pragma once
// The matrix product of product.h on the GPU, float32: pointers are of device memory. Each element is one chain of fused multiply-adds over
// k ascending (then added to what C held, when accumulating), whatever the tile; so a row of C has the same bits in any batch.
// Null, or a sentence about the argument that cannot be served.
#include "k3/ops/linear/product.h"

namespace k3::cuda {

const char* product(const Product& p, void* stream);
// B stored as bfloat16 (`b` of the Product is not read), widened on the way
const char* product_bf16(const Product& p, const void* b, void* stream);

// The same bits for up to kFewRowsMost rows and 64 columns or more, B transposed: bound by reading B, or by the chain over k where there are few
// columns. product() and product_bf16() come here by themselves.
constexpr int64_t kFewRowsMost = 16;
bool serves_few_rows(const Product& p, const void* b, bool bf16);
const char* few_rows(const Product& p, const void* b, bool bf16, void* stream);

}  // namespace k3::cuda

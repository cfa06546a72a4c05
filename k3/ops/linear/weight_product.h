#pragma once
// Products with weights as they are stored: Y = X W^T, X (rows, in) float32, W (out, in) as product.h lists them.
//
// Sums are in the orders of product.h; for bf16 the bits are those of the product with the weight widened to float32. The weight is read where it
// lies; only float32 weights with kFewRows rows of x and more go to oneDNN.
#include <vector>

#include "k3/core/tensor.h"
#include "k3/ops/linear/product.h"
#include "k3/tape/param.h"

namespace k3 {

inline constexpr int64_t kFewRows = 32;

// Rows first..last-1 of a parameter. Errors: a storage that is none of Stored's.
Weight weight_of(const Param& w, int64_t first, int64_t last);
inline Weight weight_of(const Param& w) { return weight_of(w, 0, w.value.rows()); }
Shape weight_shape(const Param& w);  // (out, in), whatever the storage
// A scale of 255 is not a number in MXFP4. Reads a weight's scales before its first use and never again, so that opening a snapshot reads none.
void check_scales(Param& w);
inline double stored_bytes(const Param& w) { return double(w.value.bytes()) + double(w.scale.bytes()); }

struct WeightProduct {
  int64_t rows;
  const float* x;  // (rows, in)
  Weight w;
  float* y;  // (rows, out)
};

// All of them, over all threads. room: of room_bytes() for each x in the list that meets codes; neighbours in the list with one x share it.
void weight_products(const std::vector<WeightProduct>& list, void* room = nullptr);
inline bool is_codes(Stored s) { return s == Stored::mxfp4 || s == Stored::q8; }
int64_t room_bytes(int64_t rows, int64_t in);

// Rows first..last-1 as float32, over all threads.
void widen(const Weight& w, int64_t first, int64_t last, float* to);

}  // namespace k3

#pragma once
// linear: y = x W^T, without bias (no linear layer of K3 has one).
//
//   x (N, in), W (out, in), y (N, out);   dx += dy W,  dW += dy^T x
//
// A weight may be stored as float32 or bfloat16 (read as float32; bfloat16 weights have no gradient). Summation order: product.h.
// Errors: x and W of different widths.
#include <vector>

#include "k3/tape/param.h"
#include "k3/tape/var.h"

namespace k3 {

Var linear(Var x, Param& w);
// Layers that read the same x. Where training multiplies in bfloat16 on a GPU and the weights have equal sizes and lie one behind the other (as they
// were declared), they are one product, forward and backward; else they are called one by one.
std::vector<Var> linears(Var x, const std::vector<Param*>& ws);
// Only rows a..b-1 of the weight: a part of a matrix that the checkpoint stores as one.
Var linear_rows(Var x, Param& w, int64_t a, int64_t b);

// Param::narrow from Param::value, if it is kept (GPU).
void renew_narrow(const Param& w);

}  // namespace k3

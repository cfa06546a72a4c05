#pragma once
// embedding: y_n = table[ids_n].
//
//   ids i32 (N), table (V, d) float32 or bfloat16 (read as float32; no gradient), y (N, d);   dtable[ids_n] += dy_n, in the order of n
//
// The ids are read again by the backward, so their memory must live until then.
// Errors: an id outside the table, with its position; a table of another type.
#include "k3/tape/param.h"
#include "k3/tape/var.h"

namespace k3 {

Var embedding(Context& c, const Tensor& ids, Param& table);

}  // namespace k3

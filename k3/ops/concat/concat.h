#pragma once
// concat: the columns of a, then those of b.   a (N, p), b (N, q) -> (N, p + q);   da += dy[:, :p], db += dy[:, p:]
// Errors: different numbers of rows.
#include "k3/tape/var.h"

namespace k3 {

Var concat(Var a, Var b);

}  // namespace k3

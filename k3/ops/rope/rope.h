#pragma once
// rope: rotary position encoding of part of each head (Su et al. 2021, arXiv 2104.09864), with interleaved pairs.
//
//   for every head, pair i of its last `width` channels, token at position t of its sequence:
//     phi = t theta^(-2i/width)
//     (y_2i, y_2i+1) = (cos phi x_2i - sin phi x_2i+1,  sin phi x_2i + cos phi x_2i+1)        the first `plain` channels pass unchanged
//   dx = the rotation by -phi of dy
//
//   x, y (N, heads * (plain + width)).   first (S): tokens that each sequence has read before this call; empty: none.
//
// K3 and Kimi-Linear rotate nothing; this is the alternative that they are compared with. An angle is made in double precision from the
// position alone, so a token's bits depend on no cut. Errors: columns that are no heads of that size, an odd width, theta not above 0.
#include <cstdint>
#include <vector>

#include "k3/core/batch.h"
#include "k3/tape/var.h"

namespace k3 {

struct RopeShape {
  int64_t heads, plain, width;
  double theta = 10000;
};
Var rope(Var x, const RopeShape& shape, const Batch& batch, const std::vector<int64_t>& first = {});

}  // namespace k3

#pragma once
// Log decay of the delta rule's memory, from the projection z: alpha = e^g.
//
//   bounded_decay    g = lower_bound sigmoid(e^{A_log[h]} (z + dt_bias))       in (lower_bound, 0): K3 report eq. 5, lower_bound = -5
//   softplus_decay   g = -e^{A_log[h]} softplus(z + dt_bias)                   in (-inf, 0): Kimi Linear, Gated DeltaNet
//
//   z, g (N, H*D), D >= 1 (Gated DeltaNet has one gate a head: D = 1); dt_bias H*D values; A_log at least H values: a checkpoint may pad it
//   (K3 stores 128 for 96 heads), and only the first H are read or given a gradient.
//
// Gates saturate without NaN: e^A_log is held below e^60 and g above -1e30.
// Errors: columns that don't divide into heads, sizes of dt_bias and A_log, a lower bound that is not negative.
#include <cstdint>

#include "k3/tape/param.h"
#include "k3/tape/var.h"

namespace k3 {

Var bounded_decay(Var z, Param& A_log, Param& dt_bias, int64_t heads, float lower_bound);
Var softplus_decay(Var z, Param& A_log, Param& dt_bias, int64_t heads);

}  // namespace k3

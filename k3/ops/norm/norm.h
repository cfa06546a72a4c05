#pragma once
// Root mean square and Euclidean norms of each row.
//
//   rms_norm        y = x / sqrt(mean(x^2) + eps) * w                      (N, d); w (d)
//   l2_norm         y = x / sqrt(sum(x^2) + eps) over each head of width d (N, H*d)       eps on the sum, inside the root
//   gated_rms_norm  y = rms_norm(o; w, eps) * sigmoid(gate), per head      (N, H*d); w (d) shared by the heads; K3 report eq. 6
//
// Statistics are float32. A row's result depends on that row only. Backwards add to dx, dw.
// Errors: a weight or gate of another width.
#include "k3/tape/param.h"
#include "k3/tape/var.h"

namespace k3 {

Var rms_norm(Var x, Param& w, float eps);
Var l2_norm(Var x, int64_t head_dim, float eps = 1e-6f);
Var gated_rms_norm(Var o, Var gate, Param& w, float eps);

}  // namespace k3

#pragma once
// Elementwise operators: the residual sum, SiLU, sigmoid, the output gate, and the gated linear units of a feed-forward layer.
//
//   add            y = a + b
//   silu           y = x sigmoid(x)
//   sigmoid        y = 1 / (1 + e^-x)
//   sigmoid_gate   y = o sigmoid(g)                                            K3 report eq. 7
//   glu            swiglu    y = silu(g) u
//                  situ      y = b tanh(g/b) sigmoid(g) b' tanh(u/b')          K3 report eq. 12; |y| < b b'
//                  clipped   y = silu(min(g, limit)) clamp(u, -limit, limit)   no gradient beyond the limit
//
// Any shapes of equal size; the result has the first one's. Backwards add.
// Errors: different sizes; a beta or a limit that is not positive.
#include "k3/ops/activation/activation_kernels.h"
#include "k3/tape/var.h"

namespace k3 {

Var add(Var a, Var b);
Var silu(Var x);
Var sigmoid(Var x);
Var sigmoid_gate(Var o, Var g);
Var glu(Var gate, Var up, const Activation& activation);

}  // namespace k3

#pragma once
#include <cstdint>

#include "k3/model/model.h"

namespace k3 {

// Initial values, a pure function of (config, seed) and each parameter's name (training.md 3.1, 4.4, 5.1).
//
//   matrices          N(0, initializer_range) from hidden_size 2000 on, below it N(0, 1/in): with 0.02 a small model's norms before the
//                     up-projection and after the delta rule would be bound by eps, which is another architecture (training.md 5.1a)
//   embedding         N(0, 1);  lm_head N(0, 1/hidden_size)
//   gains             1;  AttnRes queries 0 (the network starts as the plain residual one);  router bias 0
//   convolutions      U(-1/2, 1/2) for width 4, in general U(-width^-1/2, width^-1/2)
//   A_log             0 with the bounded gate, log U(1, 16) with the softplus gate
//   dt_bias           inverse softplus of dt = exp U(log 1e-3, log 1e-1)
void initialize(Model& model, uint64_t seed);

}  // namespace k3

#pragma once
// Attention over depth (AttnRes): each token mixes its own hidden vectors of earlier layers (model.md 2.3, training.md 3.1).
//
//   r_i = 1 / sqrt(mean(v_i^2) + eps)      s_i = r_i (v_i . (norm_weight * query))      a = softmax_i(s)      h = sum_i a_i v_i
//
// sources v_i (N, d); norm_weight (d); query (d), also as (1, d); h (N, d). The raw sources are mixed, not the normed ones; the softmax has no
// scale, bias or mask. One source: it is returned as it is (the same Var), nothing is computed. Any number of sources.
// A token's result depends on that token only. Backward adds to every source, norm_weight and query.
// Errors: no source; sources of different shapes; a weight or query of another width.
#include <vector>

#include "k3/tape/param.h"
#include "k3/tape/var.h"

namespace k3 {

Var depth_mix(const std::vector<Var>& sources, Param& norm_weight, Param& query, float eps);

}  // namespace k3

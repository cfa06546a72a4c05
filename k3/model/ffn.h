#pragma once
// Ffn: what a layer does along the channels of each token.
#include <cstdint>
#include <vector>

#include "k3/core/batch.h"
#include "k3/ops/moe/balance.h"
#include "k3/tape/var.h"

namespace k3 {

// What a router's forward leaves for the trainer, while Context::observe is on.
struct RouterWatch {
  Param* bias = nullptr;      // e_score_correction_bias
  std::vector<int64_t> load;  // (E) tokens that chose each expert since the trainer last looked
  MarginHistogram histogram;  // filled when it has bins
  bool keep_margins = false;
  std::vector<float> margins;  // (tokens, E) if keep_margins: cutoff minus score, for the exact quantile
  int64_t top_k = 0;
};

class Ffn {
 public:
  virtual ~Ffn() = default;
  virtual Var forward(Var x, const Batch& batch) = 0;  // (N, hidden_size) to (N, hidden_size)
  virtual RouterWatch* router() { return nullptr; }
  virtual void force_routes(const Tensor*) {}  // (N, k) i32 in place of the router's choice; null: its own again
};

}  // namespace k3

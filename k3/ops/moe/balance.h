#pragma once
// Quantile Balancing: the router bias that gives every expert its share (training.md 2, K3 report eq. 14 and appendix D).
//
// Token i chooses expert j iff its margin r_ij = cutoff_i - s_ij lies below b_j, so the k/E quantile of r_.j over all tokens of a step is
// the bias under which expert j is chosen q = tokens * k / E times. A histogram of margins estimates it; counts are integers, so
// micro-batches, ranks, order and threads don't matter. The bias of a step is frozen until the step ends.
//
//   MarginHistogram h(bias);                      // range from the bias in force
//   observe(h, routing, batch);                   // each micro-batch; skip when Context::recomputing
//   std::vector<float> next = quantile_bias(h, top_k);
//
// Padding rows count nowhere.
#include <cstdint>
#include <vector>

#include "k3/ops/moe/moe.h"

namespace k3 {

struct MarginHistogram {
  int64_t experts = 0, bins = 0;
  float lo = 0, hi = 0;         // min(bias) - 1, max(bias) + 1: no margin of sigmoid or softmax scores lies outside
  std::vector<int32_t> counts;  // (experts, bins)
  int64_t tokens = 0;

  MarginHistogram() = default;
  explicit MarginHistogram(const Tensor& bias, int64_t bins = 1000) { reset(bias, bins); }
  void reset(const Tensor& bias, int64_t bins = 1000);
  void add(const MarginHistogram& other);  // another rank's; same range
  float width() const { return (hi - lo) / float(bins); }
};

// load[j] += rows that chose expert j; on a GPU, as of observe(), when Context::read gives the counts
void count_load(const Routing& routing, const Batch& batch, int64_t* load);

// Counts bin floor((r_ij - lo) / w) for every real token and every expert. Nothing when the cutoff is -infinity (k = E).
void observe(MarginHistogram& histogram, const Routing& routing, const Batch& batch);

// The next bias, mean 0: the k/E quantile of each expert's margins, linear inside its bin. Empty histogram: an empty vector (keep the old).
std::vector<float> quantile_bias(const MarginHistogram& histogram, int64_t top_k);
// The same from the margins themselves: margins (tokens, experts); linear between order statistics when tokens * k / E is no integer.
std::vector<float> quantile_bias_exact(const std::vector<float>& margins, int64_t experts, int64_t top_k);
// b + step * sign(mean load - load): the older rule, for comparison.
std::vector<float> sign_bias(const std::vector<float>& bias, const std::vector<int64_t>& load, float step = 1e-3f);

}  // namespace k3

#pragma once
#include <cmath>
#include <cstdint>

#include "k3/train/options.h"

namespace k3 {

// Cosine with linear warm-up (training.md 1.5, K3 report 3.3). Step t of N counted from 0, Nw = ceil(warmup_ratio N):
//   t < Nw:  peak (t + 1) / Nw          else:  low + (peak - low) (1 + cos(pi (t - Nw) / (N - Nw))) / 2
inline double learning_rate(const TrainOptions& o, int64_t step) {
  const double peak = o.learning_rate, low = peak * o.min_learning_rate_ratio;
  const int64_t warmup = int64_t(std::ceil(o.warmup_ratio * double(o.steps)));
  if (step < warmup) return peak * double(step + 1) / double(warmup);
  const double part = double(step - warmup) / double(std::max<int64_t>(1, o.steps - warmup));
  return low + 0.5 * (peak - low) * (1 + std::cos(3.14159265358979323846 * part));
}

}  // namespace k3

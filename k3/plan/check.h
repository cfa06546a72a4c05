#pragma once
// How far the planner is from what others measured. Published figures, named by what was run; nothing here is tuned row by row.
#include <string>
#include <vector>

#include "k3/plan/number.h"

namespace k3::plan {

struct Target {
  std::string group, name, unit;
  double measured = 0, predicted = 0;
  double band = 0.25;  // allowed |error|
  double error() const { return predicted / measured - 1; }
  bool holds() const { return error() <= band && error() >= (factor ? 1 / (1 + band) - 1 : -band); }
  bool factor = false;  // the band is a factor: times or divided by (1 + band)
};
std::vector<Target> published_targets();
std::string table(const std::vector<Target>& targets);
double median_error(const std::vector<Target>& targets, const std::string& group);  // of |error|

// One token whose experts come from a slower tier (disk, another socket's memory): max(I/O, compute) + the rest.
double offload_seconds(double expert_bytes, double hit_rate, double byte_rate, double compute_seconds, double rest_seconds);

}  // namespace k3::plan

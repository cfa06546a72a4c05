#include "k3/plan/check.h"

#include <gtest/gtest.h>

namespace k3::plan {
namespace {

TEST(check, published_measurements_are_predicted_within_their_bands) {
  auto targets = published_targets();
  EXPECT_GE(targets.size(), 70u);
  for (const Target& t : targets)
    EXPECT_TRUE(t.holds()) << t.name << ": measured " << show(t.measured, t.unit) << ", predicted " << show(t.predicted, t.unit);
}

TEST(check, half_of_the_kernels_are_predicted_within_12_percent) { EXPECT_LE(median_error(published_targets(), "kernels"), 0.12); }

}  // namespace
}  // namespace k3::plan

#include "k3/plan/notes.h"

#include <gtest/gtest.h>

namespace k3::plan {
namespace {

Claim claim(const std::string& part) {
  for (const Claim& c : notes())
    if (c.claim.find(part) != std::string::npos) return c;
  ADD_FAILURE() << "no claim about " << part;
  return {};
}

TEST(notes, verdicts_follow_from_the_recomputed_numbers) {
  for (const char* part : {"d = 7167", "K3 is K2", "448-choose-8", "latent space"}) EXPECT_EQ(claim(part).verdict, Verdict::misprint) << part;
  for (const char* part : {"8 x 7168", "MHA 192/128", "H d_k d_v", "GQA8", "beta1 beta2"}) EXPECT_EQ(claim(part).verdict, Verdict::holds) << part;
  for (const char* part : {"up-projection", "N' = aN, K'", "stays about", "F / (3 m B)", "disappear", "t_exp", "small batch", "MFA", "MTP",
                           "one vector", "the gate", "6.3", "LatentMoE"})
    EXPECT_EQ(claim(part).verdict, Verdict::condition) << part;
}

TEST(notes, numbers_are_those_of_the_cost_model) {
  auto says = [](const std::string& part, const std::string& number) {
    EXPECT_NE(claim(part).recomputed.find(number), std::string::npos) << claim(part).recomputed;
  };
  says("up-projection", "x1.406"), says("up-projection", "122.7 M"), says("H d_k d_v", "1572864 against 51.4 M");
  says("GQA8", "3.556"), says("MFA", "0.889"), says("LatentMoE", "+9.7 %"), says("LatentMoE", "+37 %"), says("MTP", "181.3"),
      says("stays about", "x1.50");
  says("6.3", "batch 1 x2.1"), says("6.3", "3.86"), says("one vector", "3.584 MB"), says("one vector", "330 MB");
}

}  // namespace
}  // namespace k3::plan

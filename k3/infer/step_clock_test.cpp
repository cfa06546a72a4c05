#include "k3/infer/step_clock.h"

#include <gtest/gtest.h>

#include "k3/infer/session.h"
#include "k3/model/testing.h"

namespace k3 {
namespace {

// What a token reads, from the names of the parameters: matrices and convolutions once, of the routed experts the chosen ones.
std::map<std::string, double> weights_of(const Model& model) {
  const Config& c = model.config();
  std::map<std::string, double> bytes;
  for (const Param& p : model.params().all()) {
    const double size = 4 * double(p.shape.size());
    const bool matrix = p.role.kind != Role::Kind::fixed && p.shape.rank == 2 && p.shape[0] > 1;
    if (p.name.find(".experts.") != p.name.npos)
      bytes["experts"] += size * double(c.num_experts_per_token) / double(c.num_experts);
    else if (p.name == "lm_head.weight")
      bytes["head"] += size;
    else if (p.name == "model.embed_tokens.weight")
      bytes["rest"] += 4 * double(c.hidden_size);
    else if (p.name.find(".self_attn.") != p.name.npos && (matrix || p.name.find("_conv1d") != p.name.npos))
      bytes["attention"] += size;
    else if (p.name.find(".mlp.") != p.name.npos || p.name.find(".block_sparse_moe.") != p.name.npos)
      bytes["ffn"] += matrix ? size : 0;
  }
  return bytes;
}

class StepClockOf : public ::testing::TestWithParam<bool> {};

TEST_P(StepClockOf, a_token_reads_each_parts_weights_once_and_its_states) {
  Config c = GetParam() ? testing::tiny_k3() : testing::tiny_linear();
  c.finish();
  Model model(c);
  testing::fill(model);
  const int64_t before = 40;
  const std::vector<int32_t> ids = testing::some_ids(before + 1, c.vocab_size);
  for (bool deterministic : {true, false}) {
    StepClock clock;
    Session session(model, {.deterministic = deterministic, .listen = clock.listener()});
    session.read({ids.data(), size_t(before)});
    clock.clear();
    session.read({ids.data() + before, 1});
    EXPECT_EQ(clock.steps(), 1);
    std::map<std::string, double> want = weights_of(model);
    for (const std::string& mixer : c.mixer_of_layer)
      if (mixer == "kda") {
        const double channels = double(c.kda_num_heads * c.kda_head_dim);
        want["attention"] += 4 * (channels * double(c.kda_head_dim) + 3 * channels * double(c.short_conv_kernel_size - 1));
      } else {
        const double expanded = double(c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim) + c.qk_rope_head_dim);
        want["attention"] += 4 * double(before) * (deterministic ? expanded : double(c.kv_lora_rank + c.qk_rope_head_dim));
      }
    for (const PartTime& p : clock.parts()) {
      EXPECT_EQ(p.held, want[std::string(p.name)]) << p.name << (deterministic ? "" : ", absorbed");
      EXPECT_GT(p.seconds, 0) << p.name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(step_clock, StepClockOf, ::testing::Bool(), [](const auto& info) { return info.param ? "k3" : "kimi_linear"; });

TEST(step_clock, parts_add_up_to_the_time_of_the_steps) {
  Config c = testing::tiny_k3();
  c.finish();
  Model model(c);
  testing::fill(model);
  StepClock clock;
  Session session(model, {.prefill_chunk = 16, .listen = clock.listener()});
  const std::vector<int32_t> ids = testing::some_ids(64, c.vocab_size);
  const auto start = std::chrono::steady_clock::now();
  session.read(ids);
  const double all = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  EXPECT_EQ(clock.steps(), 4);
  EXPECT_LE(clock.total().seconds, all);
  EXPECT_GE(clock.total().seconds, 0.5 * all);  // the rest makes batches and copies logits; another program may take the core meanwhile
  EXPECT_GT(clock.total().dense_flops, 0);
  EXPECT_LE(clock.total().dense_seconds, clock.total().seconds);
}

TEST(step_clock, a_step_that_ended_in_an_error_is_not_counted_on) {
  StepClock clock;
  Context c;
  clock.listen(c);
  c.part("attention");
  clock.listen(c);  // the next step; the one before never said that it ended
  c.part("head");
  c.part("");
  EXPECT_EQ(clock.steps(), 1);
  EXPECT_EQ(clock.parts()[0].seconds, 0);
  EXPECT_THROW(c.part("tail"), Error);
}

}  // namespace
}  // namespace k3

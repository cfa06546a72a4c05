#include <sys/stat.h>

#include <algorithm>

#include "k3/train/schedule.h"
#include "k3/train/testing.h"

namespace k3 {
namespace {

using testing::put;
using testing::TemporaryFolder;
using testing::throws_error;

TEST(options, every_key_is_read_written_and_set) {
  TrainOptions defaults;
  const auto json = defaults.to_json();
  EXPECT_EQ(json.size(), TrainOptions::keys().size());
  for (const std::string& key : TrainOptions::keys()) {
    TrainOptions o;
    o.set(key, json[key].is_string() ? "x" : json[key].is_boolean() ? (json[key].get<bool>() ? "false" : "true") : "7");
    EXPECT_NE(o.to_json()[key], json[key]) << key;
    EXPECT_EQ(TrainOptions::parse(o.to_json()).to_json(), o.to_json()) << key;
    EXPECT_FALSE(Config::is_key(key)) << key << " is a key of the model too";
  }
}

TEST(options, an_unknown_key_names_the_nearest_of_both_kinds) {
  TemporaryFolder folder;
  put(folder / "c.json", testing::tiny_config().dump());
  auto with = [&](const std::string& a) { return [&folder, a] { load_run_config(folder / "c.json", {a}); }; };
  EXPECT_THAT(with("learning_rat=1"), throws_error("unknown key 'learning_rat'; the nearest known one is 'learning_rate'"));
  EXPECT_THAT(with("hiden_size=64"), throws_error("the nearest known one is 'hidden_size'"));
  EXPECT_THAT(with("steps"), throws_error("'steps' is not of the form key=value"));
  EXPECT_THAT(with("steps=many"), throws_error("steps must be a whole number, not \"many\""));
  EXPECT_THAT(with("steps=1.5"), throws_error("steps must be a whole number, not 1.5"));
  auto config = testing::tiny_config();
  config["train"]["stepz"] = 3;
  put(folder / "c.json", config.dump());
  EXPECT_THAT(with("steps=1"), throws_error("unknown key 'stepz' in train; the nearest known one is 'steps'"));
}

TEST(options, what_cannot_be_is_refused_with_the_reason) {
  auto with = [](const char* key, const char* value) {
    return [=] {
      TrainOptions o;
      o.set(key, value), o.finish();
    };
  };
  EXPECT_THAT(with("batch_tokens", "1000"), throws_error("batch_tokens 1000 must be a multiple of sequence_length 512; the nearest is 1024"));
  EXPECT_THAT(with("micro_batch_tokens", "100"), throws_error("micro_batch_tokens 100 must be a multiple"));
  EXPECT_THAT(with("steps", "0"), throws_error("steps is 0 but must be at least 1"));
  EXPECT_THAT(with("seed", "18446744073709551615"), throws_error("seed is 18446744073709551615, which does not fit into 64 bits"));
  EXPECT_THAT(with("balance_bins", "1000001"), throws_error("balance_bins is 1000001 but must lie between 2 and 1000000"));
  EXPECT_THAT(with("optimizer", "moun"), throws_error("did you mean 'muon'"));
  EXPECT_THAT(with("balance", "quantil"), throws_error("did you mean 'quantile'"));
  EXPECT_THAT(with("held_out", "1"), throws_error("held_out is 1 but must lie between 0 and 0.9"));
  EXPECT_THAT(with("muon_momentum", "1"), throws_error("muon_momentum is 1"));
}

TEST(options, a_pipe_in_place_of_a_config_is_refused_and_not_waited_for) {
  TemporaryFolder folder;
  ASSERT_EQ(mkfifo((folder / "c.json").c_str(), 0600), 0);
  EXPECT_THAT([&] { load_run_config(folder / "c.json", {}); }, throws_error("c.json is not a regular file"));
}

TEST(options, set_reaches_model_and_training) {
  TemporaryFolder folder;
  put(folder / "c.json", testing::tiny_config().dump());
  RunConfig run = load_run_config(folder / "c.json", {"hidden_size=32", "steps=3", "head_dim=4", "document_separator=7"});
  EXPECT_EQ(run.model.hidden_size, 32);
  EXPECT_EQ(run.model.kda_head_dim, 4);
  EXPECT_EQ(run.train.steps, 3);
  EXPECT_EQ(run.train.document_separator, "7");
}

TEST(schedule, warms_up_linearly_then_falls_as_a_cosine) {
  TrainOptions o;
  o.steps = 1000, o.learning_rate = 1, o.min_learning_rate_ratio = 0.1, o.warmup_ratio = 0.01;
  EXPECT_DOUBLE_EQ(learning_rate(o, 0), 0.1);
  EXPECT_DOUBLE_EQ(learning_rate(o, 9), 1.0);
  EXPECT_DOUBLE_EQ(learning_rate(o, 10), 1.0);
  EXPECT_NEAR(learning_rate(o, 505), 0.55, 1e-12);
  EXPECT_NEAR(learning_rate(o, 999), 0.1, 1e-5);
  for (int64_t t = 11; t < 1000; ++t) EXPECT_LT(learning_rate(o, t), learning_rate(o, t - 1));
  o.warmup_ratio = 0;
  EXPECT_DOUBLE_EQ(learning_rate(o, 0), 1.0);
  o.steps = 1, o.warmup_ratio = 0.01;
  EXPECT_DOUBLE_EQ(learning_rate(o, 0), 1.0);
}

}  // namespace
}  // namespace k3

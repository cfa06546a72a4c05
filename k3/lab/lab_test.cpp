// The lab itself: tasks ask what they say, finished runs are kept, a page needs nothing else, and what cannot be is refused by name.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <map>

#include "k3/core/testing.h"
#include "k3/core/error.h"
#include "k3/core/file.h"
#include "k3/core/gpu.h"
#include "k3/core/threads.h"
#include "k3/lab/learn.h"
#include "k3/lab/runner.h"
#include "k3/ops/loss/loss.h"

namespace k3::lab {
namespace {

using testing::TemporaryFolder;
using testing::throws_error;

struct Sequence {
  std::vector<int32_t> ids, targets;
  Sequence(const Task& task, int64_t length, uint64_t index = 0) { task.make(1, index, length, ids, targets); }
  int64_t asked() const {
    int64_t n = 0;
    for (int32_t t : targets) n += t >= 0;
    return n;
  }
};

TEST(tasks, every_sequence_has_its_length_and_known_ids) {
  for (const char* name : {"palindrome", "mqar", "stack", "language"})
    for (int64_t length : {16, 17, 63, 128}) {
      const Task task{name, 32};
      Sequence s(task, length);
      ASSERT_EQ(int64_t(s.ids.size()), length) << name;
      ASSERT_EQ(int64_t(s.targets.size()), length) << name;
      EXPECT_GT(s.asked(), 0) << name;
      for (int32_t id : s.ids) EXPECT_TRUE(id >= 0 && id < task.vocabulary()) << name << " " << id;
      EXPECT_EQ(Sequence(task, length).ids, s.ids) << name;
      EXPECT_NE(Sequence(task, length, 1).ids, s.ids) << name;
    }
}

TEST(tasks, a_palindrome_asks_for_the_letter_before_the_last_one) {
  Sequence s({"palindrome", 26}, 21);
  EXPECT_EQ(s.ids[10], 26);
  EXPECT_EQ(s.asked(), 9);
  for (int i = 11; i < 20; ++i) EXPECT_EQ(s.targets[size_t(i)], s.ids[size_t(20 - i - 1)]) << i;
}

TEST(tasks, mqar_asks_for_the_value_of_the_key_at_its_own_position) {
  Sequence s({"mqar", 64}, 64);
  std::map<int32_t, int32_t> value;
  for (size_t i = 0; i < 32; i += 2) EXPECT_TRUE(value.emplace(s.ids[i], s.ids[i + 1]).second) << "keys differ";
  for (size_t i = 33; i < 64; ++i) EXPECT_EQ(s.targets[i], value.at(s.ids[i]));
}

TEST(tasks, a_pop_asks_for_what_was_pushed_last) {
  Sequence s({"stack", 16}, 300);
  std::map<int32_t, std::vector<int32_t>> stacks;
  for (size_t i = 0; i + 3 <= 300; i += 3) {
    std::vector<int32_t>& stack = stacks[s.ids[i + 1]];
    if (s.ids[i] == 16) {
      stack.push_back(s.ids[i + 2]);
      EXPECT_EQ(s.targets[i + 1], kIgnored);
    } else {
      ASSERT_FALSE(stack.empty());
      EXPECT_EQ(s.targets[i + 1], stack.back());
      stack.pop_back();
    }
  }
}

Job tiny() {
  Job job;
  job.model = {"num_hidden_layers=1", "hidden_size=16", "intermediate_size=24", "num_heads=1", "head_dim=16"};
  job.task = {"language", 8}, job.length = 16, job.sequences = 4, job.steps = 6, job.looks = 2;
  return job;
}

TEST(learn, loss_falls_and_one_thread_equals_many) {
  Job job = tiny();
  job.steps = 40;
  const int before = thread_count();
  set_thread_count(1);
  json one = learn(job, [](double) {});
  set_thread_count(4);
  json four = learn(job, [](double) {});
  set_thread_count(before);
  EXPECT_EQ(one, four);
  EXPECT_LT(one["loss"][1].get<double>(), one["loss"][0].get<double>());
  EXPECT_EQ(one["steps"], json({20, 40}));
}

// The same job on both devices, with everything that a job can ask for; rounding grows over six steps. Two runs on the GPU: the same bits.
TEST(learn, a_job_on_the_gpu_goes_as_on_the_cpu) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  Job job = tiny();
  job.model.insert(job.model.end(), {"num_hidden_layers=3", "attn_res_block_size=2"});
  job.probe = true, job.lengths = {32}, job.init_scale = 0.5;
  const json cpu = learn(job, [](double) {});
  job.device = Device::cuda;
  const json gpu = learn(job, [](double) {});
  EXPECT_EQ(gpu, learn(job, [](double) {}));
  for (size_t i = 0; i < cpu["loss"].size(); ++i) EXPECT_NEAR(gpu["loss"][i].get<double>(), cpu["loss"][i].get<double>(), 2e-3);
  EXPECT_NEAR(gpu["at_length"]["32"]["loss"].get<double>(), cpu["at_length"]["32"]["loss"].get<double>(), 2e-3);
  for (const char* key : {"hidden_rms", "sublayer_rms", "gradient"})
    for (size_t i = 0; i < cpu["probe"][key].size(); ++i) {
      const double want = cpu["probe"][key][i].get<double>();
      EXPECT_NEAR(gpu["probe"][key][i].get<double>(), want, 2e-2 * want) << key << " " << i;
    }
}

TEST(learn, side_by_side_equals_one_after_the_other) {
  auto of_seed = [](int64_t seed) {
    Job job = tiny();
    job.seed = seed;
    return learn(job, [](double) {});
  };
  std::vector<json> together(4);
  const int before = thread_count();
  set_thread_count(4);
  parallel_for(4, [&](int64_t i) { together[size_t(i)] = of_seed(i); });
  set_thread_count(before);
  for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(together[size_t(i)], of_seed(i)) << i;
  EXPECT_NE(together[0], together[1]);
}

TEST(learn, attention_over_depth_that_has_learnt_nothing_weighs_all_sources_alike) {
  Job job = tiny();
  job.model.insert(job.model.end(), {"num_hidden_layers=3", "attn_res_block_size=2"});
  job.train = {"learning_rate=1e-9"}, job.probe = true;
  const json rows = learn(job, [](double) {})["probe"]["depth_weights"];
  const std::vector<size_t> sources = {1, 2, 2, 2, 2, 3, 3};  // blocks open at layers 0 and 2; the output reads last
  ASSERT_EQ(rows.size(), sources.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    ASSERT_EQ(rows[i].size(), sources[i]) << i;
    for (const json& w : rows[i]) EXPECT_NEAR(w.get<double>(), 1 / double(sources[i]), 1e-4);
  }
}

TEST(learn, equal_parameters_are_checked_by_the_counters) {
  EXPECT_EQ(held_equal("parameters", {{"a", 100}, {"b", 101}}, 0.02), "Equal parameters, by the counters: a 100, b 101 (within 1.0 %).");
  EXPECT_THAT([] { held_equal("parameters", {{"a", 100}, {"b", 120}}, 0.02); }, throws_error("differ by 20.0 %"));
  EXPECT_GT(size_of(tiny()).flops, 0);
}

TEST(lab, an_unknown_experiment_names_the_nearest) {
  EXPECT_THAT([] { find("balanse"); }, throws_error("the nearest is 'balance'"));
  EXPECT_EQ(experiments().size(), 11u);
}

TEST(lab, what_cannot_run_is_refused_before_anything_runs) {
  const TemporaryFolder folder;
  const std::string out = folder / "out";
  EXPECT_THAT(
      [&] {
        run({{"outliers", "recal"}, {.quick = true}, out}, {});
      },
      throws_error("there is no experiment 'recal'; the nearest is 'recall'"));
  EXPECT_THAT([&] { run({{}, {.quick = true}, out}, {}); }, throws_error("name an experiment, or all"));
  EXPECT_THAT([&] { run({{"outliers"}, {.quick = true, .seeds = 0}, out}, {}); }, throws_error("--seeds is 0; it must be 1 to 100"));
  EXPECT_FALSE(std::filesystem::exists(out));
}

TEST(lab, every_experiment_states_units_with_names_of_their_own) {
  for (const Experiment& e : experiments())
    for (bool quick : {true, false}) {
      std::map<std::string, int> keys;
      for (const Unit& u : e.units({.quick = quick, .seeds = 2})) {
        EXPECT_EQ(keys[u.key]++, 0) << e.name << " " << u.key;
        EXPECT_EQ(u.key.find_first_of("/\\"), std::string::npos) << e.name << " " << u.key << " is a file name";
        EXPECT_GT(u.work, 0);
      }
      EXPECT_FALSE(keys.empty()) << e.name;
    }
}

TEST(lab, finished_runs_are_kept_and_give_the_same_report) {
  const TemporaryFolder folder;
  const std::string out = folder / "out";
  std::vector<std::string> lines;
  const Request request{{"outliers"}, {.quick = true, .seeds = 1}, out};
  const Hooks hooks{.line = [&](const std::string& s) { lines.push_back(s); }};
  run(request, hooks);
  const std::string path = out + "/outliers/", page = read_file(path + "report.html"), stored = read_file(path + "runs/growth.json");
  run(request, hooks);
  EXPECT_EQ(lines[2], "1 finished runs kept");
  EXPECT_EQ(read_file(path + "runs/growth.json"), stored);
  EXPECT_EQ(read_file(path + "report.html"), page);
  EXPECT_LT(page.size(), 300'000u);
  EXPECT_EQ(page.find("http"), std::string::npos);
  EXPECT_NE(page.find("<svg"), std::string::npos);
  // a run of other settings is no run of this one
  json other = json::parse(stored);
  other["what"]["seeds"] = 99;
  write_file(path + "runs/growth.json", other.dump());
  lines.clear();
  run(request, hooks);
  EXPECT_EQ(lines.size(), 2u);
  EXPECT_EQ(json::parse(read_file(path + "runs/growth.json"))["what"]["seeds"], 1);
}

TEST(lab, asked_to_stop_it_keeps_what_is_done) {
  const TemporaryFolder folder;
  const std::string out = folder / "out";
  EXPECT_THAT(
      [&] {
        run({{"outliers"}, {.quick = true, .seeds = 1}, out}, {.stop = [] { return true; }});
      },
      throws_error("the same command goes on"));
}

TEST(identity, every_statement_holds) {
  for (const Unit& u : kIdentity.units({}))
    for (const json& x : u.run([](double) {})) EXPECT_LE(x["error"].get<double>(), x["limit"].get<double>()) << x["name"];
}

}  // namespace
}  // namespace k3::lab

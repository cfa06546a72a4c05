// Runs as a whole: stopping, going on, what is refused, and what a kill leaves behind.
#include <sys/file.h>
#include <fcntl.h>

#include "k3/core/gpu.h"
#include "k3/core/threads.h"
#include "k3/model/checkpoint.h"
#include "k3/train/report.h"
#include "k3/train/run.h"
#include "k3/train/testing.h"

namespace k3 {
namespace {

namespace fs = std::filesystem;
using testing::get;
using ::testing::HasSubstr;
using testing::put;
using testing::TemporaryFolder;
using testing::throws_error;
using Mode = RunRequest::Mode;

struct Place {
  TemporaryFolder folder;
  std::string said;
  Place() {
    put(folder / "config.json", testing::tiny_config().dump());
    put(folder / "data/text", testing::tiny_text());
  }
  RunRequest request(Mode mode = Mode::start, const std::string& out = "out") const {
    return {folder / "config.json", {}, {folder / "data"}, folder / out, mode, 0};
  }
  // Runs, and stops after `steps` more steps if that is less than all.
  void go(const RunRequest& r, int steps = 1000) {
    said.clear();
    train(r, {.line = [&](const std::string& s) { said += s + "\n"; }, .stop = [&] { return --steps <= 0; }});
  }
  std::string out(const std::string& file) const { return folder / ("out/" + file); }
};

std::vector<double> losses(const std::string& metrics) {
  std::vector<double> all;
  std::string text = get(metrics);
  for (size_t at = 0; at < text.size(); at = text.find('\n', at) + 1)
    all.push_back(nlohmann::json::parse(text.substr(at, text.find('\n', at) - at))["loss"]);
  return all;
}

class run_on : public ::testing::TestWithParam<Device> {};
INSTANTIATE_TEST_SUITE_P(devices, run_on, ::testing::Values(Device::cpu, Device::cuda),
                         [](const auto& info) { return info.param == Device::cpu ? "cpu" : "cuda"; });

void expect_same_run(const std::string& a, const std::string& b) {
  for (const char* file : {"model.safetensors", "optimizer.safetensors", "config.json"})
    EXPECT_TRUE(get(a + "/step-000008/" + file) == get(b + "/step-000008/" + file)) << file;
  EXPECT_EQ(losses(a + "/metrics.jsonl"), losses(b + "/metrics.jsonl"));
}

TEST_P(run_on, resumed_run_is_bitwise_equal) {
  if (const std::string why = gpu::why_not(); GetParam() == Device::cuda && !why.empty()) GTEST_SKIP() << why;
  Place p;
  auto request = [&](Mode mode = Mode::start, const std::string& out = "out") {
    RunRequest r = p.request(mode, out);
    r.device = GetParam();
    return r;
  };
  p.go(request(Mode::start, "straight"));
  p.go(request(), 3);
  EXPECT_THAT(p.said, HasSubstr("stopped after step 3 of 8"));
  RunRequest bare{"", {}, {}, p.folder / "out", Mode::resume, 0, GetParam()};  // all it needs is in the folder
  p.go(bare, 2);
  EXPECT_THAT(p.said, HasSubstr("going on from step 3 of 8"));
  p.go(request(Mode::resume_or_start));
  EXPECT_THAT(p.said, HasSubstr("going on from step 5 of 8"));
  expect_same_run(p.folder / "straight", p.folder / "out");
}

// The same tokens in the same order on both devices: the losses go the same way, to rounding that eight steps make larger.
TEST(run, a_run_on_the_gpu_goes_as_on_the_cpu) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  Place p;
  p.go(p.request(Mode::start, "cpu"));
  RunRequest r = p.request(Mode::start, "cuda");
  r.device = Device::cuda;
  p.go(r);
  const auto want = losses(p.folder / "cpu/metrics.jsonl"), got = losses(p.folder / "cuda/metrics.jsonl");
  ASSERT_EQ(got.size(), want.size());
  EXPECT_NEAR(got[0], want[0], 1e-5 * want[0]);
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], 2e-3 * want[i]) << "step " << i + 1;
}

TEST(run, what_a_kill_leaves_half_written_is_ignored_and_said) {
  Place p;
  p.go(p.request(Mode::start, "straight"));
  p.go(p.request(), 4);  // saved at 3 and 4
  put(p.out("step-000006.part/model.safetensors"), "half");
  put(p.out("step-000002.old.part/config.json"), "{}");
  put(p.out("tokens.bin.part"), "half"), put(p.out("LATEST.part"), "step");
  put(p.out("metrics.jsonl"), get(p.out("metrics.jsonl")) + "{\"step\":5,\"loss\":0}\n{\"step\":6,\"lo");
  fs::remove(p.out("LATEST"));  // killed after the folder's rename
  p.go(p.request(Mode::resume));
  EXPECT_THAT(p.said, HasSubstr("step-000006.part was left half-written by a run that was stopped; it is ignored"));
  EXPECT_THAT(p.said, HasSubstr("going on from step 4 of 8"));
  for (const char* gone : {"step-000006.part", "step-000002.old.part", "tokens.bin.part", "LATEST.part"})
    EXPECT_FALSE(fs::exists(p.out(gone))) << gone;
  expect_same_run(p.folder / "straight", p.folder / "out");
}

TEST(run, the_two_newest_checkpoints_stay_and_are_published_snapshots) {
  Place p;
  p.go(p.request());
  EXPECT_FALSE(fs::exists(p.out("step-000003")));
  EXPECT_TRUE(fs::exists(p.out("step-000006")) && fs::exists(p.out("step-000008")));
  EXPECT_EQ(resolve_snapshot(p.folder / "out"), p.out("step-000008"));
  Config c = Config::load(p.out("step-000008"));
  c.finish();
  EXPECT_EQ(c.vocab_size, 512);
  EXPECT_EQ(c.eos_token_id, std::vector<int64_t>{257});
  Model model(c);
  Snapshot snapshot(p.out("step-000008"));
  load(model, snapshot, {});
  EXPECT_EQ(Tokenizer::load(p.out("step-000008")).hash(), Tokenizer::bytes().hash());
}

TEST(run, a_finished_run_goes_on_nowhere_and_loses_nothing) {
  Place p;
  p.go(p.request());
  const std::string before = get(p.out("step-000008/model.safetensors"));
  p.go(p.request(Mode::resume));
  EXPECT_THAT(p.said, HasSubstr("done: step 8"));
  EXPECT_EQ(get(p.out("step-000008/model.safetensors")), before);
  EXPECT_EQ(losses(p.out("metrics.jsonl")).size(), 8u);
}

TEST(run, another_micro_batch_is_allowed_and_said) {
  Place p;
  p.go(p.request(), 3);
  RunRequest r = p.request(Mode::resume);
  r.assignments = {"micro_batch_tokens=64", "recompute=true"};
  p.go(r);
  EXPECT_THAT(p.said, HasSubstr("changed: micro_batch_tokens was 32, is 64; sums round differently from here on"));
  EXPECT_THAT(p.said, HasSubstr("changed: recompute was false, is true"));
  EXPECT_THAT(p.said, HasSubstr("done: step 8"));
}

TEST(run, changed_data_options_and_models_are_refused_by_name) {
  Place p;
  p.go(p.request(), 3);
  const std::string weights = get(p.out("step-000003/model.safetensors")), tokens = get(p.out("tokens.bin"));
  auto resume = [&](const std::string& assignment) {
    return [&p, assignment] {
      RunRequest r = p.request(Mode::resume);
      if (!assignment.empty()) r.assignments = {assignment};
      p.go(r);
    };
  };
  EXPECT_THAT(resume("learning_rate=0.5"), throws_error("cannot go on with other options: learning_rate was 0.01, is 0.5"));
  EXPECT_THAT(resume("steps=9"), throws_error("steps was 8, is 9"));
  EXPECT_THAT(resume("num_experts=7"), throws_error("is of another model: num_experts was 6, is 7"));
  put(p.folder / "data/text", testing::tiny_text() + "more\n");
  EXPECT_THAT(resume(""), throws_error("the data changed since this run began: "));
  put(p.folder / "data/more", "more");
  put(p.folder / "data/text", testing::tiny_text());
  EXPECT_THAT(resume(""), throws_error("data/more is new; put it back, leave out --data to go on with the tokens kept in"));
  EXPECT_EQ(get(p.out("step-000003/model.safetensors")), weights);
  EXPECT_EQ(get(p.out("tokens.bin")), tokens);
  fs::remove(p.folder / "data/more");
  EXPECT_NO_THROW(resume("")()) << "only touched";
}

TEST(run, a_lost_token_file_is_made_anew_from_the_same_data_only) {
  Place p;
  p.go(p.request(Mode::start, "straight"));
  p.go(p.request(), 3);
  put(p.out("tokens.bin"), "damaged");
  RunRequest bare{"", {}, {}, p.folder / "out", Mode::resume, 0};
  EXPECT_THAT([&] { p.go(bare); }, throws_error("name the data again with --data"));
  put(p.folder / "data/text", testing::tiny_text(40, 2));
  EXPECT_THAT([&] { p.go(p.request(Mode::resume)); }, throws_error("is not the data that this run began with"));
  put(p.folder / "data/text", testing::tiny_text());
  p.go(p.request(Mode::resume));
  expect_same_run(p.folder / "straight", p.folder / "out");
}

TEST(run, multi_token_prediction_resumes_and_ends_without_its_layer_if_asked) {
  Place p;
  auto with = [&](Mode mode, const char* out) {
    RunRequest r = p.request(mode, out);
    r.assignments = {"num_nextn_predict_layers=1", "mtp_keep=false"};
    return r;
  };
  p.go(with(Mode::start, "straight"));
  EXPECT_THAT(p.said, HasSubstr(" | after next "));
  p.go(with(Mode::start, "out"), 3);
  EXPECT_FALSE(fs::exists(p.out("final")));
  p.go(with(Mode::resume, "out"));
  expect_same_run(p.folder / "out", p.folder / "straight");
  Config final = Config::load(p.out("final")), kept = Config::load(p.out("step-000008"));
  EXPECT_EQ(final.num_nextn_predict_layers, 0);
  EXPECT_EQ(kept.num_nextn_predict_layers, 1);
  final.finish();
  Model m(final);
  EXPECT_NO_THROW(load(m, Snapshot(p.out("final")), {.for_training = true}));
}

TEST(run, a_folder_in_use_is_never_written_over) {
  Place p;
  EXPECT_THAT([&] { p.go(p.request(Mode::resume)); }, throws_error("holds no checkpoint to go on from; start without --resume"));
  EXPECT_FALSE(fs::exists(p.out("")));
  p.go(p.request(), 2);
  EXPECT_THAT([&] { p.go(p.request()); }, throws_error("holds a run already; add --resume to go on with it, or choose another --out"));
  int other = open(p.out("lock").c_str(), O_RDWR);
  ASSERT_EQ(flock(other, LOCK_EX | LOCK_NB), 0);
  EXPECT_THAT([&] { p.go(p.request(Mode::resume)); }, throws_error("another run is writing into"));
  close(other);
}

TEST(run, a_damaged_checkpoint_is_named_and_the_one_before_serves) {
  Place p;
  p.go(p.request(Mode::start, "straight"));
  p.go(p.request(), 6);  // saved at 3 and 6
  const std::string model = p.out("step-000006/model.safetensors"), whole = get(model);
  put(model, whole.substr(0, whole.size() - 5));
  EXPECT_THAT([&] { p.go(p.request(Mode::resume)); }, throws_error("step-000006/model.safetensors must have"));
  put(model, whole);
  put(p.out("step-000006/training.json"), "{");
  EXPECT_THAT([&] { p.go(p.request(Mode::resume)); },
              throws_error("training.json is damaged; go on from another step folder by writing its name into LATEST"));
  put(p.out("LATEST"), "step-000003\n");
  p.go(p.request(Mode::resume));
  EXPECT_THAT(p.said, HasSubstr("going on from step 3 of 8"));
  expect_same_run(p.folder / "straight", p.folder / "out");
}

TEST(run, a_model_that_memory_cannot_hold_is_refused_before_it_is_made) {
  Place p;
  RunRequest r = p.request();
  r.assignments = {"hidden_size=100000000"};
  EXPECT_THAT([&] { p.go(r); }, throws_error("weights, gradients and moments need at least"));
  r.assignments = {"hidden_size=4096", "sequence_length=1000000", "batch_tokens=100000000", "micro_batch_tokens=0"}, r.out = p.folder / "rows";
  EXPECT_THAT([&] { p.go(r); }, throws_error("the rows of a micro-batch need at least"));
}

TEST(run, a_tokenizer_is_learnt_from_the_data) {
  Place p;
  RunRequest r = p.request();
  r.assignments = {"tokenizer=bpe:300", "steps=2"};
  p.go(r);
  EXPECT_EQ(Tokenizer::load(p.out("step-000002")).ranks(), 300);
  r.assignments = {"tokenizer=bpe:30"}, r.out = p.folder / "other";
  EXPECT_THAT([&] { p.go(r); }, throws_error("after bpe: comes how many tokens to learn, from 256"));
  r.assignments = {"vocab_size=100"};
  EXPECT_THAT([&] { p.go(r); }, throws_error("vocab_size is 100 but the tokenizer has 512 ids"));
}

TEST(run, the_page_stands_by_itself) {
  Place p;
  p.go(p.request());
  const std::string page = get(p.out("report.html"));
  for (const char* part : {"<svg", "<polyline", "held out", "Expert load", "Memory kept", "Output gate", "prefers-color-scheme: dark", "</html>"})
    EXPECT_THAT(page, HasSubstr(part));
  for (const char* part : {"http:", "https:", "src=", "<script", "url(", "nan", "inf\""}) EXPECT_EQ(page.find(part), std::string::npos) << part;
}

// Facts of every choice of training; a new one joins by a row. docs/choices.md is the table of these names.
struct Choice {
  std::string name;
  std::vector<std::string> set;
};
void PrintTo(const Choice& c, std::ostream* out) { *out << c.name; }
class train_choice : public ::testing::TestWithParam<Choice> {
 protected:
  RunRequest request(const Place& p, Mode mode, const std::string& out) const {
    RunRequest r = p.request(mode, out);
    r.assignments = GetParam().set;
    return r;
  }
};

TEST_P(train_choice, learns) {
  Place p;
  p.go(request(p, Mode::start, "out"));
  const std::vector<double> all = losses(p.out("metrics.jsonl"));
  EXPECT_LT(all.back(), all.front() - 0.1);
}

TEST_P(train_choice, resumed_run_is_bitwise_equal) {
  Place p;
  p.go(request(p, Mode::start, "straight"));
  p.go(request(p, Mode::start, "out"), 3);
  p.go(request(p, Mode::resume_or_start, "out"));
  expect_same_run(p.folder / "straight", p.folder / "out");
}

TEST_P(train_choice, one_thread_equals_many) {
  Place p;
  const int before = thread_count();
  set_thread_count(1);
  p.go(request(p, Mode::start, "straight"));
  set_thread_count(4);
  p.go(request(p, Mode::start, "out"));
  set_thread_count(before);
  expect_same_run(p.folder / "straight", p.folder / "out");
}

// Losses as on the CPU, to rounding that eight steps make larger; and a run that was stopped, to the bit.
TEST_P(train_choice, on_the_gpu_goes_as_on_the_cpu) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  Place p;
  p.go(request(p, Mode::start, "cpu"));
  auto on_gpu = [&](Mode mode, const std::string& out) {
    RunRequest r = request(p, mode, out);
    r.device = Device::cuda;
    return r;
  };
  p.go(on_gpu(Mode::start, "straight"));
  p.go(on_gpu(Mode::start, "out"), 3);
  p.go(on_gpu(Mode::resume_or_start, "out"));
  expect_same_run(p.folder / "straight", p.folder / "out");
  const auto want = losses(p.folder / "cpu/metrics.jsonl"), got = losses(p.folder / "out/metrics.jsonl");
  ASSERT_EQ(got.size(), want.size());
  EXPECT_NEAR(got[0], want[0], 1e-5 * want[0]);
  EXPECT_NEAR(got[1], want[1], 1e-4 * want[1]);  // after one update
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], 4e-3 * want[i]) << "step " << i + 1;
}

INSTANTIATE_TEST_SUITE_P(every, train_choice,
                         ::testing::Values(Choice{"optimizer_adamw", {"optimizer=adamw"}}, Choice{"optimizer_muon", {"optimizer=muon"}},
                                           Choice{"optimizer_muon_per_head", {"optimizer=muon_per_head"}}, Choice{"balance_none", {"balance=none"}},
                                           Choice{"balance_sign", {"balance=sign"}}, Choice{"balance_quantile", {"balance=quantile"}},
                                           Choice{"balance_quantile_100_bins", {"balance_bins=100"}},
                                           Choice{"balance_quantile_ema", {"balance_ema=0.8"}},
                                           Choice{"balance_quantile_exact", {"balance=quantile_exact"}},
                                           Choice{"mtp", {"num_nextn_predict_layers=1"}}),
                         [](const auto& info) { return info.param.name; });

TEST(run, one_that_learnt_nothing_is_no_success) {
  Place p;
  RunRequest r = p.request();
  r.assignments = {"initializer_range=1e6", "steps=3"};  // gradients beyond float32
  EXPECT_THAT([&] { p.go(r); }, throws_error("all 3 steps were skipped, for gradients that are not finite, so nothing was learnt"));
}

}  // namespace
}  // namespace k3

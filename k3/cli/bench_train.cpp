// k3 bench train: steps of training on made-up tokens: tokens a second, share of the machine's peak, and where the time of a step goes.
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "k3/cli/bench.h"
#include "k3/cli/bench_ops.h"
#include "k3/cli/commands.h"
#include "k3/core/error.h"
#include "k3/core/file.h"
#include "k3/core/gpu.h"
#include "k3/core/rng.h"
#include "k3/core/threads.h"
#include "k3/model/init.h"
#include "k3/ops/loss/loss.h"
#include "k3/tape/tape.h"
#include "k3/tokenizer/tokenizer.h"
#include "k3/train/options.h"
#include "k3/train/peak.h"
#include "k3/train/step_memory.h"
#include "k3/train/token_file.h"
#include "k3/train/trainer.h"

namespace k3 {

namespace {

namespace fs = std::filesystem;

struct TrainFlags {
  Device device = Device::cpu;
  bool bf16 = false, one_by_one = false;
  std::string config, file;
  std::vector<std::string> assignments;
  int64_t steps = 10;
};

// Single bytes, then pairs, then triples of them: as many tokens as a vocabulary asks for.
Tokenizer made_up_tokenizer(int64_t vocabulary) {
  std::vector<std::string> tokens;
  for (int64_t i = 0; i < vocabulary - Tokenizer::kSpecials; ++i) {
    std::string t;
    int64_t at = i, length = 1, count = 256;
    for (; at >= count; at -= count, count *= 256) ++length;
    for (int64_t j = 0; j < length; ++j, at /= 256) t += char(at % 256);
    tokens.push_back(t);
  }
  return Tokenizer(tokens);
}

// Ids drawn from the whole vocabulary, in a file that is gone when this is.
class Tokens {
 public:
  Tokens(int64_t count, const Tokenizer& tokenizer) : path_(fs::temp_directory_path() / fmt::format("k3-bench-train-{}", getpid())) {
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < count; ++i) ids.push_back(int32_t(Rng{1, 2}.below(uint64_t(tokenizer.ranks()), uint64_t(i))));
    TokenWriter writer(path_, uint64_t(tokenizer.vocabulary()), tokenizer.hash());
    writer.add(ids), writer.end_document();
    writer.commit({}, "");
    file_.emplace(path_);
  }
  ~Tokens() {
    file_.reset();
    std::error_code ignored;
    fs::remove(path_, ignored);
  }
  Tokens(const Tokens&) = delete;
  const TokenFile& file() const { return *file_; }

 private:
  std::string path_;
  std::optional<TokenFile> file_;
};

struct Piece {
  std::string name;
  double seconds = 0;
};

// One step by hand, waiting for the device wherever the model says that another part begins.
class Dissection {
 public:
  Dissection(Model& model, Optimizer& optimizer, const TokenBatch& b, const Forecast& need) {
    const Device device = model.params().device();
    std::unique_ptr<Arena> arena;
    make_room(arena, need.bytes + (size_t(1) << 30), device);
    for (int run = 0; run < 4; ++run) {  // the first two for what is made once
      if (run == 2) pieces_.clear();
      Context c{.device = device, .arena = arena.get()};
      c.on_part = [&](std::string_view part) { turn("forward, " + std::string(part.empty() ? "rest" : part)); };
      model.params().zero_grads();
      Tape tape;
      c.tape = &tape;
      wait(device), name_ = "forward, rest", since_ = now();
      const int64_t n = b.batch.tokens();
      Var h = model.forward(c, lend_ids(c, b.ids, n), b.batch);
      turn("loss and its products");
      cross_entropy(h, model.lm_head(), lend_ids(c, b.targets, n), 1.0f / float(n));
      c.on_part = nullptr;
      turn("backward");
      tape.run_backward();
      c.tape = nullptr;
      turn("update");
      h = Var();
      arena->rewind(0);
      optimizer.step(c, 1e-6);
      turn("");
    }
    for (Piece& p : pieces_) p.seconds /= 2;
  }
  const std::vector<Piece>& pieces() const { return pieces_; }

 private:
  static double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
  void wait(Device device) {
    on_gpu_ = device == Device::cuda;
    if (on_gpu_) gpu::synchronize();
  }
  void turn(const std::string& next) {
    if (on_gpu_) gpu::synchronize();
    auto it = std::find_if(pieces_.begin(), pieces_.end(), [&](const Piece& p) { return p.name == name_; });
    if (it == pieces_.end()) it = pieces_.insert(it, {name_});
    const double t = now();
    it->seconds += t - since_;
    name_ = next, since_ = t;
  }
  bool on_gpu_ = false;
  std::string name_;
  double since_ = 0;
  std::vector<Piece> pieces_;
};

void run(const TrainFlags& f) {
  K3_CHECK(!f.bf16 || f.device == Device::cuda, "[bench] --bf16 is for --device cuda");
  K3_CHECK(!f.one_by_one || f.device == Device::cuda, "[bench] --one-by-one is for --device cuda: on the CPU no step is captured");
  RunConfig run = load_run_config(f.config, f.assignments);
  const bool sized = std::find(run.given.begin(), run.given.end(), "vocab_size") != run.given.end();
  if (!sized) run.model.vocab_size = 2048;
  K3_CHECK(run.model.vocab_size >= 512, "[bench] vocab_size is {}; give at least 512", run.model.vocab_size);
  const Tokenizer tokenizer = made_up_tokenizer(run.model.vocab_size);
  run.model.finish();
  const TrainOptions& o = run.train;
  Model model(run.model, true);
  model.bf16_products = f.bf16;
  model.params().allocate(Device::cpu);
  initialize(model, 1);
  model.params().move_to(f.device);
  const Tokens tokens((f.steps + 8) * o.batch_tokens + o.sequence_length, tokenizer);
  Trainer trainer(model, tokens.file(), {0}, tokenizer, o);
  trainer.captured = !f.one_by_one;

  const double peak = measured_peak_flops(0.2, f.device, f.bf16);
  StepReport last;
  std::vector<double> seconds;
  for (int64_t s = -4; s < f.steps; ++s) {
    last = trainer.step();
    K3_CHECK(last.bad.empty(), "[bench] the gradient of {} is not finite", last.bad);
    if (s >= 0) seconds.push_back(last.seconds);
  }
  const double step = median(seconds), rate = double(last.tokens) / step, flops = last.flops / step;
  Sampler sampler(tokens.file(), {0}, 1, o.sequence_length);
  const TokenBatch batch = sampler.tokens(0, o.micro_batch_tokens);
  const Dissection parts(model, trainer.optimizer(), batch, trainer.forecast(batch.batch));

  const std::string where = f.device == Device::cuda ? gpu_name() + (f.bf16 ? ", --bf16" : ", float32") : fmt::format("{} threads", thread_count());
  fmt::print("{}, {:.1f} M parameters, {} tokens a step in sequences of {}, {}; {}\n", f.config, double(model.params().count()) * 1e-6,
             o.batch_tokens, o.sequence_length, o.optimizer, where);
  fmt::print(
      "{:.0f} tokens/s, median of {} steps; one takes {:.2f} ms (from {:.2f} to {:.2f}) and {:.1f} GFLOP: {:.0f} GFLOP/s, {:.0f} % of a plain "
      "product's {:.0f}\n",
      rate, f.steps, 1e3 * step, 1e3 * *std::min_element(seconds.begin(), seconds.end()), 1e3 * *std::max_element(seconds.begin(), seconds.end()),
      1e-9 * last.flops, 1e-9 * flops, 100 * flops / peak, 1e-9 * peak);
  if (f.device == Device::cuda)
    fmt::print("{}\n", last.launches ? fmt::format("captured: {} launches in one graph", last.launches) : "launched one by one");
  fmt::print("a micro-batch of {} tokens and an update by themselves, waiting after each part:\n", o.micro_batch_tokens);
  double all = 0;
  for (const Piece& p : parts.pieces()) all += p.seconds;
  for (const Piece& p : parts.pieces()) fmt::print("  {:<24} {:>9.2f} ms  {:>3.0f} %\n", p.name, 1e3 * p.seconds, 100 * p.seconds / all);
  if (f.file.empty()) return;
  nlohmann::ordered_json j = {{"config", f.config},
                              {"where", where},
                              {"parameters", model.params().count()},
                              {"optimizer", o.optimizer},
                              {"tokens_a_step", o.batch_tokens},
                              {"sequence_length", o.sequence_length},
                              {"tokens_a_second", rate},
                              {"seconds_a_step", step},
                              {"captured_launches", last.launches},
                              {"flops_a_step", last.flops},
                              {"peak_flops_a_second", peak},
                              {"share_of_peak", flops / peak},
                              {"loss", last.loss}};
  for (const Piece& p : parts.pieces()) j["parts"][p.name] = p.seconds;
  write_file(f.file, j.dump(1) + "\n");
}

}  // namespace

void add_bench_train(CLI::App& bench) {
  CLI::App* c = bench.add_subcommand("train", "steps of training on made-up tokens: tokens a second, share of peak, and where the time goes");
  c->footer("Examples:\n  k3 bench train --config configs/demo.json\n  k3 bench train --config configs/k3-0.4b.json --device cuda --bf16");
  auto f = std::make_shared<TrainFlags>();
  c->add_option("--config", f->config, "a config as k3 train takes it; vocab_size 2048 where it names none")->required();
  c->add_option("--set", f->assignments, "key=value, a key of the config or of its train object; may be given several times")->take_all();
  c->add_option("--steps", f->steps, "steps to time")->check(CLI::Range(1, 1000))->capture_default_str();
  c->add_flag("--one-by-one", f->one_by_one, "on a GPU: launch by launch, no captured step");
  c->add_option("--json", f->file, "write the figures to this file too");
  add_device(c, f->device, f->bf16);
  c->callback([f] { run(*f); });
}

}  // namespace k3

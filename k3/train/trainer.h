#pragma once
// Trainer: one step after another. A step is: zero the gradients; for each micro-batch forward, cross entropy, backward; then norm, clip,
// update, QK-clip and the routers' bias for the next step. The weight of a token is 1 / (counted tokens of the whole step), so the cut into
// micro-batches changes rounding only; and with a given cut the bits are the same at any number of threads.
//
//   Trainer trainer(model, file, split.train, tokenizer, options);
//   while (trainer.steps_done() < options.steps) StepReport r = trainer.step();
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "k3/model/model.h"
#include "k3/tokenizer/tokenizer.h"
#include "k3/train/balance.h"
#include "k3/train/optimizer.h"
#include "k3/train/options.h"
#include "k3/train/sampler.h"

namespace k3 {

// What a batch of this shape needs, from a run of the same code on the null device.
struct Forecast {
  size_t bytes = 0;  // of the arena
  double flops = 0;
};

// What a gate of one layer did on average: `keep` = mean exp(log_decay), 1 for a memory that forgets nothing (NaN where there is no decay);
// `open` = mean sigmoid(output_gate).
struct GateHealth {
  int64_t layer;
  double keep, open;
};

struct StepReport {
  int64_t step = 0;          // from 1
  double loss = 0;           // mean -log p of the counted tokens, in nats
  double mtp_loss = 0;       // the same of the token after the next one; 0 without multi-token prediction
  double bits_per_byte = 0;  // sum of -log2 p over the bytes that the targets stand for; [EOS] costs bits and stands for none
  double gradient_norm = 0, learning_rate = 0, seconds = 0, flops = 0;
  int64_t tokens = 0, clipped_heads = 0;
  std::vector<double> load;       // of each MoE layer: max over mean
  std::vector<GateHealth> gates;  // when asked for
  std::string bad;                // the step was skipped: this parameter's gradient is not finite
  size_t forecast_bytes = 0, peak_bytes = 0;
  int64_t launches = 0;  // of the captured step that this was; 0: launched one by one, or on the CPU
};

class Trainer {
 public:
  // The model holds its weights already (initialize() or load(for_training)). All must outlive the trainer.
  Trainer(Model& model, const TokenFile& file, std::vector<int64_t> documents, const Tokenizer& tokenizer, const TrainOptions& options);
  ~Trainer();

  StepReport step(bool with_gates = false);
  int64_t steps_done() const { return steps_done_; }
  void set_steps_done(int64_t n) { steps_done_ = n; }  // the data position follows from it
  Optimizer& optimizer() { return optimizer_; }
  const std::vector<int64_t>& moe_layers() const { return balance_.moe_layers(); }
  Forecast forecast(const Batch& batch);
  int64_t epoch_tokens() const { return sampler_.epoch_tokens(); }

  // On a GPU a step of a shape that was there before runs as one captured graph, with the bits of its launches one by one; false: always these.
  bool captured = true;
  std::function<void(int64_t done, int64_t of)> on_micro_batch;  // for progress
  std::function<void(const TokenBatch&)> on_batch;               // which tokens are seen

 private:
  struct Shadow;  // the model and optimizer on the null device
  struct Run;     // the batches of a step, and what comes back
  void enqueue(Run& run, Readback& later);
  struct Sampled;
  Sampled sample(int64_t step);
  Run& run_of(std::vector<TokenBatch> batches, bool with_gates);
  const Forecast& known_forecast(const Batch& batch);  // made once for batches that repeat
  Model& model_;
  const Tokenizer& tokenizer_;
  TrainOptions options_;
  Sampler sampler_;
  Optimizer optimizer_;
  Balance balance_;
  std::unique_ptr<Shadow> shadow_;
  std::unique_ptr<Arena> arena_;
  Forecast update_;                                     // of the optimizer
  std::map<std::vector<int64_t>, Forecast> forecasts_;  // by where sequences begin
  Readback later_;
  std::vector<std::unique_ptr<Run>> runs_;  // the last ones of different shapes, newest first
  std::unique_ptr<Sampled> ahead_;          // of the next step, read while the GPU computes
  int64_t steps_done_ = 0;
};

}  // namespace k3

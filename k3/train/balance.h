#pragma once
// Balance: what the trainer does with the routers and the attention heads around each step. Routers collect load and margins while
// Context::observe is on, each token once; after the last micro-batch's backward the bias of the next step follows from them, and the bias
// of the step itself stays as it was (training.md 2.4).
#include <cstdint>
#include <vector>

#include "k3/model/model.h"
#include "k3/train/options.h"

namespace k3 {

class Balance {
 public:
  Balance(Model& model, const TrainOptions& options);
  Balance(const Balance&) = delete;
  ~Balance();
  void begin_step();                 // forgets the step before
  std::vector<double> load() const;  // of each MoE layer: the fullest expert's tokens over the mean
  void update_bias();                // for the next step
  int64_t clip(Context& c);          // QK-clip; returns how many heads were scaled
  const std::vector<int64_t>& moe_layers() const { return moe_layers_; }

 private:
  TrainOptions options_;
  std::vector<RouterWatch*> routers_;
  std::vector<std::vector<float>> bias_;  // of each, where the CPU reads it
  char* sent_ = nullptr;                  // the same where the GPU reads it, so that sending it waits for nothing
  std::vector<int64_t> moe_layers_;
  std::vector<QkClip*> heads_;
};

}  // namespace k3

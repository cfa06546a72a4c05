#pragma once
// Optimizer: which parameter gets which update (training.md 1.2), and the moments that the updates need.
//
//   Role::matrix      Muon, each of Role::blocks by itself (muon_per_head) or whole (muon); AdamW with decay (adamw)
//   Role::scalar_row  AdamW with decay: embedding, lm_head, b_proj
//   Role::vector      AdamW without decay: gains, A_log, dt_bias, convolutions, residual queries
//   Role::fixed       none: e_score_correction_bias
//
// Moments are float32 and owned here. Error: a Muon that finds no matrix.
#include <memory>
#include <string>
#include <vector>

#include "k3/model/param_set.h"
#include "k3/model/safetensors.h"
#include "k3/ops/update/resident.h"
#include "k3/train/options.h"

namespace k3 {

class Optimizer {
 public:
  Optimizer(ParamSet& params, const TrainOptions& options, Device device = Device::cpu);

  // Clips to options.gradient_clip and updates, unless some gradient is not finite: then nothing changes and the result says where.
  struct Result {
    double norm = 0;
    std::string bad;  // the first parameter with an infinity or NaN
  };
  // On a GPU with Context::later, `result` is complete once that has delivered; else on return.
  void step(Context& c, double learning_rate, Result& result);
  Result step(Context& c, double learning_rate) {
    Result r;
    step(c, learning_rate, r);
    return r;
  }

  // On a GPU, before each run of a captured step(): what of it changes.
  void set(double learning_rate);

  std::string split() const;  // "muon 84 tensors: ...; adamw with decay ..."; names with their numbers folded
  int64_t muon_tensors() const { return int64_t(muon_.size()); }
  int64_t muon_blocks() const;
  std::vector<NamedTensor> moments() const;  // names: muon.<parameter>, adamw.m.<parameter>, adamw.v.<parameter>
  void load_moments(const Snapshot& from);   // each must be there with its shape, and none too many
  int64_t updates = 0;                       // made so far; AdamW's t is one more

 private:
  struct Muon {
    Param* param;
    int64_t blocks;
    Tensor momentum;
  };
  struct AdamW {
    Param* param;
    bool decay;
    Tensor m, v;
  };
  TrainOptions options_;
  std::vector<Param*> all_;
  std::vector<Muon> muon_;
  std::vector<AdamW> adamw_;
  std::vector<std::string> fixed_;
  Buffer memory_;
  std::unique_ptr<ResidentUpdate> resident_;  // made by the first step on a GPU
};

}  // namespace k3

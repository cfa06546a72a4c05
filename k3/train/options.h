#pragma once
// TrainOptions: how a run learns. One table of keys (options.cpp) serves the "train" object of a config file, --set key=value and the
// comparison on resume. Keys of the model (model/config.h) and of training have different names, so --set takes either.
//
//   RunConfig run = load_run_config("configs/demo.json", {"steps=200", "hidden_size=128"});
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "k3/model/config.h"

namespace k3 {

struct TrainOptions {
  // data
  std::string tokenizer = "bytes";  // bytes, bpe:RANKS (learnt from the data), or a folder with tokenizer files
  std::string document_separator;   // a line that is exactly this ends a document; empty: each file is one document
  double held_out = 0.05;           // share of documents that is never trained on, chosen by their content
  int64_t sequence_length = 512;    // longest piece that the state and attention run through
  // a step
  int64_t batch_tokens = 4096;     // tokens of one update
  int64_t micro_batch_tokens = 0;  // tokens of one forward and backward; 0: the whole batch at once
  int64_t steps = 1000;
  int64_t seed = 1;
  bool recompute = false;  // keep each sublayer's result only and compute its inside again in the backward: less memory
  // multi-token prediction (training.md 8), when the model's num_nextn_predict_layers is 1
  double mtp_loss_weight = 0.3;  // lambda
  bool mtp_keep = true;          // false: the run ends with a snapshot without that layer, in the folder "final"
  // updates (training.md 1)
  double learning_rate = 3e-3;  // the peak
  double min_learning_rate_ratio = 0.1, warmup_ratio = 0.01, weight_decay = 0.1;
  double gradient_clip = 1.0;               // largest global norm; 0: off
  std::string optimizer = "muon_per_head";  // muon_per_head, muon (whole matrices), adamw
  double muon_momentum = 0.95;
  bool muon_nesterov = true;
  double adam_beta1 = 0.9, adam_beta2 = 0.95, adam_eps = 1e-8;
  double qk_clip_tau = 100;          // largest attention logit; 0: off
  std::string balance = "quantile";  // of experts: quantile (by histogram), quantile_exact, sign, none
  double balance_ema = 0;            // share of the old bias that a new quantile keeps; 0: none
  int64_t balance_bins = 1000;
  double balance_sign_step = 1e-3;
  // what is written, and when; in steps
  int64_t log_every = 10, eval_every = 100, save_every = 100;
  int64_t eval_tokens = 0;  // held-out tokens of one evaluation; 0: all

  void set(const std::string& key, const std::string& value);
  static bool is_key(const std::string& key);
  static std::vector<std::string> keys();
  static TrainOptions parse(const nlohmann::json& object);
  nlohmann::json to_json() const;
  void finish();  // checks, and resolves micro_batch_tokens = 0
};

// The keys that differ between a run and its continuation, as "seed was 1, is 2"; what may change (micro-batch, recompute, how often
// something is written) stands in `allowed`, the rest in `refused`.
struct OptionChanges {
  std::vector<std::string> allowed, refused;
};
OptionChanges changes(const TrainOptions& before, const TrainOptions& now);

struct RunConfig {
  Config model;                    // not finished: the tokenizer gives the vocabulary
  TrainOptions train;              // finished
  std::vector<std::string> given;  // model keys that the file or --set named
};
RunConfig load_run_config(const std::string& path, const std::vector<std::string>& assignments);

}  // namespace k3

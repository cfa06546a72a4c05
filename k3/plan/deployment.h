#pragma once
// Deployment: how a model is spread over ranks and what each rank then holds, reads, computes and sends. Ideal quantities only: no
// efficiency, no launch time (time.h adds those).
//
//   gpus = tp * dp;  tp ranks share one attention group (heads split), dp groups serve different sequences
//   ep = 1: each expert is cut into slices over the tp ranks;  ep > 1: whole experts are spread over ep ranks
//   dcp ranks of a group split its token cache by tokens
#include <cstdint>
#include <string>

#include "k3/plan/closed_forms.h"
#include "k3/plan/hardware.h"

namespace k3::plan {

struct Deployment {
  int64_t gpus = 1, tp = 1, dp = 1, ep = 1, dcp = 1;
  double kv_bytes = 2, state_bytes = 4;           // a cached number; a number of the recurrent state
  double dispatch_bytes = 1, combine_bytes = 2;   // an element of an expert's input and output on the network
  double rho = 1;                                 // how independently tokens choose experts (experts_touched)
  double balance = 1;                             // busiest rank over the mean, routed experts
  double slots = 1;                               // state slots a sequence takes (prefix snapshots, drafts)
  double memory_fraction = 0.9, workspace = 8e9;  // of a rank's memory; graphs and buffers
  bool shard_latent = false;                      // the latent pair is split over tp too
  bool two_batches = false;                       // two interleaved micro-batches: communication behind computation

  int64_t expert_ranks() const { return ep > 1 ? ep : tp; }
};

// gpus from tp * dp or the reverse; then that the layout exists for this model. Errors name the nearest that works.
Deployment resolve(const Architecture& a, Deployment d);
std::string to_string(const Deployment& d);  // "TP 8 x DP 4, EP 32"

struct Memory {
  double routed = 0, trunk = 0, small = 0, tables = 0;  // bytes of one rank; trunk without embedding and head
  double weights() const { return routed + trunk + small + tables; }
  double pool = 0;                                     // what is left for caches: fraction * memory - weights - workspace
  double cache_per_token = 0, state_per_sequence = 0;  // bytes on one rank
  double sequences(double context) const { return pool / (context * cache_per_token + state_per_sequence); }
};
Memory memory_of(const Architecture& a, const Hardware& h, const Deployment& d);

// Training: bf16 weights, float32 gradients, float32 master and Muon momentum sharded over the ranks that hold the same parameters; bytes of one
// rank.
struct TrainingMemory {
  double parameters = 0, weights = 0, gradients = 0, optimizer = 0;
  double total() const { return weights + gradients + optimizer; }
};
TrainingMemory training_memory(const Architecture& a, const Deployment& d);
// The fewest GPUs (up to 65536) that hold it without pipeline stages, and how; gpus = 0: none do.
Deployment fewest_for_training(const Architecture& a, const Hardware& h, const Deployment& like);

enum class Regime { decode, prefill };
struct Work {
  Regime regime = Regime::decode;
  double batch = 1;       // sequences of one attention group
  double context = 8192;  // decode: tokens cached; prefill: tokens cached before the prompt
  double tokens = 1;      // new tokens of a sequence: decode 1 or a draft's width; prefill the prompt
  bool replay = true;     // a verified draft reads and writes the state once, not once a token
};

// The five quantities of one rank and step, and what they are made of.
struct Five {
  double touched = 0, tokens_per_expert = 0;           // experts of a layer that the step touches; tokens a touched... (t K / N)
  double routed = 0, trunk = 0, cache = 0, state = 0;  // HBM bytes
  double hbm() const { return routed + trunk + cache + state; }
  double flops = 0;
  double intensity() const { return flops / hbm(); }
  double tp_bytes = 0, ep_bytes = 0, ep_bytes_all_copies = 0;  // network, each direction; with one copy a rank, with K copies a token
  double network() const { return tp_bytes + ep_bytes; }
  double comm_over_compute(const Architecture& a, const Deployment& d, double flop_rate, double byte_rate, bool all_copies) const;
};
Five five(const Architecture& a, const Deployment& d, const Work& w);

// Distinct ranks that K random choices of a token reach, of `ranks`.
double distinct_ranks(double ranks, double chosen);
double remote_rank_copies(double ranks, double chosen);  // without the token's own rank
double remote_node_copies(double nodes, double chosen);

// (b_d + b_c) F / (6 m B): all-to-all time over routed compute time, each of K copies sent.
double comm_ratio(double dispatch_bytes, double combine_bytes, double flop_rate, double width, double byte_rate);
// FLOPs a byte where a weight-bound product becomes compute-bound, in tokens an expert: b_w F / (2 B_m).
double ridge_tokens(double weight_bytes, double flop_rate, double hbm);

}  // namespace k3::plan

#pragma once
// plan: everything one deployment of one model costs, as Numbers; and the search for the deployment that is best at something.
#include <optional>
#include <string>
#include <vector>

#include "k3/plan/number.h"
#include "k3/plan/time.h"

namespace k3::plan {

struct Question {
  double batch = 1;                // sequences of one attention group
  double context = 8192;           // tokens cached in a decode step; the prompt of a prefill
  double width = 1;                // tokens verified a step (a draft of width - 1)
  double accepted = 1, draft = 0;  // mean accepted tokens, seconds of the draft
  bool replay = true;
  bool train = false;
  double sequence = 4096, micro_batch = 1, mfu = 0.35;  // training: tokens of a sequence, sequences of a micro-batch on a rank
  double tokens_a_step = 4e6;
  bool count = true;  // run the model's code on the null device
};

Sections plan(const Architecture& a, const Hardware& h, const Deployment& d, const Question& q);

// Side by side; the rows are the keys that all plans have.
std::string compare_table(const std::vector<std::string>& names, const std::vector<Sections>& plans);

enum class Goal { latency, throughput, context };
struct Fit {
  Deployment deployment;
  double batch = 1;                           // of a group, at this goal's best
  double longest_context = 0;                 // one sequence a group
  double sequences = 0;                       // of a group at the asked context
  double tpot = 0, throughput = 0, ttft = 0;  // seconds; tokens a second and GPU
};
// All layouts of 1 .. gpus (powers of two, and those that divide), best first. Empty: nothing fits.
std::vector<Fit> fit(const Architecture& a, const Hardware& h, int64_t most_gpus, double context, Goal goal, const Deployment& like);
// The fewest GPUs on which the weights and one sequence of `context` fit; 0: none up to `most`.
int64_t fewest_gpus(const Architecture& a, const Hardware& h, int64_t most, double context, const Deployment& like);

}  // namespace k3::plan

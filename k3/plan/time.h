#pragma once
// How long a step takes: an estimate, operator by operator, with the efficiency constants of the hardware file.
//
//   operator   tau + max(bytes / (eta_m B), FLOPs / (eta_c F));    routed experts: the two add
//   step       operators in dependency order times their layers; shared experts hide behind half of the routed time; reductions and the
//              all-to-all are exposed unless two micro-batches interleave
//   user       TTFT, TPOT and throughput of a closed loop of users who start together; queueing included
//
// Predictions of published measurements, with their errors: check.h.
#include <string>
#include <vector>

#include "k3/plan/deployment.h"

namespace k3::plan {

enum class Bound { launch, hbm, flops, network, chain };
const char* name_of(Bound b);

struct OperatorTime {
  std::string name;
  double count = 1;                          // times a step
  double flops = 0, bytes = 0, network = 0;  // of all of them, one rank
  double seconds = 0;                        // of all of them; 0 for what hides behind another
  Bound bound = Bound::launch;
  std::string formula;
};

struct StepTime {
  std::vector<OperatorTime> operators;
  double seconds() const;
  double of(const std::string& name) const;  // 0 when there is none
  double flops() const, bytes() const, network() const;
};

StepTime step_time(const Architecture& a, const Hardware& h, const Deployment& d, const Work& w);

// Single kernels, as a benchmark times them.
double gemm_seconds(const Hardware& h, double rows, double in, double out, double weight_bytes = 2, bool standalone = false);
double experts_seconds(const Architecture& a, const Hardware& h, const Deployment& d, double domain_tokens);
double kda_decode_seconds(const Hardware& h, double heads, double head_dim, double conv, double batch, double tokens = 1);
double kda_prefill_seconds(const Hardware& h, double heads, double head_dim, double tokens);
double mla_decode_seconds(const Hardware& h, const Config& c, double heads, double batch, double context, double kv_bytes = 2, double tokens = 1);
double all_reduce_seconds(const Hardware& h, double ranks, double bytes);

struct Users {
  double ttft = 0, tpot = 0, throughput = 0;  // seconds; tokens a second of all GPUs, prompt tokens included
};
// `users` on the whole deployment (spread over its groups), prompts of `isl`, answers of `osl`. Draft: width q = w.tokens of the decode step,
// `accepted` tokens a step, `draft` seconds a step.
struct Traffic {
  double users = 1, isl = 8192, osl = 1024;
  double width = 1, accepted = 1, draft = 0;
};
Users users_of(const Architecture& a, const Hardware& h, const Deployment& d, const Traffic& t);

// Smallest mean accepted length at which drafting `width - 1` tokens pays.
double break_even_accepted(const Architecture& a, const Hardware& h, const Deployment& d, double batch, double context, double width, double draft);

}  // namespace k3::plan

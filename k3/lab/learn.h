#pragma once
// Learn: a small model on a synthetic task with the real model, optimizer, schedule and balance of training; only the source of tokens differs.
//
//   json r = learn(job, tick);      // {"steps": [...], "loss": [...], "accuracy": [...], "load": [...], "parameters": n, "flops": f, ...}
//
// The bits depend on the job alone (its device too), not on threads.
#include <functional>

#include "k3/lab/experiment.h"
#include "k3/lab/tasks.h"
#include "k3/model/model.h"
#include "k3/train/options.h"

namespace k3::lab {

struct Job {
  std::vector<std::string> model;  // key=value of Config, over the base (base())
  std::vector<std::string> train;  // key=value of TrainOptions
  Task task;
  int64_t length = 64, sequences = 16, steps = 200;
  int64_t looks = 8;  // held-out evaluations, evenly spaced, the last one at the end
  int64_t seed = 1;
  std::vector<int64_t> lengths;  // evaluated once more at these lengths at the end
  bool probe = false;            // magnitude and gradient over depth, share of routed output, weights over depth
  double init_scale = 1;         // all matrices times this
  Device device = Device::cpu;   // both from the Setting
  bool bf16 = false;
  json to_json() const;
};
Config base();  // two KDA layers of width 64, dense
Config config_of(const Job& job);
json learn(const Job& job, const Tick& tick);

// Of one training step of the job, from the null device.
struct Size {
  int64_t parameters = 0;
  double flops = 0;
};
Size size_of(const Job& job);
double work_of(const Job& job);         // seconds, roughly
std::string size_line(const Job& job);  // layers, width, parameters, steps, tokens, FLOPs, optimizer

// "parameters: a 1,000; b 1,010 (within 2 %)". Error when they differ by more than `tolerance`.
std::string held_equal(const std::string& what, const std::vector<std::pair<std::string, double>>& arms, double tolerance);

// Over seeds: results whose key is arm-seed, in order of seeds.
struct Spread {
  double mean = 0, low = 0, high = 0;
};
Spread spread(const std::vector<double>& values);
std::vector<double> over_seeds(const Results& r, const std::string& arm, int64_t seeds, const std::function<double(const json&)>& value);
Series curve(const Results& r, const std::string& arm, int64_t seeds, const std::string& key);  // mean and range of result[key] over result["steps"]
std::string show(const Spread& s, int digits = 3);                                              // "1.234 (1.2 to 1.3)"
Unit unit_of(const Setting& setting, const std::string& arm, Job job, int64_t seed);            // key arm-seed
inline double final_loss(const json& r) { return r["loss"].back(); }

}  // namespace k3::lab

#pragma once
// An experiment: a question, units of work that can each be kept, and a conclusion drawn from all of them.
//
// A unit is one run (an arm with one seed) or one simulation; its result is JSON and is stored at once, so a stopped lab goes on where it was.
// `what` is everything that decides the result: a stored result of another `what` is not used. conclude() reads stored results only, so that a
// report can be drawn again without a run.
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "k3/chart/chart.h"
#include "k3/core/device.h"

namespace k3::lab {

using chart::Chart;
using chart::Series;
using nlohmann::json;

struct Setting {
  bool quick = false;
  int64_t seeds = 3;
  Device device = Device::cpu;  // of what is trained; simulations stay on the CPU
  bool bf16 = false;            // products on a GPU
  // the first for a quick run, the second for a full one
  template <class T>
  T pick(T small, T full) const {
    return quick ? small : full;
  }
};

using Tick = std::function<void(double part)>;  // how much of this unit is done, 0 to 1
struct Unit {
  std::string key;  // a file name
  double work = 1;  // in seconds, roughly: only the proportions matter
  json what;
  std::function<json(const Tick&)> run;
};
using Results = std::map<std::string, json>;  // by key

struct Table {
  std::string title;
  std::vector<std::string> columns;
  std::vector<std::vector<std::string>> rows;
};
struct Findings {
  std::string answer;              // one sentence, with its numbers
  std::vector<std::string> notes;  // sizes, what was held equal and checked, where the notes err
  std::vector<Table> tables;
  std::vector<Chart> charts;
};

struct Experiment {
  const char *name, *question;
  std::vector<Unit> (*units)(const Setting&);
  Findings (*conclude)(const Setting&, const Results&);
};

const std::vector<Experiment>& experiments();     // in the order of `k3 lab list`
const Experiment& find(const std::string& name);  // Error that names the nearest one

// One a file in experiments/.
extern const Experiment kIdentity, kBalance, kOutliers, kMuon, kKv, kPlanClaims, kRecall, kNormSite, kLatent, kAttnRes, kNope;

}  // namespace k3::lab

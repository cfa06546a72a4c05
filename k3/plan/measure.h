#pragma once
// This machine: short microbenchmarks that fill in a hardware file, and predictions of this engine's own steps on it.
//
// The engine's step is predicted from what its operators report on the null device: each call takes a launch time plus the larger of
// FLOPs / rate and bytes / bandwidth, with the rate of its kind of work (products, cores, elementwise) as measured here.
#include <string>
#include <vector>

#include "k3/plan/check.h"

namespace k3::plan {

struct Machine {
  double triad = 0;    // B/s of a = b + s c over memory
  double cached = 0;   // B/s of the same over what the caches hold
  double product = 0;  // FLOP/s of large float32 products
  double read = 0;     // B/s at which a product of one row reads its weights
  double element = 0;  // FLOP/s of gates and norms in cache
  double launch = 0;   // seconds of an operator on nothing
  double disk = 0;     // B/s written and read back
  double memory = 0;   // bytes
};
Machine measure(double seconds_each = 0.3);
std::string measure_this_machine();  // the hardware file

// One decode and one training step of three small models: predicted and measured.
std::vector<Target> machine_targets();

}  // namespace k3::plan

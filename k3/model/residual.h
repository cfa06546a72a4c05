#pragma once
// Residual: what a layer reads from the depth and how its output joins. Sublayers are counted 0 .. 2L-1 (mixer, ffn, mixer, ...), and the
// read before the final norm is number 2L.
//
//   for each sublayer i:   p = combine(i, sources(i), f_i(read(i, sources(i))));   advance(i, p)
//
// All three are pure in the Vars they are given, so a sublayer can be computed again in the backward (checkpoint).
#include <memory>
#include <vector>

#include "k3/model/config.h"
#include "k3/model/mixer.h"

namespace k3 {

class Residual {
 public:
  virtual ~Residual() = default;
  virtual void begin(Var embedding) = 0;
  virtual std::vector<Var> sources(int64_t sublayer) const = 0;  // what read() and combine() need
  virtual Var read(int64_t sublayer, const std::vector<Var>& sources) = 0;
  virtual Var combine(int64_t sublayer, const std::vector<Var>& sources, Var output) const = 0;  // the new running sum
  virtual void advance(int64_t sublayer, Var sum) = 0;
};

std::unique_ptr<Residual> make_residual(const Config& config, ParamSet& params);

}  // namespace k3

// Dense gated linear unit: down(f(gate x, up x)).
#include "k3/model/choices.h"
#include "k3/ops/activation/activation.h"
#include "k3/ops/linear/linear.h"

namespace k3 {

namespace {

class Glu : public Ffn {
 public:
  Glu(const Config& c, const Scope& s, int64_t width)
      : activation_(activation_of(c)),
        gate_proj_(s.matrix("gate_proj", width, c.hidden_size)),
        up_proj_(s.matrix("up_proj", width, c.hidden_size)),
        down_proj_(s.matrix("down_proj", c.hidden_size, width)) {}
  Var forward(Var x, const Batch&) override {
    const std::vector<Var> both = linears(x, {&gate_proj_, &up_proj_});
    return linear(glu(both[0], both[1], activation_), down_proj_);
  }

 private:
  Activation activation_;
  Param &gate_proj_, &up_proj_, &down_proj_;
};

}  // namespace

std::unique_ptr<Ffn> make_glu(const Config& c, const Scope& s, int64_t width) { return std::make_unique<Glu>(c, s, width); }

}  // namespace k3

#pragma once
// StepClock: where the time of a model's steps goes, part by part, and what each part reads. On the CPU, whose operators return when they are done.
//
//   StepClock clock;
//   Session s(model, {.listen = clock.listener()});          // the clock must outlive it
//   s.read(prompt);  clock.clear();  s.read({&id, 1});       // one token of decode
//   clock.parts()                                            // attention 1.2 ms, 60 MB; experts ...
//
// Parts: attention (with its projections and states), experts (the routed ones' products), ffn (router, latent projections, shared and dense
// ones), head, rest (embedding, norms, residuals). What a program does between steps is in none.
#include <array>
#include <chrono>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "k3/tape/var.h"

namespace k3 {

struct PartTime {
  std::string_view name;
  double seconds = 0;
  double held = 0;                            // bytes of weights and states that were read
  double dense_flops = 0, dense_seconds = 0;  // of products with dense weights
  double bytes_a_second() const { return seconds > 0 ? held / seconds : 0; }
};

class StepClock {
 public:
  std::function<void(Context&)> listener() {
    return [this](Context& c) { listen(c); };
  }
  void listen(Context& c);
  void clear();
  const std::array<PartTime, 5>& parts() const { return parts_; }
  PartTime total() const;
  int64_t steps() const { return steps_; }

 private:
  using Clock = std::chrono::steady_clock;
  std::array<PartTime, 5> parts_{{{"attention"}, {"experts"}, {"ffn"}, {"head"}, {"rest"}}};
  PartTime* now_ = nullptr;  // null: outside of a step
  int64_t steps_ = 0;
  Clock::time_point since_, last_cost_;
};

// A table: a line for each part with time and bytes a token, GB/s and its share of `plain_read` (bytes a second).
// Steps are of one token each.
std::string part_table(const StepClock& clock, double plain_read);

}  // namespace k3

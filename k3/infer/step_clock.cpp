#include "k3/infer/step_clock.h"

#include <fmt/core.h>

#include <algorithm>

#include "k3/core/error.h"

namespace k3 {

namespace {
double seconds(std::chrono::steady_clock::duration d) { return std::chrono::duration<double>(d).count(); }
}  // namespace

void StepClock::listen(Context& c) {
  now_ = nullptr;  // a step that ended in an error left no end
  c.on_part = [this](std::string_view name) {
    const auto t = Clock::now();
    if (now_) now_->seconds += seconds(t - since_);
    since_ = last_cost_ = t;
    auto found = std::find_if(parts_.begin(), parts_.end(), [&](const PartTime& p) { return p.name == name; });
    K3_CHECK(name.empty() || found != parts_.end(), "[step_clock] there is no part '{}'", name);
    steps_ += now_ && name.empty();
    now_ = name.empty() ? nullptr : &*found;
  };
  c.on_cost = [this](std::string_view op, const Cost& cost) {
    if (!now_) return;
    const auto t = Clock::now();
    now_->held += cost.held;
    if (op == "linear") now_->dense_flops += cost.flops, now_->dense_seconds += seconds(t - last_cost_);
    last_cost_ = t;
  };
}

void StepClock::clear() {
  for (PartTime& p : parts_) p = {p.name};
  steps_ = 0;
}

PartTime StepClock::total() const {
  PartTime all{"together"};
  for (const PartTime& p : parts_)
    all.seconds += p.seconds, all.held += p.held, all.dense_flops += p.dense_flops, all.dense_seconds += p.dense_seconds;
  return all;
}

std::string part_table(const StepClock& clock, double plain_read) {
  std::string text;
  const double steps = double(std::max<int64_t>(1, clock.steps()));
  auto line = [&](const PartTime& p) {
    text += fmt::format("  {:<10} {:9.3f} ms {:10.2f} MB {:8.2f} GB/s {:5.0f} % of a plain read\n", p.name, p.seconds * 1e3 / steps,
                        p.held * 1e-6 / steps, p.bytes_a_second() * 1e-9, 100 * p.bytes_a_second() / plain_read);
  };
  for (const PartTime& p : clock.parts())
    if (p.seconds > 0) line(p);
  line(clock.total());
  return text;
}

}  // namespace k3

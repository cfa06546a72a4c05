#include "k3/core/progress.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>

#include "k3/core/thousands.h"

namespace k3 {

double seconds_now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

std::string size_text(double bytes) {
  if (bytes < 1e6) return fmt::format("{:.1f} kB", bytes * 1e-3);
  return bytes < 1e9 ? fmt::format("{:.1f} MB", bytes * 1e-6) : fmt::format("{:.2f} GB", bytes * 1e-9);
}

std::string duration_text(double seconds) {
  const int64_t s = int64_t(seconds + 0.5);
  return s >= 3600 ? fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60) : fmt::format("{}:{:02}", s / 60, s % 60);
}

bool Pace::due() {
  const double now = clock_();
  if (now - last_ < period_) return false;
  last_ = now;
  return true;
}

double Progress::seconds_left(uint64_t done, uint64_t total) const {
  return (clock_() - start_) * double(total - std::min(done, total)) / double(std::max<uint64_t>(1, done));
}

std::string Progress::text(uint64_t done, uint64_t total) const {
  const double rate = double(done) / std::max(1e-9, clock_() - start_);
  const std::string left = done ? duration_text(seconds_left(done, total)) : "?";
  if (unit_ == tokens)
    return fmt::format("{}: {} of {} tokens, {:.0f} tokens/s, {} left", what_, thousands(int64_t(done)), thousands(int64_t(total)), rate, left);
  return fmt::format("{}: {:.0f} % of {}, {}/s, {} left", what_, 100 * double(done) / double(std::max<uint64_t>(1, total)), size_text(double(total)),
                     size_text(rate), left);
}

}  // namespace k3

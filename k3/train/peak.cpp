#include "k3/train/peak.h"

#include <oneapi/dnnl/dnnl.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

namespace k3 {

double measured_peak_flops(double seconds) {
  using Clock = std::chrono::steady_clock;
  auto since = [](Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); };
  constexpr int64_t n = 768;
  std::vector<float> a(size_t(n * n), 0.5f), b(size_t(n * n), 0.25f), c(size_t(n * n));
  double best = 0;
  for (const auto start = Clock::now(); best == 0 || since(start) < seconds;) {
    const auto t = Clock::now();
    dnnl_sgemm('N', 'T', n, n, n, 1.0f, a.data(), n, b.data(), n, 0.0f, c.data(), n);
    best = std::max(best, 2.0 * double(n) * double(n) * double(n) / since(t));
  }
  return best;
}

}  // namespace k3

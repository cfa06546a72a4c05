#include "k3/train/peak.h"

#include <oneapi/dnnl/dnnl.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

#include "k3/core/buffer.h"
#include "k3/core/gpu.h"
#include "k3/ops/linear/product_cuda.h"

namespace k3 {

using Clock = std::chrono::steady_clock;
static double since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

static double peak_of_gpu(double seconds) {
  double best = 0;
  if constexpr (gpu::kBuilt) {
    constexpr int64_t n = 4096;
    const Buffer memory(3 * n * n * sizeof(float), Device::cuda);
    float* p = reinterpret_cast<float*>(memory.data());
    gpu::synchronize();
    for (const auto start = Clock::now(); best == 0 || since(start) < seconds;) {
      const auto t = Clock::now();
      gpu::check(cuda::product(x_wt(p, p + n * n, p + 2 * n * n, n, n, n), gpu::stream()));
      gpu::synchronize();
      best = std::max(best, 2.0 * double(n) * double(n) * double(n) / since(t));
    }
  }
  return best;
}

double measured_peak_flops(double seconds, Device device) {
  if (device == Device::cuda) return peak_of_gpu(seconds);
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

#include "k3/train/peak.h"

#include <oneapi/dnnl/dnnl.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

#include "k3/core/buffer.h"
#include "k3/core/gpu.h"
#include "k3/core/rng.h"
#include "k3/ops/linear/blas_cuda.h"
#include "k3/ops/linear/product_cuda.h"

namespace k3 {

using Clock = std::chrono::steady_clock;
static double since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

static double peak_of_tensor_units(double seconds) {
  double best = 0;
  if constexpr (gpu::kBuilt) {
    constexpr int64_t n = 8192, few = 1 << 20;
    const Buffer a(n * n * sizeof(bf16), Device::cuda), b(n * n * sizeof(bf16), Device::cuda), c(n * n * sizeof(float), Device::cuda);
    std::vector<bf16> random;  // zeros would be multiplied faster
    for (int64_t i = 0; i < few; ++i) random.push_back(to_bf16(float(Rng{1, 1}.uniform(uint64_t(i))) - 0.5f));
    for (char* to : {a.data(), b.data()})
      for (int64_t at = 0; at < n * n; at += few) gpu::upload(to + at * int64_t(sizeof(bf16)), random.data(), few * sizeof(bf16));
    gpu::synchronize();
    for (const auto start = Clock::now(); best == 0 || since(start) < seconds;) {
      const auto t = Clock::now();
      gpu::check(cuda::blas_product(x_wt(nullptr, nullptr, reinterpret_cast<float*>(c.data()), n, n, n), a.data(), b.data(), gpu::stream()));
      gpu::synchronize();
      best = std::max(best, 2.0 * double(n) * double(n) * double(n) / since(t));
    }
  }
  return best;
}

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

double measured_peak_flops(double seconds, Device device, bool bf16_products) {
  if (device == Device::cuda) return bf16_products ? peak_of_tensor_units(seconds) : peak_of_gpu(seconds);
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

#include "k3/ops/activation/mean.h"

#include <algorithm>
#include <cmath>

#include "k3/core/gpu.h"
#include "k3/ops/activation/mean_cuda.h"

namespace k3 {

void mean(const Context& c, Mean of, const Tensor& x, std::function<void(double)> take) {
  const double n = double(std::max<int64_t>(1, x.size()));
  if constexpr (gpu::kBuilt) {
    if (x.device() == Device::cuda) {
      Scratch scratch(*c.arena);
      Tensor parts = scratch.lend(DType::f64, {cuda::kMeanParts});
      gpu::check(cuda::sums(of == Mean::exp, x.f32(), x.size(), parts.as<double>(), gpu::stream()));
      c.read(parts, [take, n](const void* p) {
        double sum = 0;
        for (int64_t i = 0; i < cuda::kMeanParts; ++i) sum += static_cast<const double*>(p)[i];
        take(sum / n);
      });
    }
  }
  if (x.device() != Device::cpu) return;
  double sum = 0;
  for (int64_t i = 0; i < x.size(); ++i) sum += of == Mean::exp ? std::exp(x.f32()[i]) : 1 / (1 + std::exp(-x.f32()[i]));
  take(sum / n);
}

}  // namespace k3

#include "k3/ops/concat/concat.h"

#include <cstring>

#include "k3/core/error.h"
#include "k3/core/gpu.h"
#include "k3/core/threads.h"
#include "k3/ops/concat/concat_cuda.h"
#include "k3/tape/tape.h"

namespace k3 {

Var concat(Var a, Var b) {
  Context& c = a.context();
  const int64_t n = a.rows(), p = a.cols(), q = b.cols();
  K3_CHECK(b.rows() == n, "[concat] a has {} rows but b has {}", n, b.rows());
  Var y(c, DType::f32, {n, p + q});
  const double bytes = 8 * double(n * (p + q));
  c.cost("concat", {.bytes = bytes});
  if (c.device == Device::cpu)
    parallel_for(n, [&](int64_t i) {
      std::memcpy(y.f32() + i * (p + q), a.f32() + i * p, size_t(p) * sizeof(float));
      std::memcpy(y.f32() + i * (p + q) + p, b.f32() + i * q, size_t(q) * sizeof(float));
    });
  if constexpr (gpu::kBuilt) {
    if (c.device == Device::cuda) gpu::check(cuda::concat_forward({n, p, q, a.f32(), b.f32(), y.f32(), nullptr, nullptr, nullptr}, gpu::stream()));
  }
  on_backward(y, [=, &c] {
    Tensor da = a.grad(), db = b.grad();
    c.cost("concat", {.flops = double(n * (p + q)), .bytes = 1.5 * bytes});
    if constexpr (gpu::kBuilt) {
      if (c.device == Device::cuda)
        gpu::check(cuda::concat_backward({n, p, q, nullptr, nullptr, nullptr, y.grad().f32(), da.f32(), db.f32()}, gpu::stream()));
    }
    if (c.device != Device::cpu) return;
    const float* dy = y.grad().f32();
    parallel_for(n, [&](int64_t i) {
      for (int64_t j = 0; j < p; ++j) da.f32()[i * p + j] += dy[i * (p + q) + j];
      for (int64_t j = 0; j < q; ++j) db.f32()[i * q + j] += dy[i * (p + q) + p + j];
    });
  });
  return y;
}

}  // namespace k3

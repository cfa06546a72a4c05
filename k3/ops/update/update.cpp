#include "k3/ops/update/update.h"

#include <algorithm>
#include <cmath>

#include "k3/core/error.h"
#include "k3/core/listed.h"
#include "k3/core/threads.h"
#include "k3/ops/linear/linear.h"
#include "k3/ops/update/adamw_cuda.h"
#include "k3/ops/update/update_float_cuda.h"
#include "k3/ops/update/update_kernels.h"

namespace k3 {

namespace {

constexpr int64_t kBlock = 1 << 14;  // elements that one call of parallel_for takes; also the grain of the norm's fixed-order sum

}  // namespace

void adamw_step(Context& c, const Tensor& weight, const Tensor& grad, const Tensor& m, const Tensor& v, const AdamWOptions& o) {
  int64_t n = weight.size();
  K3_CHECK(grad.size() == n && m.size() == n && v.size() == n, "[adamw] {} weights but {} gradients and moments of {} and {}", n, grad.size(),
           m.size(), v.size());
  K3_CHECK(o.step >= 1, "[adamw] steps count from 1, this is {}", o.step);
  c.cost("adamw", {.flops = 15.0 * double(n), .bytes = 28.0 * double(n)});
  if constexpr (gpu::kBuilt) {
    if (c.device == Device::cuda)
      gpu::check(
          cuda::adamw({weight.f32(), m.f32(), v.f32(), grad.f32(), nullptr, n, o.step, o.lr, o.beta1, o.beta2, o.eps, o.weight_decay, o.grad_scale},
                      gpu::stream()));
  }
  if (c.device != Device::cpu) return;
  const float correct_m = float(1 / (1 - std::pow(double(o.beta1), double(o.step))));
  const float correct_v = float(1 / (1 - std::pow(double(o.beta2), double(o.step))));
  parallel_blocks(n, kBlock, [&](int64_t a, int64_t b) {
    cpu::update().adamw({b - a, weight.f32() + a, grad.f32() + a, m.f32() + a, v.f32() + a, o.lr, o.beta1, o.beta2, o.eps, o.weight_decay,
                         o.grad_scale, correct_m, correct_v});
  });
}

double sum_of_squares(const Tensor& x) {
  std::vector<double> part(size_t((x.size() + kBlock - 1) / kBlock));
  parallel_blocks(x.size(), kBlock, [&](int64_t a, int64_t b) { part[size_t(a / kBlock)] = cpu::update().sum_of_squares(x.f32() + a, b - a); });
  double total = 0;
  for (double s : part) total += s;
  return total;
}

// The sums of squares of all tensors, which come to the host at once.
static std::vector<double> sums_on_gpu(Context& c, const std::vector<cuda::Listed>& list) {
  std::vector<double> sums(list.size());
  if constexpr (gpu::kBuilt) {
    const int64_t n = int64_t(list.size());
    Scratch scratch(*c.arena);
    Tensor partial = scratch.lend(DType::f64, {n, cuda::kSumParts}), there = scratch.lend(DType::f64, {n});
    gpu::check(cuda::sums_of_squares(listed(c.device, scratch, list), n, partial.as<double>(), there.as<double>(), gpu::stream()));
    gpu::download(sums.data(), there.data(), there.bytes());
  }
  return sums;
}

GradientNorm gradient_norm(Context& c, const std::vector<Param*>& params) {
  GradientNorm out;
  double total = 0;
  std::vector<double> sums;
  if (c.device == Device::cuda) {
    std::vector<cuda::Listed> list;
    for (const Param* p : params) list.push_back({p->grad.empty() ? nullptr : p->grad.f32(), p->grad.size()});
    sums = sums_on_gpu(c, list);
  }
  for (size_t i = 0; i < params.size(); ++i) {
    const Param* p = params[i];
    c.cost("gradient_norm", {.flops = 2.0 * double(p->grad.size()), .bytes = 4.0 * double(p->grad.size())});
    if (c.device == Device::null || p->grad.empty()) continue;
    double s = c.device == Device::cpu ? sum_of_squares(p->grad) : sums[i];
    if (!std::isfinite(s) && out.bad.empty()) out.bad = p->name;
    total += s;
  }
  out.norm = std::sqrt(total);
  return out;
}

int64_t qk_clip(Context& c, Param& q, Param& kv_b, const std::vector<float>& max_logits, float tau, int64_t nope, int64_t shared, int64_t v) {
  int64_t heads = int64_t(max_logits.size());
  K3_CHECK(q.value.rows() == heads * (nope + shared) && kv_b.value.rows() == heads * (nope + v),
           "[qk_clip] {} heads of {} + {} and {} + {} rows don't make {} ({}) and {} ({})", heads, nope, shared, nope, v, q.name,
           to_string(q.value.shape()), kv_b.name, to_string(kv_b.value.shape()));
  K3_CHECK(tau > 0, "[qk_clip] tau must be positive, not {}", tau);
  if (c.device == Device::null) return 0;
  auto scale = [&c](const Tensor& w, int64_t first, int64_t rows, double s) {
    float* at = w.f32() + first * w.cols();
    if (c.device == Device::cpu) cpu::update().scale(at, float(s), rows * w.cols());
    if constexpr (gpu::kBuilt) {
      if (c.device == Device::cuda) gpu::check(cuda::scale(at, float(s), rows * w.cols(), gpu::stream()));
    }
  };
  int64_t clipped = 0;
  for (int64_t h = 0; h < heads; ++h) {
    if (!(max_logits[size_t(h)] > tau)) continue;
    double gamma = double(tau) / double(max_logits[size_t(h)]);
    scale(q.value, h * (nope + shared), nope, std::sqrt(gamma));
    scale(q.value, h * (nope + shared) + nope, shared, gamma);
    scale(kv_b.value, h * (nope + v), nope, std::sqrt(gamma));
    ++clipped;
  }
  if (clipped) renew_narrow(q), renew_narrow(kv_b);
  return clipped;
}

}  // namespace k3

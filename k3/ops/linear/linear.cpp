#include "k3/ops/linear/linear.h"

#include "k3/core/error.h"
#include "k3/core/threads.h"
#include "k3/ops/linear/product.h"
#include "k3/tape/tape.h"

namespace k3 {

namespace {

// The weight as float32: itself, or a widened copy in scratch.
const float* as_float(const Tensor& w, Scratch& scratch) {
  if (w.dtype() == DType::f32) return w.f32();
  K3_CHECK(w.dtype() == DType::bf16, "[linear] weights are F32 or BF16, not {}", name_of(w.dtype()));
  Tensor wide = scratch.lend(DType::f32, w.shape());
  if (w.device() != Device::cpu) return nullptr;
  const bf16* from = w.as<bf16>();
  float* to = wide.f32();
  parallel_blocks(w.size(), 1 << 16, [&](int64_t a, int64_t b) {
    for (int64_t i = a; i < b; ++i) to[i] = to_float(from[i]);
  });
  return to;
}

}  // namespace

Var linear(Var x, Param& w) { return linear_rows(x, w, 0, w.value.rows()); }

Var linear_rows(Var x, Param& w, int64_t first, int64_t last) {
  Context& c = x.context();
  K3_CHECK(x.cols() == w.value.cols(), "[linear] x has {} columns but {} ({}) takes {}", x.cols(), w.name, to_string(w.value.shape()),
           w.value.cols());
  int64_t m = x.rows(), n = last - first, k = x.cols();
  Tensor weight = w.value.row_range(first, last);
  Var y(c, DType::f32, {m, n});
  {
    Scratch scratch(*c.arena);
    const float* wide = as_float(weight, scratch);
    if (c.device == Device::cpu) product(x_wt(x.f32(), wide, y.f32(), m, n, k));
  }
  double flops = 2.0 * double(m) * double(n) * double(k), bytes = double(weight.bytes()) + 4.0 * double(m * n + m * k);
  c.cost("linear", {.flops = flops, .bytes = bytes});
  Tensor dw = w.grad.empty() ? Tensor() : w.grad.row_range(first, last);
  on_backward(y, [=, &c] {
    const float* dy = y.grad().f32();
    float* dx = x.grad().f32();
    Scratch scratch(*c.arena);
    const float* wide = as_float(weight, scratch);
    c.cost("linear", {.flops = 2 * flops, .bytes = 2 * bytes});
    if (c.device != Device::cpu) return;
    if (dw.empty())
      product(dy_w(dy, wide, dx, m, n, k));
    else
      products({dy_w(dy, wide, dx, m, n, k), dyt_x(dy, x.f32(), dw.f32(), m, n, k)});
  });
  return y;
}

}  // namespace k3

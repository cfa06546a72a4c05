#include "k3/ops/norm/norm.h"

#include "k3/core/error.h"
#include "k3/core/gpu.h"
#include "k3/ops/norm/norm_float_cuda.h"
#include "k3/ops/norm/norm_kernels.h"
#include "k3/tape/tape.h"

namespace k3 {

namespace {

// What the three have in common: rows of width d, an optional gate, an optional gain.
Var norm(const char* name, Var x, Var gate, Param* w, int64_t d, float eps, void (*forward)(const cpu::NormArgs&),
         void (*backward)(const cpu::NormArgs&), cuda::Norm on_gpu) {
  Context& c = x.context();
  Var y(c, DType::f32, x.value().shape());
  int64_t rows = x.size() / d;
  Tensor r = c.tape ? c.arena->lend(DType::f32, {rows}) : Tensor();
  cpu::NormArgs a{};
  a.x = x.f32(), a.gate = gate.empty() ? nullptr : gate.f32(), a.w = w ? w->value.f32() : nullptr;
  a.eps = eps, a.rows = rows, a.d = d, a.y = y.f32(), a.r = r.empty() ? nullptr : r.f32();
  if (c.device == Device::cpu) forward(a);
  if constexpr (gpu::kBuilt) {
    // what is normed goes into products: in training the copy that they read is made here
    const bool narrow = c.tape && c.bf16_products && !c.recomputing && on_gpu != cuda::Norm::l2;
    if (narrow && c.device == Device::cuda) y.narrow() = c.arena->lend(DType::bf16, x.value().shape());
    if (c.device == Device::cuda) gpu::check(cuda::norm_forward(on_gpu, a, narrow ? y.narrow().data() : nullptr, gpu::stream()));
  }
  double size = double(x.size());
  int inputs = gate.empty() ? 1 : 2;
  c.cost(name, {.flops = (gate.empty() ? 4 : 8) * size, .bytes = 4 * size * (inputs + 1)});
  on_backward(y, [=, &c] {
    cpu::NormArgs b = a;
    const bool there = c.device == Device::cuda;
    bool fresh_x = false, fresh_gate = false;
    b.dy = y.grad().f32(), b.dx = (there ? x.grad(fresh_x) : x.grad()).f32();
    if (!gate.empty()) b.dgate = (there ? gate.grad(fresh_gate) : gate.grad()).f32();
    Scratch scratch(*c.arena);
    if (w && !w->grad.empty())
      b.dw = w->grad.f32(), b.partial = scratch.lend(DType::f32, {there ? cuda::norm_parts(rows) : cpu::norm_row_blocks(rows), d}).f32();
    if (c.device == Device::cpu) backward(b);
    if constexpr (gpu::kBuilt) {
      if (c.device == Device::cuda) gpu::check(cuda::norm_backward(on_gpu, b, fresh_x, fresh_gate, gpu::stream()));
    }
    c.cost(name, {.flops = (gate.empty() ? 10 : 18) * size, .bytes = 4 * size * (2 * inputs + 2)});
  });
  return y;
}

}  // namespace

Var rms_norm(Var x, Param& w, float eps) {
  K3_CHECK(w.value.size() == x.cols(), "[rms_norm] x has {} columns but {} has {} values", x.cols(), w.name, w.value.size());
  return norm("rms_norm", x, {}, &w, x.cols(), eps, cpu::norm().rms_norm_forward, cpu::norm().rms_norm_backward, cuda::Norm::rms);
}

Var l2_norm(Var x, int64_t head_dim, float eps) {
  K3_CHECK(head_dim > 0 && x.cols() % head_dim == 0, "[l2_norm] {} columns don't divide into heads of {}", x.cols(), head_dim);
  return norm("l2_norm", x, {}, nullptr, head_dim, eps, cpu::norm().l2_norm_forward, cpu::norm().l2_norm_backward, cuda::Norm::l2);
}

Var gated_rms_norm(Var o, Var gate, Param& w, float eps) {
  int64_t d = w.value.size();
  K3_CHECK(gate.size() == o.size(), "[gated_rms_norm] the gate has {} values but o has {}", gate.size(), o.size());
  K3_CHECK(d > 0 && o.cols() % d == 0, "[gated_rms_norm] {} columns don't divide into heads of {} ({})", o.cols(), d, w.name);
  return norm("gated_rms_norm", o, gate, &w, d, eps, cpu::norm().gated_rms_norm_forward, cpu::norm().gated_rms_norm_backward, cuda::Norm::gated);
}

}  // namespace k3

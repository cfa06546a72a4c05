#include "k3/ops/activation/activation.h"

#include "k3/core/error.h"
#include "k3/core/gpu.h"
#include "k3/core/threads.h"
#include "k3/ops/activation/elementwise_cuda.h"
#include "k3/tape/tape.h"

namespace k3 {

namespace {

constexpr int64_t kBlock = 1 << 14;  // elements of one call of parallel_for: 64 KB a tensor

using Element = void (*)(const cpu::ElementArgs&);

void in_blocks(const cpu::ElementArgs& all, Element kernel) {
  parallel_blocks(all.n, kBlock, [&](int64_t first, int64_t last) {
    auto at = [&](auto* p) { return p ? p + first : p; };
    kernel({last - first, at(all.x), at(all.g), at(all.y), at(all.dy), at(all.dx), at(all.dg)});
  });
}

// y = f(x) or f(x, g), element by element; `flops` of one element forward, about twice that backward.
Var elementwise(const char* name, Var x, Var g, double flops, Element forward, Element backward, cuda::Element on_gpu) {
  Context& c = x.context();
  if (!g.empty()) K3_CHECK(g.size() == x.size(), "[{}] the second input has {} values but the first has {}", name, g.size(), x.size());
  Var y(c, DType::f32, x.value().shape());
  cpu::ElementArgs a{};
  a.n = x.size(), a.x = x.f32(), a.g = g.empty() ? nullptr : g.f32(), a.y = y.f32();
  double n = double(a.n), inputs = g.empty() ? 1 : 2;
  c.cost(name, {.flops = flops * n, .bytes = 4 * n * (inputs + 1)});
  if (c.device == Device::cpu) in_blocks(a, forward);
  if constexpr (gpu::kBuilt) {
    if (c.device == Device::cuda) gpu::check(cuda::element_forward(on_gpu, a, gpu::stream()));
  }
  on_backward(y, [=, &c] {
    cpu::ElementArgs b = a;
    b.dy = y.grad().f32();
    c.cost(name, {.flops = 2 * flops * n, .bytes = 4 * n * (3 * inputs + 1)});
    if constexpr (gpu::kBuilt) {
      if (c.device == Device::cuda) {
        bool fresh_x = false, fresh_g = false;
        b.dx = x.grad(fresh_x).f32();
        if (!g.empty()) b.dg = g.grad(fresh_g).f32();
        gpu::check(cuda::element_backward(on_gpu, b, fresh_x, fresh_g, gpu::stream()));
        return;
      }
    }
    b.dx = x.grad().f32(), b.dg = g.empty() ? nullptr : g.grad().f32();
    if (c.device == Device::cpu) in_blocks(b, backward);
  });
  return y;
}

void in_blocks(const cpu::GluArgs& all, void (*kernel)(const cpu::GluArgs&)) {
  parallel_blocks(all.n, kBlock, [&](int64_t first, int64_t last) {
    auto at = [&](auto* p) { return p ? p + first : p; };
    kernel({all.activation, last - first, at(all.gate), at(all.up), at(all.y), at(all.dy), at(all.dgate), at(all.dup)});
  });
}

}  // namespace

Var add(Var a, Var b) {
  Context& c = a.context();
  if (c.device != Device::cuda) return elementwise("add", a, b, 1, cpu::activation().add_forward, cpu::activation().add_backward, cuda::Element::add);
  Var y = with_tape(c, nullptr, [&] { return elementwise("add", a, b, 1, nullptr, nullptr, cuda::Element::add); });
  on_backward(y, [=, &c] {  // the gradient itself goes on to both
    const Tensor dy = y.read_grad();
    for (const Var& x : {a, b}) {
      if (x.share_grad(y)) continue;
      const Tensor dx = x.grad();
      c.cost("add", {.flops = double(a.size()), .bytes = 12.0 * double(a.size())});
      if constexpr (gpu::kBuilt) {
        if (c.device == Device::cuda) gpu::check(cuda::accumulate(dx.f32(), dy.f32(), dx.size(), gpu::stream()));
      }
    }
    y.drop_grad();
  });
  return y;
}
Var silu(Var x) { return elementwise("silu", x, {}, 5, cpu::activation().silu_forward, cpu::activation().silu_backward, cuda::Element::silu); }
Var sigmoid(Var x) {
  return elementwise("sigmoid", x, {}, 4, cpu::activation().sigmoid_forward, cpu::activation().sigmoid_backward, cuda::Element::sigmoid);
}
Var sigmoid_gate(Var o, Var g) {
  return elementwise("sigmoid_gate", o, g, 5, cpu::activation().sigmoid_gate_forward, cpu::activation().sigmoid_gate_backward,
                     cuda::Element::sigmoid_gate);
}

Var glu(Var gate, Var up, const Activation& activation) {
  Context& c = gate.context();
  K3_CHECK(up.size() == gate.size(), "[glu] up has {} values but gate has {}", up.size(), gate.size());
  K3_CHECK(activation.kind != Activation::Kind::situ || activation.beta > 0, "[glu] SiTU's beta must be above 0, not {}", activation.beta);
  K3_CHECK(activation.kind != Activation::Kind::clipped || activation.limit > 0, "[glu] the clip limit must be above 0, not {}", activation.limit);
  Var y(c, DType::f32, gate.value().shape());
  cpu::GluArgs a{};
  a.activation = activation, a.n = gate.size(), a.gate = gate.f32(), a.up = up.f32(), a.y = y.f32();
  double n = double(a.n), flops = activation.kind == Activation::Kind::situ ? 16 : 6;
  c.cost("glu", {.flops = flops * n, .bytes = 12 * n});
  if (c.device == Device::cpu) in_blocks(a, cpu::activation().glu_forward);
  if constexpr (gpu::kBuilt) {
    if (c.device == Device::cuda) gpu::check(cuda::glu_forward(a, gpu::stream()));
  }
  on_backward(y, [=, &c] {
    cpu::GluArgs b = a;
    b.dy = y.grad().f32();
    c.cost("glu", {.flops = 2 * flops * n, .bytes = 28 * n});
    if constexpr (gpu::kBuilt) {
      if (c.device == Device::cuda) {
        bool fresh_gate, fresh_up;
        b.dgate = gate.grad(fresh_gate).f32(), b.dup = up.grad(fresh_up).f32();
        gpu::check(cuda::glu_backward(b, fresh_gate, fresh_up, gpu::stream()));
        return;
      }
    }
    b.dgate = gate.grad().f32(), b.dup = up.grad().f32();
    if (c.device == Device::cpu) in_blocks(b, cpu::activation().glu_backward);
  });
  return y;
}

}  // namespace k3

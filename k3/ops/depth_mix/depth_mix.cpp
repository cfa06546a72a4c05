#include "k3/ops/depth_mix/depth_mix.h"

#include "k3/core/error.h"
#include "k3/core/gpu.h"
#include "k3/ops/depth_mix/depth_mix_float_cuda.h"
#include "k3/ops/depth_mix/depth_mix_kernels.h"
#include "k3/tape/tape.h"

namespace k3 {

Var depth_mix(const std::vector<Var>& sources, Param& norm_weight, Param& query, float eps) {
  K3_CHECK(!sources.empty(), "[depth_mix] no source to mix with {}", query.name);
  if (sources.size() == 1) return sources[0];
  const Var& first = sources[0];
  Context& c = first.context();
  const int64_t n = int64_t(sources.size()), rows = first.rows(), d = first.cols();
  for (const Var& v : sources)
    K3_CHECK(v.rows() == rows && v.cols() == d, "[depth_mix] a source is ({}) and the first ({})", to_string(v.value().shape()),
             to_string(first.value().shape()));
  for (const Param* p : {&norm_weight, &query})
    K3_CHECK(p->value.size() == d, "[depth_mix] the sources have {} columns but {} has {} values", d, p->name, p->value.size());

  Var h(c, DType::f32, {rows, d});
  // kept for the backward: two scalars and a weight per token and source
  auto small = [&](auto& from) { return from.lend(DType::f32, {rows, n}).f32(); };
  cpu::DepthMixArgs a{};
  a.n = n, a.rows = rows, a.d = d, a.eps = eps;
  a.w = norm_weight.value.f32(), a.query = query.value.f32(), a.h = h.f32();
  if (c.tape) a.r = small(*c.arena), a.s = small(*c.arena), a.a = small(*c.arena);
  {
    Scratch scratch(*c.arena);
    if (!c.tape) a.r = small(scratch), a.s = small(scratch), a.a = small(scratch);
    a.u = scratch.lend(DType::f32, {d}).f32();
    std::vector<const float*> v;
    for (const Var& x : sources) v.push_back(x.f32());
    a.v = v.data();
    if (c.device == Device::cpu) cpu::depth_mix().forward(a);
    if constexpr (gpu::kBuilt) {
      if (c.device == Device::cuda) gpu::check(cuda::depth_mix_forward(a, gpu::stream()));
    }
  }
  const double size = double(rows) * double(d);
  c.cost("depth_mix", {.flops = 6 * size * double(n), .bytes = 4 * size * double(n + 1)});

  Tensor dw = norm_weight.grad, dquery = query.grad;
  on_backward(h, [=, &c] {
    cpu::DepthMixArgs b = a;
    std::vector<const float*> v;
    std::vector<float*> dv;
    bool fresh[cuda::kDepthMixSources] = {};
    for (size_t i = 0; i < sources.size(); ++i) {
      const Var& x = sources[i];
      const bool may = c.device == Device::cuda && i < std::size(fresh);
      v.push_back(x.f32()), dv.push_back((may ? x.grad(fresh[i]) : x.grad()).f32());
    }
    b.v = v.data(), b.dv = dv.data(), b.dh = h.grad().f32();
    Scratch scratch(*c.arena);
    b.u = scratch.lend(DType::f32, {d}).f32();
    b.ds = scratch.lend(DType::f32, {rows, n}).f32();
    if (!dw.empty()) b.dw = dw.f32();
    if (!dquery.empty()) b.dquery = dquery.f32();
    if (!dw.empty() || !dquery.empty())
      b.partial = scratch.lend(DType::f32, {c.device == Device::cuda ? cuda::depth_mix_parts(rows) : cpu::depth_mix_row_blocks(rows), d}).f32();
    if (c.device == Device::cpu) cpu::depth_mix().backward(b);
    if constexpr (gpu::kBuilt) {
      if (c.device == Device::cuda) gpu::check(cuda::depth_mix_backward(b, fresh, gpu::stream()));
    }
    c.cost("depth_mix", {.flops = 11 * size * double(n), .bytes = 4 * size * double(3 * n + 1)});
  });
  return h;
}

}  // namespace k3

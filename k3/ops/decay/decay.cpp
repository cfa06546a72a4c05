#include "k3/ops/decay/decay.h"

#include "k3/core/error.h"
#include "k3/core/gpu.h"
#include "k3/ops/decay/decay_cuda.h"
#include "k3/ops/decay/decay_kernels.h"
#include "k3/tape/tape.h"

namespace k3 {

namespace {

Var decay(const char* name, Var z, Param& A_log, Param& dt_bias, int64_t heads, float lower_bound, void (*forward)(const cpu::DecayArgs&),
          void (*backward)(const cpu::DecayArgs&), cuda::Decay on_gpu) {
  Context& c = z.context();
  int64_t width = z.cols();
  K3_CHECK(heads > 0 && width % heads == 0, "[{}] {} columns don't divide into {} heads", name, width, heads);
  K3_CHECK(dt_bias.value.size() == width && dt_bias.value.dtype() == DType::f32, "[{}] z has {} columns but {} has {} values of {}; needs F32", name,
           width, dt_bias.name, dt_bias.value.size(), name_of(dt_bias.value.dtype()));
  K3_CHECK(A_log.value.size() >= heads && A_log.value.dtype() == DType::f32, "[{}] {} heads but {} has {} values of {}; needs F32", name, heads,
           A_log.name, A_log.value.size(), name_of(A_log.value.dtype()));
  Var g(c, DType::f32, z.value().shape());
  cpu::DecayArgs a{};
  a.rows = z.rows(), a.heads = heads, a.dim = width / heads, a.lower_bound = lower_bound;
  a.z = z.f32(), a.A_log = A_log.value.f32(), a.bias = dt_bias.value.f32(), a.g = g.f32();
  {
    Scratch scratch(*c.arena);
    a.rate = scratch.lend(DType::f32, {width}).f32();
    if (c.device == Device::cpu) forward(a);
    if constexpr (gpu::kBuilt) {
      if (c.device == Device::cuda) gpu::check(cuda::decay_forward(on_gpu, a, gpu::stream()));
    }
  }
  double n = double(z.size());
  c.cost(name, {.flops = 8 * n, .bytes = 8 * n});
  Tensor dA = A_log.grad, dbias = dt_bias.grad;
  on_backward(g, [=, &c] {
    cpu::DecayArgs b = a;
    b.dg = g.grad().f32(), b.dz = z.grad().f32();
    b.dA_log = dA.empty() ? nullptr : dA.f32(), b.dbias = dbias.empty() ? nullptr : dbias.f32();
    Scratch scratch(*c.arena);
    b.rate = scratch.lend(DType::f32, {width}).f32(), b.dA_channel = scratch.lend(DType::f32, {width}).f32();
    c.cost(name, {.flops = 16 * n, .bytes = 16 * n});
    if (c.device == Device::cpu) backward(b);
    if constexpr (gpu::kBuilt) {
      if (c.device == Device::cuda)
        gpu::check(cuda::decay_backward(on_gpu, b, scratch.lend(DType::f32, {cuda::decay_chunks(b.rows), 2, width}).f32(), gpu::stream()));
    }
  });
  return g;
}

}  // namespace

Var bounded_decay(Var z, Param& A_log, Param& dt_bias, int64_t heads, float lower_bound) {
  K3_CHECK(lower_bound < 0, "[bounded_decay] gate_lower_bound must be below 0, not {}", lower_bound);
  return decay("bounded_decay", z, A_log, dt_bias, heads, lower_bound, cpu::decay().bounded_decay_forward, cpu::decay().bounded_decay_backward,
               cuda::Decay::bounded);
}

Var softplus_decay(Var z, Param& A_log, Param& dt_bias, int64_t heads) {
  return decay("softplus_decay", z, A_log, dt_bias, heads, 0, cpu::decay().softplus_decay_forward, cpu::decay().softplus_decay_backward,
               cuda::Decay::softplus);
}

}  // namespace k3

#include "k3/ops/linear/linear.h"

#include <algorithm>

#include "k3/core/error.h"
#include "k3/core/gpu.h"
#include "k3/ops/linear/blas_cuda.h"
#include "k3/ops/linear/few_outputs_cuda.h"
#include "k3/ops/linear/product_cuda.h"
#include "k3/ops/linear/weight_product.h"
#include "k3/tape/tape.h"

namespace k3 {

namespace {

// A layer on the GPU: in float32, or with operands in bfloat16 on the tensor cores where rows begin at 16 bytes.
class OnGpu {
 public:
  // kept: Param::narrow of w's rows, or null
  OnGpu(Context& c, const Weight& w, const void* kept, bool narrow)
      : w_(w), kept_(kept), scratch_(*c.arena), narrow_(narrow && serves(w)), often_(c.tape != nullptr) {
    K3_CHECK(w.stored == Stored::f32 || w.stored == Stored::bf16, "[linear] on the GPU weights are F32 or BF16");
  }
  static bool serves(const Weight& w) { return w.out % 8 == 0 && w.in % 8 == 0; }

  // y = x W^T
  void forward([[maybe_unused]] const Var& x, [[maybe_unused]] float* y) {
    [[maybe_unused]] const int64_t m = x.rows(), n = w_.out, k = w_.in;
    if constexpr (gpu::kBuilt) {
      if (narrow_)
        gpu::check(cuda::blas_product(x_wt(nullptr, nullptr, y, m, n, k), narrowed(x), weight(), gpu::stream(), often_));
      else if (n <= cuda::kFewOutputs && k % 4 == 0 && w_.stored == Stored::f32)
        gpu::check(cuda::few_outputs_forward({x.f32(), nullptr, wide(), y, nullptr, nullptr, m, n, k, nullptr}, gpu::stream()));
      else
        with_weight(x_wt(x.f32(), wide(), y, m, n, k));
    }
  }
  // dx += dy W, or = when it is fresh;  dW += dy^T x
  void backward([[maybe_unused]] const Var& x, [[maybe_unused]] const float* dy, [[maybe_unused]] float* dx, [[maybe_unused]] bool fresh,
                [[maybe_unused]] float* dw) {
    [[maybe_unused]] const int64_t m = x.rows(), n = w_.out, k = w_.in;
    if constexpr (gpu::kBuilt) {
      if (narrow_) {
        const void* dy_narrow = narrowed(dy, m * n);
        gpu::check(cuda::blas_product(dy_w(nullptr, nullptr, dx, m, n, k, !fresh), dy_narrow, weight(), gpu::stream(), often_));
        if (dw) gpu::check(cuda::blas_product(dyt_x(dy, nullptr, dw, m, n, k), dy_narrow, narrowed(x), gpu::stream(), often_));
      } else {
        if (n <= cuda::kFewOutputs && w_.stored == Stored::f32) {  // the router's
          gpu::check(cuda::few_outputs_dx({x.f32(), dy, wide(), nullptr, dx, dw, m, n, k, nullptr}, !fresh, gpu::stream()));
          if (!dw) return;
          float* partial = scratch_.lend(DType::f32, {cuda::few_outputs_parts(m), n, k}).f32();
          gpu::check(cuda::few_outputs_dw({x.f32(), dy, wide(), nullptr, dx, dw, m, n, k, partial}, gpu::stream()));
          return;
        }
        with_weight(dy_w(dy, wide(), dx, m, n, k, !fresh));
        if (dw) gpu::check(cuda::product(dyt_x(dy, x.f32(), dw, m, n, k), gpu::stream()));
      }
    }
  }

 private:
  void with_weight(const Product& p) {
    if constexpr (gpu::kBuilt) gpu::check(w_.stored == Stored::f32 ? cuda::product(p, gpu::stream()) : cuda::product_bf16(p, w_.data, gpu::stream()));
  }
  const void* narrowed(const Var& x) { return x.narrow().empty() ? narrowed(x.f32(), x.size()) : x.narrow().data(); }
  const void* narrowed(const float* from, int64_t size) {
    Tensor t = scratch_.lend(DType::bf16, {size});
    if constexpr (gpu::kBuilt) gpu::check(cuda::narrow(from, t.data(), size, gpu::stream()));
    return t.data();
  }
  const float* wide() const { return w_.stored == Stored::f32 ? static_cast<const float*>(w_.data) : nullptr; }
  const void* weight() { return w_.stored == Stored::bf16 ? w_.data : kept_ ? kept_ : narrowed(wide(), w_.out * w_.in); }

  Weight w_;
  const void* kept_;
  Scratch scratch_;
  bool narrow_, often_;
};

// In training the input's copy in bfloat16 is made once, for all layers that read it and for their backward.
void keep_narrow(Context& c, const Var& x) {
  if (!c.tape || c.recomputing || !x.narrow().empty()) return;
  x.narrow() = c.arena->lend(DType::bf16, x.value().shape());
  if constexpr (gpu::kBuilt) gpu::check(cuda::narrow(x.f32(), x.narrow().data(), x.size(), gpu::stream()));
}

constexpr int64_t kSliceBytes = 8 << 20;

// f(first row, rows, weights as float32) for slices of a weight: all of it when it is float32, else widened into `scratch` 8 MB at a time.
// A slice is whole blocks of the product's order, so that sums over the rows of W are cut where they are cut anyway.
int64_t rows_of_slice(const Weight& w) {
  int64_t rows = std::max<int64_t>(1, kSliceBytes / (4 * std::max<int64_t>(1, w.in)) / kProductBlock) * kProductBlock;
  return std::min(rows, w.out);
}
template <class F>
void each_slice(const Weight& w, const Tensor& scratch, F f) {
  if (w.stored == Stored::f32) return f(0, w.out, static_cast<const float*>(w.data));
  const int64_t slice = rows_of_slice(w);
  for (int64_t a = 0; a < w.out; a += slice) {
    const int64_t rows = std::min(slice, w.out - a);
    widen(w, a, a + rows, scratch.f32());
    f(a, rows, scratch.f32());
  }
}

}  // namespace

void renew_narrow(const Param& w) {
  if (w.narrow.empty()) return;
  if constexpr (gpu::kBuilt) gpu::check(cuda::narrow(w.value.f32(), w.narrow.data(), w.value.size(), gpu::stream()));
}

Var linear(Var x, Param& w) { return linear_rows(x, w, 0, w.value.rows()); }

namespace {

bool side_by_side(const Context& c, const Var& x, const std::vector<Param*>& ws) {
  if (c.device != Device::cuda || !c.tape || c.recomputing || !c.bf16_products || ws.size() < 2 || ws.size() > cuda::kMostSides) return false;
  const Param& first = *ws[0];
  const int64_t n = first.value.size();
  if (first.narrow.empty() || first.grad.empty() || first.value.cols() != x.cols() || n % 32 || first.value.rows() % 8 || x.cols() % 8) return false;
  for (size_t i = 1; i < ws.size(); ++i) {
    const Param& w = *ws[i];
    if (w.narrow.empty() || w.grad.empty() || !(w.value.shape() == first.value.shape())) return false;
    if (w.narrow.as<bf16>() != first.narrow.as<bf16>() + int64_t(i) * n || w.grad.f32() != first.grad.f32() + int64_t(i) * n) return false;
  }
  return true;
}

}  // namespace

std::vector<Var> linears(Var x, const std::vector<Param*>& ws) {
  Context& c = x.context();
  std::vector<Var> ys;
  if (!side_by_side(c, x, ws)) {
    for (Param* w : ws) ys.push_back(linear(x, *w));
    return ys;
  }
  const int64_t m = x.rows(), n = ws[0]->value.rows(), k = x.cols(), count = int64_t(ws.size());
  const Tensor all = c.arena->lend(DType::f32, {count, m, n});
  for (int64_t i = 0; i < count; ++i) ys.emplace_back(c, all.row_range(i, i + 1).reshape({m, n}));
  const double flops = 2.0 * double(m * n * k * count), bytes = 2.0 * double(n * k * count) + 4.0 * double(m * (n * count + k));
  c.cost("linear", {.flops = flops, .bytes = bytes});
  keep_narrow(c, x);
  const void* w = ws[0]->narrow.data();
  float* dw = ws[0]->grad.f32();
  if constexpr (gpu::kBuilt)
    gpu::check(cuda::blas_products(
        {x_wt(nullptr, nullptr, nullptr, m, n, k), x.narrow().data(), w, all.data(), all.data(), false, 1, 0, count, 0, n * k, m * n, true},
        gpu::stream()));
  c.tape->push([=, &c] {
    bool fresh = false;
    const Tensor dx = x.grad(fresh);
    cuda::Sides sides{};
    for (int64_t i = 0; i < count; ++i) sides.from[i] = ys[size_t(i)].read_grad().f32();
    c.cost("linear", {.flops = 2 * flops, .bytes = 2 * bytes});
    Scratch scratch(*c.arena);
    const Tensor dy = scratch.lend(DType::bf16, {m, count * n});
    if constexpr (gpu::kBuilt) {
      gpu::check(cuda::narrow_side_by_side(sides, count, m, n, dy.data(), gpu::stream()));
      gpu::check(cuda::blas_product(dy_w(nullptr, nullptr, dx.f32(), m, count * n, k, !fresh), dy.data(), w, gpu::stream(), true));
      gpu::check(cuda::blas_product(dyt_x(nullptr, nullptr, dw, m, count * n, k), dy.data(), x.narrow().data(), gpu::stream(), true));
    }
  });
  return ys;
}

Var linear_rows(Var x, Param& w, int64_t first, int64_t last) {
  Context& c = x.context();
  const Weight weight = weight_of(w, first, last);
  K3_CHECK(x.cols() == weight.in, "[linear] x has {} columns but {} ({}) takes {}", x.cols(), w.name, to_string(weight_shape(w)), weight.in);
  int64_t m = x.rows(), n = last - first, k = x.cols();
  const bool data = c.device == Device::cpu, narrow = weight.stored != Stored::f32;
  if (data) check_scales(w);
  Var y(c, DType::f32, {m, n});
  const void* kept = w.narrow.empty() ? nullptr : w.narrow.row_range(first, last).data();
  if (c.device == Device::cuda) {
    if (c.bf16_products && OnGpu::serves(weight)) keep_narrow(c, x);
    OnGpu(c, weight, kept, c.bf16_products).forward(x, y.f32());
  } else {
    Scratch scratch(*c.arena);
    Tensor room = is_codes(weight.stored) ? scratch.lend(DType::u8, {room_bytes(m, k)}) : Tensor();
    if (data) weight_products({{m, x.f32(), weight, y.f32()}}, room.data());
  }
  double flops = 2.0 * double(m) * double(n) * double(k);
  const double held = stored_bytes(w) * double(n) / double(std::max<int64_t>(1, w.value.rows())), bytes = held + 4.0 * double(m * n + m * k);
  c.cost("linear", {.flops = flops, .bytes = bytes, .held = held});
  Tensor dw = w.grad.empty() ? Tensor() : w.grad.row_range(first, last);
  on_backward(y, [=, &c, narrow_products = c.bf16_products] {  // as the forward: the router's stay float32
    const float* dy = y.read_grad().f32();
    bool fresh = false;
    float* dx = c.device == Device::cuda ? x.grad(fresh).f32() : x.grad().f32();
    Scratch scratch(*c.arena);
    Tensor wide = narrow && c.device != Device::cuda ? scratch.lend(DType::f32, {rows_of_slice(weight), k}) : Tensor();
    c.cost("linear", {.flops = 2 * flops, .bytes = 2 * bytes});
    if (c.device == Device::cuda) OnGpu(c, weight, kept, narrow_products).backward(x, dy, dx, fresh, dw.empty() ? nullptr : dw.f32());
    if (!data) return;
    each_slice(weight, wide, [&](int64_t a, int64_t rows, const float* values) {
      Product to_x{m, k, rows, dy + a, n, false, values, k, false, dx, k, true};
      if (dw.empty())
        product(to_x);
      else
        products({to_x, dyt_x(dy, x.f32(), dw.f32(), m, n, k)});  // a weight with a gradient is one slice
    });
  });
  return y;
}

}  // namespace k3

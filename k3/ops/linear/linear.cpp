#include "k3/ops/linear/linear.h"

#include <algorithm>

#include "k3/core/error.h"
#include "k3/core/gpu.h"
#include "k3/ops/linear/blas_cuda.h"
#include "k3/ops/linear/product_cuda.h"
#include "k3/ops/linear/weight_product.h"
#include "k3/tape/tape.h"

namespace k3 {

namespace {

// A layer on the GPU: in float32, or with operands in bfloat16 on the tensor cores where rows begin at 16 bytes.
class OnGpu {
 public:
  OnGpu(Context& c, const Weight& w, bool narrow) : w_(w), scratch_(*c.arena), narrow_(narrow && w.out % 8 == 0 && w.in % 8 == 0) {
    K3_CHECK(w.stored == Stored::f32 || w.stored == Stored::bf16, "[linear] on the GPU weights are F32 or BF16");
  }

  // y = x W^T
  void forward([[maybe_unused]] const float* x, [[maybe_unused]] float* y, [[maybe_unused]] int64_t m) {
    const int64_t n = w_.out, k = w_.in;
    if constexpr (gpu::kBuilt) {
      if (narrow_)
        gpu::check(cuda::blas_product(x_wt(x, nullptr, y, m, n, k), narrowed(x, m * k), weight(), gpu::stream()));
      else
        with_weight(x_wt(x, wide(), y, m, n, k));
    }
  }
  // dx += dy W,  dW += dy^T x
  void backward([[maybe_unused]] const float* x, [[maybe_unused]] const float* dy, [[maybe_unused]] float* dx, [[maybe_unused]] float* dw,
                [[maybe_unused]] int64_t m) {
    const int64_t n = w_.out, k = w_.in;
    if constexpr (gpu::kBuilt) {
      if (narrow_) {
        const void* dy_narrow = narrowed(dy, m * n);
        gpu::check(cuda::blas_product(dy_w(dy, nullptr, dx, m, n, k), dy_narrow, weight(), gpu::stream()));
        if (dw) gpu::check(cuda::blas_product(dyt_x(dy, x, dw, m, n, k), dy_narrow, narrowed(x, m * k), gpu::stream()));
      } else {
        with_weight(dy_w(dy, wide(), dx, m, n, k));
        if (dw) gpu::check(cuda::product(dyt_x(dy, x, dw, m, n, k), gpu::stream()));
      }
    }
  }

 private:
  void with_weight(const Product& p) {
    if constexpr (gpu::kBuilt) gpu::check(w_.stored == Stored::f32 ? cuda::product(p, gpu::stream()) : cuda::product_bf16(p, w_.data, gpu::stream()));
  }
  const void* narrowed(const float* from, int64_t size) {
    Tensor t = scratch_.lend(DType::bf16, {size});
    if constexpr (gpu::kBuilt) gpu::check(cuda::narrow(from, t.data(), size, gpu::stream()));
    return t.data();
  }
  const float* wide() const { return w_.stored == Stored::f32 ? static_cast<const float*>(w_.data) : nullptr; }
  const void* weight() { return w_.stored == Stored::bf16 ? w_.data : narrowed(wide(), w_.out * w_.in); }

  Weight w_;
  Scratch scratch_;
  bool narrow_;
};

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

Var linear(Var x, Param& w) { return linear_rows(x, w, 0, w.value.rows()); }

Var linear_rows(Var x, Param& w, int64_t first, int64_t last) {
  Context& c = x.context();
  const Weight weight = weight_of(w, first, last);
  K3_CHECK(x.cols() == weight.in, "[linear] x has {} columns but {} ({}) takes {}", x.cols(), w.name, to_string(weight_shape(w)), weight.in);
  int64_t m = x.rows(), n = last - first, k = x.cols();
  const bool data = c.device == Device::cpu, narrow = weight.stored != Stored::f32;
  if (data) check_scales(w);
  Var y(c, DType::f32, {m, n});
  if (c.device == Device::cuda) OnGpu(c, weight, c.bf16_products).forward(x.f32(), y.f32(), m);
  if (data) weight_products({{m, x.f32(), weight, y.f32()}});
  double flops = 2.0 * double(m) * double(n) * double(k);
  const double held = stored_bytes(w) * double(n) / double(std::max<int64_t>(1, w.value.rows())), bytes = held + 4.0 * double(m * n + m * k);
  c.cost("linear", {.flops = flops, .bytes = bytes, .held = held});
  Tensor dw = w.grad.empty() ? Tensor() : w.grad.row_range(first, last);
  on_backward(y, [=, &c, narrow_products = c.bf16_products] {  // as the forward: the router's stay float32
    const float* dy = y.grad().f32();
    float* dx = x.grad().f32();
    Scratch scratch(*c.arena);
    Tensor wide = narrow && c.device != Device::cuda ? scratch.lend(DType::f32, {rows_of_slice(weight), k}) : Tensor();
    c.cost("linear", {.flops = 2 * flops, .bytes = 2 * bytes});
    if (c.device == Device::cuda) OnGpu(c, weight, narrow_products).backward(x.f32(), dy, dx, dw.empty() ? nullptr : dw.f32(), m);
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

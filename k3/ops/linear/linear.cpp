#include "k3/ops/linear/linear.h"

#include <algorithm>

#include "k3/core/error.h"
#include "k3/ops/linear/weight_product.h"
#include "k3/tape/tape.h"

namespace k3 {

namespace {

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
  if (data) weight_products({{m, x.f32(), weight, y.f32()}});
  double flops = 2.0 * double(m) * double(n) * double(k);
  double bytes = stored_bytes(w) * double(n) / double(std::max<int64_t>(1, w.value.rows())) + 4.0 * double(m * n + m * k);
  c.cost("linear", {.flops = flops, .bytes = bytes});
  Tensor dw = w.grad.empty() ? Tensor() : w.grad.row_range(first, last);
  on_backward(y, [=, &c] {
    const float* dy = y.grad().f32();
    float* dx = x.grad().f32();
    Scratch scratch(*c.arena);
    Tensor wide = narrow ? scratch.lend(DType::f32, {rows_of_slice(weight), k}) : Tensor();
    c.cost("linear", {.flops = 2 * flops, .bytes = 2 * bytes});
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

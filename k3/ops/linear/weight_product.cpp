#include "k3/ops/linear/weight_product.h"

#include <algorithm>

#include "k3/core/error.h"
#include "k3/core/threads.h"
#include "k3/ops/linear/product_kernels.h"

namespace k3 {

namespace {

// A weight read in place is cut into pieces of about this much of it: more than a thread's start costs, less than a big machine's share.
constexpr int64_t kPieceBytes = 256 << 10, kColumns = 64;

int64_t row_bytes(const Weight& w) { return w.stored == Stored::f32 ? 4 * w.in : w.stored == Stored::bf16 ? 2 * w.in : w.in / 2; }

}  // namespace

Shape weight_shape(const Param& w) { return w.scale.empty() ? w.value.shape() : Shape{w.value.rows(), w.value.cols() * 2}; }

Weight weight_of(const Param& w, int64_t first, int64_t last) {
  Tensor value = w.value.row_range(first, last);
  if (!w.scale.empty()) {
    K3_CHECK(value.dtype() == DType::u8 && w.scale.dtype() == DType::u8 && w.scale.rows() == w.value.rows() && w.scale.cols() * 16 == value.cols(),
             "[weight] {} is {} ({}) with scales {} ({}); MXFP4 is U8 (out x in/2) with U8 (out x in/32)", w.name, name_of(value.dtype()),
             to_string(w.value.shape()), name_of(w.scale.dtype()), to_string(w.scale.shape()));
    return {Stored::mxfp4, last - first, value.cols() * 2, value.data(), w.scale.row_range(first, last).as<uint8_t>()};
  }
  K3_CHECK(value.dtype() == DType::f32 || value.dtype() == DType::bf16, "[weight] {} is {}; weights are F32, BF16, or U8 with a scale (MXFP4)",
           w.name, name_of(value.dtype()));
  return {value.dtype() == DType::f32 ? Stored::f32 : Stored::bf16, last - first, value.cols(), value.data(), nullptr};
}

void widen(const Weight& w, int64_t first, int64_t last, float* to) {
  parallel_blocks(last - first, std::max<int64_t>(1, (1 << 16) / std::max<int64_t>(1, w.in)),
                  [&](int64_t a, int64_t b) { cpu::product_kernels().widen(w, first + a, first + b, to + a * w.in); });
}

void weight_products(const std::vector<WeightProduct>& list, const Tensor& widened) {
  std::vector<Product> wide;
  std::vector<cpu::WeightArgs> few;
  struct Tile {
    const WeightProduct* p;
    int64_t first, rows;
  };
  std::vector<Tile> tiles;
  for (const WeightProduct& p : list) {
    const Weight& w = p.w;
    if (p.rows == 0) continue;
    if (p.rows < kFewRows) {
      const int64_t step = std::max<int64_t>(1, kPieceBytes / std::max<int64_t>(1, row_bytes(w) * kColumns)) * kColumns;
      for (int64_t at = 0; at < w.out; at += step)
        few.push_back({w.stored, p.rows, w.in, at, std::min(at + step, w.out), p.x, w.in, 1, w.data, row_bytes(w), w.scale, p.y, w.out, false});
    } else if (w.stored == Stored::f32) {
      wide.push_back(x_wt(p.x, static_cast<const float*>(w.data), p.y, p.rows, w.out, w.in));
    } else {
      for (int64_t at = 0; at < w.out; at += kWidenRows) tiles.push_back({&p, at, std::min(kWidenRows, w.out - at)});
    }
  }
  parallel_for(int64_t(few.size()), [&](int64_t i) { cpu::product_kernels().weight_product(few[size_t(i)]); });
  products(wide);
  const int64_t lanes = std::min<int64_t>(kWidenLanes, int64_t(tiles.size()));
  parallel_for(lanes, [&](int64_t lane) {
    float* buffer = widened.f32() + lane * widened.cols();
    for (size_t i = size_t(lane); i < tiles.size(); i += size_t(lanes)) {
      const auto& [p, first, rows] = tiles[i];
      cpu::product_kernels().widen(p->w, first, first + rows, buffer);
      Product q = x_wt(p->x, buffer, p->y + first, p->rows, rows, p->w.in);
      q.ldc = p->w.out;
      product_serial(q);
    }
  });
}

}  // namespace k3

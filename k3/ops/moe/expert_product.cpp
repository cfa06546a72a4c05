#include "k3/ops/moe/expert_product.h"

#include <algorithm>

#include "k3/core/threads.h"
#include "k3/ops/linear/product.h"
#include "k3/ops/moe/moe_kernels.h"

namespace k3 {

void expert_products(const std::vector<ExpertProduct>& list, const Tensor& widened) {
  std::vector<Product> plain;
  struct Tile {
    const ExpertProduct* p;
    int64_t first, rows;
  };
  std::vector<Tile> tiles;
  for (const ExpertProduct& p : list) {
    if (p.rows == 0) continue;
    int64_t out = p.w->rows(), in = p.w->cols();
    if (p.w->dtype() == DType::f32)
      plain.push_back(x_wt(p.x, p.w->f32(), p.y, p.rows, out, in));
    else
      for (int64_t at = 0; at < out; at += kWidenRows) tiles.push_back({&p, at, std::min(kWidenRows, out - at)});
  }
  products(plain);
  int64_t lanes = std::min<int64_t>(kWidenLanes, int64_t(tiles.size()));
  parallel_for(lanes, [&](int64_t lane) {
    float* wide = widened.f32() + lane * widened.cols();
    for (size_t i = size_t(lane); i < tiles.size(); i += size_t(lanes)) {
      const auto& [p, first, rows] = tiles[i];
      int64_t out = p->w->rows(), in = p->w->cols();
      cpu::moe().widen_bf16(&p->w->as<bf16>()[first * in].bits, wide, rows * in);
      Product q = x_wt(p->x, wide, p->y + first, p->rows, rows, in);
      q.ldc = out;
      product_serial(q);
    }
  });
}

}  // namespace k3

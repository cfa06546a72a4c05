#include "k3/ops/linear/product.h"

#include <oneapi/dnnl/dnnl.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "k3/core/error.h"
#include "k3/core/rng.h"
#include "k3/core/threads.h"
#include "k3/ops/linear/product_kernels.h"

namespace k3 {

namespace {

constexpr int64_t kOneDnnRows = 32;  // below this oneDNN switches to kernels that sum in another order

void onednn(const Product& p) {
  for (int64_t k = 0; k < p.k; k += kProductBlock) {
    const float *a = p.a + (p.a_transposed ? k * p.lda : k), *b = p.b + (p.b_transposed ? k : k * p.ldb);
    auto status = dnnl_sgemm(p.a_transposed ? 'T' : 'N', p.b_transposed ? 'T' : 'N', p.m, p.n, std::min(kProductBlock, p.k - k), 1.0f, a, p.lda, b,
                             p.ldb, p.accumulate || k ? 1.0f : 0.0f, p.c, p.ldc);
    K3_CHECK(status == dnnl_success, "[product] oneDNN refused ({} x {} x {}), status {}", p.m, p.n, p.k, int(status));
  }
}

// Compares bits on shapes that cross each border of the order: less than a block, one, two, odd sizes.
bool onednn_sums_in_our_order() {
  Rng rng{1, 2};
  for (int64_t k : {33, 384, 701, 1024})
    for (int layout = 0; layout < 4; ++layout) {
      int64_t m = 37, n = 19;
      std::vector<float> a(m * k), b(n * k), c(m * n), d(m * n);
      for (int64_t i = 0; i < m * k; ++i) a[i] = float(rng.uniform(i) - 0.5);
      for (int64_t i = 0; i < n * k; ++i) b[i] = float(rng.uniform(i + 1000000) - 0.5);
      bool ta = layout & 1, tb = layout & 2;
      Product p{m, n, k, a.data(), ta ? m : k, ta, b.data(), tb ? k : n, tb, c.data(), n, false};
      onednn(p);
      p.c = d.data();
      cpu::product_kernels().ordered_product(p);
      if (std::memcmp(c.data(), d.data(), c.size() * sizeof(float)) != 0) return false;
    }
  return true;
}

// Cuts C into pieces of about 8 million FLOPs, at most 32, along its longer side. From the sizes only, so the cut is the same at any
// number of threads (and would not matter to the bits).
std::vector<Product> pieces(const Product& p) {
  double flops = 2.0 * double(p.m) * double(p.n) * double(p.k);
  int64_t count = std::clamp<int64_t>(int64_t(flops / 8e6), 1, 32);
  bool rows = p.m >= p.n;
  int64_t side = rows ? p.m : p.n, grain = rows ? kOneDnnRows : 48;  // 48 columns: the width of oneDNN's inner kernel
  int64_t step = std::max<int64_t>(grain, ((side + count - 1) / count + grain - 1) / grain * grain);
  std::vector<Product> list;
  for (int64_t at = 0; at < side; at += step) {
    int64_t size = std::min(step, side - at);
    if (side - at - size > 0 && side - at - size < grain) size = side - at;  // no small rest
    Product q = p;
    if (rows) {
      q.m = size;
      q.a += p.a_transposed ? at : at * p.lda;
      q.c += at * p.ldc;
    } else {
      q.n = size;
      q.b += p.b_transposed ? at * p.ldb : at;
      q.c += at;
    }
    list.push_back(q);
    if (size > step) break;
  }
  return list;
}

}  // namespace

bool product_is_onednn() {
  static std::atomic<int> answer[3] = {-1, -1, -1};
  auto& a = answer[int(cpu::isa())];
  if (a < 0) a = cpu::isa() != cpu::Isa::plain && onednn_sums_in_our_order();
  return a;
}

void product_serial(const Product& p) {
  if (p.m <= 0 || p.n <= 0) return;
  if (p.m >= kOneDnnRows && p.n > 1 && p.k > 0 && product_is_onednn())
    onednn(p);
  else
    cpu::product_kernels().ordered_product(p);
}

void products(const std::vector<Product>& list) {
  std::vector<Product> all;
  for (const Product& p : list)
    if (p.m > 0 && p.n > 0)
      for (const Product& q : pieces(p)) all.push_back(q);
  parallel_for(int64_t(all.size()), [&](int64_t i) { product_serial(all[i]); });
}

void product(const Product& p) { products({p}); }

}  // namespace k3

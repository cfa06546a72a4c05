// Products with MXFP4 experts straight from their codes against double precision: the streaming and the grouped kernel, and the sum of the slots.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "k3/ops/moe/expert_product_cuda.h"
#include "k3/ops/kernel_testing.h"

namespace k3::testing {
namespace {

using expert_kernel = kernel;

double value(int code, int scale) {
  const double magnitude[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return std::ldexp(magnitude[code & 7], scale - 127) * (code & 8 ? -1 : 1);
}
double situ(double g, double u) { return 4 * std::tanh(g / 4) / (1 + std::exp(-g)) * 25 * std::tanh(u / 25); }

struct Matrices {  // as stored
  int64_t experts, rows, columns;
  std::vector<uint8_t> codes, scales;
  std::vector<double> dense() const {
    std::vector<double> all;
    for (int64_t i = 0; i < experts * rows * columns; ++i) all.push_back(at(0, 0, i));
    return all;
  }
  Matrices(int64_t e, int64_t r, int64_t c, Random& rng, int lo, int hi)
      : experts(e), rows(r), columns(c), codes(e * r * c / 2), scales(e * r * c / 32) {
    for (size_t i = 0; i < codes.size(); i += 8) {
      uint64_t x = rng.next();
      std::memcpy(&codes[i], &x, std::min<size_t>(8, codes.size() - i));
    }
    for (uint8_t& s : scales) s = uint8_t(lo + rng.next() % (hi - lo + 1));
  }
  double at(int64_t e, int64_t r, int64_t c) const {
    const int64_t i = (e * rows + r) * columns + c;
    return value(i & 1 ? codes[size_t(i / 2)] >> 4 : codes[size_t(i / 2)] & 15, scales[size_t(i / 32)]);
  }
};
struct Packed {
  There<uint8_t> codes, scales;
  Packed(const Matrices& a, const Matrices* b) : codes(int64_t(a.codes.size()) * (b ? 2 : 1)), scales(int64_t(a.scales.size()) * (b ? 2 : 1)) {
    There<uint8_t> ca(a.codes), sa(a.scales), cb(b ? b->codes : std::vector<uint8_t>(1)), sb(b ? b->scales : std::vector<uint8_t>(1));
    There<int> refused(std::vector<int>{0});
    K3_LAUNCH(mxfp4_pack(
        {ca.data, sa.data, b ? cb.data : nullptr, b ? sb.data : nullptr, a.experts, a.rows, a.columns, codes.data, scales.data, refused.data},
        gpu::stream()));
    EXPECT_EQ(refused.download()[0], 0) << "scales in range";
  }
};

TEST_F(expert_kernel, cuda_every_code_and_scale_is_exact_or_refused) {
  Random rng(3);
  // columns of W by one-hot tokens, with every scale that is served; each is met 64 times, so with every code
  Matrices m(1, 1024, 256, rng, 1, 128);
  for (size_t i = 0; i < m.scales.size(); ++i) m.scales[i] = uint8_t(1 + i % 128);
  Packed packed(m, nullptr);
  std::vector<bf16> x(256 * 256, bf16{0});
  for (int i = 0; i < 256; ++i) x[size_t(i * 256 + i)] = to_bf16(1.f);
  There<bf16> dx(x), y(256 * 1024);
  There<int> begins(std::vector<int>{0, 256}), active(std::vector<int>{0});
  [[maybe_unused]] const cuda::ExpertProductArgs a{
      dx.data, nullptr, begins.data, active.data, packed.codes.data, packed.scales.data, 1, 1, 256, 1024, 256, false, 4, 25, nullptr, y.data};
  auto wrong = [&] {
    const std::vector<double> got = widened(y.download());
    int n = 0;
    for (int t = 0; t < 256; ++t)
      for (int r = 0; r < 1024; ++r) n += !(got[size_t(t * 1024 + r)] == m.at(0, r, t));
    return n;
  };
  K3_LAUNCH(expert_product(a, gpu::stream()));
  EXPECT_EQ(wrong(), 0) << "grouped";
  y.poison();
  K3_LAUNCH(expert_stream(a, gpu::stream()));
  EXPECT_EQ(wrong(), 0) << "streaming";
  for (auto [lo, hi] : {std::pair{129, 254}, {255, 255}, {0, 0}}) {  // 4 and above, NaN, 2^-127
    const Matrices bad(1, 128, 256, rng, lo, hi);
    There<uint8_t> c(bad.codes), s(bad.scales), pc(int64_t(bad.codes.size())), ps(int64_t(bad.scales.size()));
    There<int> refused(std::vector<int>{0});
    K3_LAUNCH(mxfp4_pack({c.data, s.data, nullptr, nullptr, 1, 128, 256, pc.data, ps.data, refused.data}, gpu::stream()));
    EXPECT_EQ(refused.download()[0], int(bad.scales.size())) << lo;
  }
}

// Experts without rows, with one, with more than a tile; all rows on one.
TEST_F(expert_kernel, cuda_products_equal_double) {
  Random rng(4);
  const int E = 9, K = 512, F = 256, tokens = 700;
  Matrices gate(E, F, K, rng, 119, 123), up(E, F, K, rng, 119, 123), down(E, 384, F, rng, 119, 123);
  Packed gu(gate, &up), dn(down, nullptr);
  const std::vector<double> wide_gate = gate.dense(), wide_up = up.dense(), wide_down = down.dense();
  auto x = narrowed(rng.normals(tokens * K));
  There<bf16> dx(x);
  for (const std::vector<int>& counts :
       {std::vector<int>{0, 1, 9, 0, 70, 300, 8, 513, 97}, {1, 1, 0, 0, 8, 0, 2, 0, 0}, {0, 0, 0, 0, 0, 1200, 0, 0, 0}}) {
    if (few_shapes() && counts[6] != 8) continue;
    std::vector<int> begins = {0}, active, gather;
    for (int e = 0; e < E; ++e) {
      begins.push_back(begins.back() + counts[e]);
      if (counts[e]) active.push_back(e);
    }
    active.push_back(-1);
    const int rows = begins.back();
    std::vector<float> weight;
    for (int i = 0; i < rows; ++i) gather.push_back(int(rng.next() % tokens)), weight.push_back(float(rng.uniform()));
    std::vector<double> h(rows * F), y(rows * 384);
    std::vector<bf16> h16(rows * F);
    for (int e = 0; e < E; ++e)
      for (int i = begins[e]; i < begins[e + 1]; ++i)
        for (int f = 0; f < F; ++f) {
          double g = 0, u = 0;
          for (int k = 0; k < K; ++k) {
            const double v = to_float(x[gather[i] * K + k]);
            g += wide_gate[(e * F + f) * K + k] * v, u += wide_up[(e * F + f) * K + k] * v;
          }
          h[i * F + f] = situ(g, u), h16[i * F + f] = to_bf16(float(h[i * F + f]));
        }
    for (int e = 0; e < E; ++e)
      for (int i = begins[e]; i < begins[e + 1]; ++i)
        for (int r = 0; r < 384; ++r)
          for (int f = 0; f < F; ++f) y[i * 384 + r] += weight[i] * wide_down[(e * 384 + r) * F + f] * to_float(h16[i * F + f]);
    There<int> b(begins), ac(active), ga(gather);
    There<float> we(weight);
    There<bf16> dh(h16), oh(rows * F), oy(rows * 384);
    for (bool stream : {false, true}) {
      SCOPED_TRACE(fmt::format("{} product, {} rows", stream ? "streaming" : "grouped", rows));
      cuda::ExpertProductArgs a{dx.data, ga.data, b.data, ac.data, gu.codes.data, gu.scales.data, E, int(active.size()), rows, 2 * F,
                                K,       true,    4,      25,      nullptr,       oh.data};
      cuda::ExpertProductArgs c{dh.data, nullptr, b.data, ac.data, dn.codes.data, dn.scales.data, E, int(active.size()), rows, 384,
                                F,       false,   4,      25,      we.data,       oy.data};
      [[maybe_unused]] auto launch = [stream = stream](const cuda::ExpertProductArgs& args) {
        if (stream)
          K3_LAUNCH(expert_stream(args, gpu::stream()));
        else
          K3_LAUNCH(expert_product(args, gpu::stream()));
      };
      oh.poison(), oy.poison();
      launch(a);
      launch(c);
      auto first = oh.download();
      auto second = oy.download();
      expect_error("gate, up and SiTU", error(widened(first), h), 2.5e-3);
      expect_error("down, weighted", error(widened(second), y), 2.5e-3);
      if (few_shapes()) continue;
      oh.poison(), oy.poison();
      launch(a);
      launch(c);
      EXPECT_TRUE(same(first, oh.download()) && same(second, oy.download())) << "two runs differ";
    }
  }
}

TEST_F(expert_kernel, cuda_combine_and_norm_equal_double) {
  Random rng(5);
  const int T = 37, top = 5, d = 3584;
  auto rows = narrowed(rng.normals(T * top * d));
  std::vector<int> where(T * top);
  for (int i = 0; i < T * top; ++i) where[i] = (i * 7) % (T * top);
  std::vector<float> norm = rng.normals(d, 1, 0.2);
  std::vector<double> y(T * d, 0.);
  for (int t = 0; t < T; ++t) {
    double s = 0;
    for (int i = 0; i < d; ++i) {
      for (int k = 0; k < top; ++k) y[t * d + i] += to_float(rows[where[t * top + k] * d + i]);
      s += y[t * d + i] * y[t * d + i];
    }
    for (int i = 0; i < d; ++i) y[t * d + i] *= norm[i] / std::sqrt(s / d + 1e-5);
  }
  There<bf16> r(rows), out(T * d);
  There<int> w(where);
  There<float> n(norm);
  K3_LAUNCH(expert_combine({r.data, w.data, T, top, d, n.data, 1e-5f, out.data}, gpu::stream()));
  expect_error("combine and norm", error(out, y), 4e-3);
}

}  // namespace
}  // namespace k3::testing

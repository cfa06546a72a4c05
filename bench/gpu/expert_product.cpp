// Products with MXFP4 experts on the GPU: both kernels against double precision, and their times.
#include "bench/gpu/gpu.h"
#include "k3/ops/moe/expert_product_cuda.h"

using namespace k3;
using namespace k3::gpu;

namespace {

double value(int code, int scale) {
  const double magnitude[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return std::ldexp(magnitude[code & 7], scale - 127) * (code & 8 ? -1 : 1);
}
double situ(double g, double u) { return 4 * std::tanh(g / 4) / (1 + std::exp(-g)) * 25 * std::tanh(u / 25); }

struct Matrices {  // as stored
  int64_t experts, rows, columns;
  std::vector<uint8_t> codes, scales;
  Matrices(int64_t e, int64_t r, int64_t c, Rng& rng, int lo, int hi)
      : experts(e), rows(r), columns(c), codes(e * r * c / 2), scales(e * r * c / 32) {
    for (size_t i = 0; i < codes.size(); i += 8) {
      uint64_t x = rng.next();
      std::memcpy(&codes[i], &x, std::min<size_t>(8, codes.size() - i));
    }
    for (uint8_t& s : scales) s = uint8_t(lo + rng.next() % (hi - lo + 1));
  }
  double at(int64_t e, int64_t r, int64_t c) const {
    uint8_t two = codes[((e * rows + r) * columns + c) / 2];
    return value(c & 1 ? two >> 4 : two & 15, scales[(e * rows + r) * (columns / 32) + c / 32]);
  }
};
struct Packed {
  Buffer<uint8_t> codes, scales;
  Packed(const Matrices& a, const Matrices* b) : codes(int64_t(a.codes.size()) * (b ? 2 : 1)), scales(int64_t(a.scales.size()) * (b ? 2 : 1)) {
    Buffer<uint8_t> ca(a.codes), sa(a.scales), cb(b ? b->codes : std::vector<uint8_t>(1)), sb(b ? b->scales : std::vector<uint8_t>(1));
    Buffer<int> refused(std::vector<int>{0});
    launched(cuda::mxfp4_pack(
        {ca.data, sa.data, b ? cb.data : nullptr, b ? sb.data : nullptr, a.experts, a.rows, a.columns, codes.data, scales.data, refused.data},
        nullptr));
    GPU(cudaDeviceSynchronize());
    expect_true("MXFP4 pack refuses nothing in range", refused.download()[0] == 0);
  }
};

void check() {
  Rng rng(3);
  {  // every code and every scale that is served, exactly: columns of W by one-hot tokens
    Matrices m(1, 128, 256, rng, 1, 128);
    Packed packed(m, nullptr);
    std::vector<bf16> x(256 * 256, bf16{0});
    for (int i = 0; i < 256; ++i) x[i * 256 + i] = k3::to_bf16(1.f);
    Buffer<bf16> dx(x), y(256 * 128);
    Buffer<int> begins(std::vector<int>{0, 256}), active(std::vector<int>{0});
    cuda::ExpertProductArgs a{dx.data, nullptr, begins.data, active.data, packed.codes.data, packed.scales.data, 1, 1, 256, 128, 256, false,
                              4,       25,      nullptr,     y.data};
    std::vector<double> right(256 * 128);
    for (int t = 0; t < 256; ++t)
      for (int r = 0; r < 128; ++r) right[t * 128 + r] = m.at(0, r, t);
    launched(expert_product(a, nullptr));
    GPU(cudaDeviceSynchronize());
    auto differs = [&] {
      auto got = widen(y.download());
      int n = 0;
      for (size_t i = 0; i < right.size(); ++i) n += !(got[i] == right[i]);
      return n;
    };
    expect("grouped product, all codes and scales are exact (values that differ)", differs(), 0);
    y.poison();
    launched(expert_stream(a, nullptr));
    GPU(cudaDeviceSynchronize());
    expect("streaming product, all codes and scales are exact (values that differ)", differs(), 0);
    Matrices bad(1, 128, 256, rng, 200, 255);
    Buffer<uint8_t> c(bad.codes), s(bad.scales), pc(int64_t(bad.codes.size())), ps(int64_t(bad.scales.size()));
    Buffer<int> refused(std::vector<int>{0});
    launched(cuda::mxfp4_pack({c.data, s.data, nullptr, nullptr, 1, 128, 256, pc.data, ps.data, refused.data}, nullptr));
    expect_true("MXFP4 pack counts scales that it cannot serve", refused.download()[0] == int(bad.scales.size()));
  }
  const int E = 9, K = 512, F = 256, tokens = 700;
  Matrices gate(E, F, K, rng, 119, 123), up(E, F, K, rng, 119, 123), down(E, 384, F, rng, 119, 123);
  Packed gu(gate, &up), dn(down, nullptr);
  auto x = gpu::to_bf16(normals(tokens * K, rng));
  Buffer<bf16> dx(x);
  for (const std::vector<int>& counts :
       {std::vector<int>{0, 1, 9, 0, 70, 300, 8, 513, 97}, {1, 1, 0, 0, 8, 0, 2, 0, 0}, {0, 0, 0, 0, 0, 1200, 0, 0, 0}}) {
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
          for (int k = 0; k < K; ++k) g += gate.at(e, f, k) * to_float(x[gather[i] * K + k]), u += up.at(e, f, k) * to_float(x[gather[i] * K + k]);
          h[i * F + f] = situ(g, u), h16[i * F + f] = k3::to_bf16(float(h[i * F + f]));
        }
    for (int e = 0; e < E; ++e)
      for (int i = begins[e]; i < begins[e + 1]; ++i)
        for (int r = 0; r < 384; ++r)
          for (int f = 0; f < F; ++f) y[i * 384 + r] += weight[i] * down.at(e, r, f) * to_float(h16[i * F + f]);
    Buffer<int> b(begins), ac(active), ga(gather);
    Buffer<float> we(weight);
    Buffer<bf16> dh(h16), oh(rows * F), oy(rows * 384);
    for (bool stream : {false, true}) {
      std::string name = std::string(stream ? "streaming" : "grouped") + " product, " + std::to_string(rows) + " rows, ";
      cuda::ExpertProductArgs a{dx.data, ga.data, b.data, ac.data, gu.codes.data, gu.scales.data, E, int(active.size()), rows, 2 * F,
                                K,       true,    4,      25,      nullptr,       oh.data};
      cuda::ExpertProductArgs c{dh.data, nullptr, b.data, ac.data, dn.codes.data, dn.scales.data, E, int(active.size()), rows, 384,
                                F,       false,   4,      25,      we.data,       oy.data};
      oh.poison(), oy.poison();
      launched(stream ? expert_stream(a, nullptr) : expert_product(a, nullptr));
      launched(stream ? expert_stream(c, nullptr) : expert_product(c, nullptr));
      GPU(cudaDeviceSynchronize());
      auto first = oh.download();
      auto second = oy.download();
      expect(name + "gate, up and SiTU", error(widen(first), h), 2.5e-3);
      expect(name + "down, weighted", error(widen(second), y), 2.5e-3);
      oh.poison(), oy.poison();
      launched(stream ? expert_stream(a, nullptr) : expert_product(a, nullptr));
      launched(stream ? expert_stream(c, nullptr) : expert_product(c, nullptr));
      GPU(cudaDeviceSynchronize());
      expect_true(name + "two runs are bitwise equal", same_bits(first, oh.download()) && same_bits(second, oy.download()));
    }
  }
  {  // combine
    const int T = 37, top = 5, d = 3584;
    auto rows = gpu::to_bf16(normals(T * top * d, rng));
    std::vector<int> where(T * top);
    for (int i = 0; i < T * top; ++i) where[i] = (i * 7) % (T * top);
    std::vector<float> norm = normals(d, rng, 1, 0.2);
    std::vector<double> y(T * d, 0.);
    for (int t = 0; t < T; ++t) {
      double s = 0;
      for (int i = 0; i < d; ++i) {
        for (int k = 0; k < top; ++k) y[t * d + i] += to_float(rows[where[t * top + k] * d + i]);
        s += y[t * d + i] * y[t * d + i];
      }
      for (int i = 0; i < d; ++i) y[t * d + i] *= norm[i] / std::sqrt(s / d + 1e-5);
    }
    Buffer<bf16> r(rows), out(T * d);
    Buffer<int> w(where);
    Buffer<float> n(norm);
    launched(cuda::expert_combine({r.data, w.data, T, top, d, n.data, 1e-5f, out.data}, nullptr));
    GPU(cudaDeviceSynchronize());
    expect("combine and norm", error(widen(out.download()), y), 4e-3);
  }
}

// experts on this device, rows of each; `sets` copies of the weights when they would fit in the cache
void time(const char* name, int experts, const std::vector<int>& counts, int sets, double floor) {
  Rng rng(9);
  const int L = 3584, F = 3072;
  std::vector<int> begins = {0}, active;
  for (int e = 0; e < experts; ++e) {
    begins.push_back(begins.back() + counts[e]);
    if (counts[e]) active.push_back(e);
  }
  const int rows = begins.back(), tokens = std::max(1, rows / 16);
  std::vector<uint8_t> codes(int64_t(experts) * 2 * F * L / 2), scales(int64_t(experts) * 2 * F * L / 32);
  for (size_t i = 0; i + 8 <= codes.size(); i += 8) {
    uint64_t r = rng.next();
    std::memcpy(&codes[i], &r, 8);
  }
  for (uint8_t& s : scales) s = 120;
  std::vector<Buffer<uint8_t>> gu, dn;
  Buffer<uint8_t> gs(scales), ds(std::vector<uint8_t>(scales.begin(), scales.begin() + int64_t(experts) * F * L / 32));
  for (int i = 0; i < sets; ++i)
    gu.emplace_back(codes), dn.emplace_back(std::vector<uint8_t>(codes.begin(), codes.begin() + int64_t(experts) * F * L / 2));
  std::vector<int> gather, where;
  for (int i = 0; i < rows; ++i) gather.push_back(int(rng.next() % tokens));
  for (int i = 0; i < tokens * 16; ++i) where.push_back(std::min(i, rows - 1));
  Buffer<bf16> x(many_normals(int64_t(tokens) * L, rng)), h(int64_t(rows) * F), y(int64_t(rows) * L), out(int64_t(tokens) * L);
  Buffer<int> b(begins), ac(active), ga(gather), wh(where);
  Buffer<float> we(std::vector<float>(rows, 0.06f)), norm(std::vector<float>(L, 1.f));
  const bool stream = *std::max_element(counts.begin(), counts.end()) <= 8;
  for (int kind = 0; kind < (stream ? 2 : 1); ++kind) {
    bool s = stream && kind == 0;
    auto run = [&](int i, cudaStream_t st) {
      cuda::ExpertProductArgs a{x.data, ga.data, b.data, ac.data, gu[i % sets].data, gs.data, experts, int(active.size()), rows, 2 * F,
                                L,      true,    4,      25,      nullptr,           h.data};
      cuda::ExpertProductArgs c{h.data, nullptr, b.data, ac.data, dn[i % sets].data, ds.data, experts, int(active.size()), rows, L,
                                F,      false,   4,      25,      we.data,           y.data};
      launched(s ? expert_stream(a, st) : expert_product(a, st));
      launched(s ? expert_stream(c, st) : expert_product(c, st));
      launched(cuda::expert_combine({y.data, wh.data, tokens, 16, L, norm.data, 1e-5f, out.data}, st));
    };
    report(std::string("MXFP4 experts, ") + (s ? "streaming, " : "grouped, ") + name, time_us(run, sets > 1 ? 2 * sets : 1), floor);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (wants(argc, argv, "check")) check();
  if (wants(argc, argv, "time")) {
    time("1 token, 16 experts", 16, std::vector<int>(16, 1), 3, 65);
    time("56 experts, 56 rows", 56, std::vector<int>(56, 1), 1, 146);
    Rng rng(1);
    std::vector<int> counts(56, 0);
    for (int i = 0; i < 8192; ++i) ++counts[rng.next() % 56];
    time("56 experts, 8192 rows", 56, counts, 1, 685);
    std::fill(counts.begin(), counts.end(), 0);
    for (int i = 0; i < 896; ++i) ++counts[rng.next() % 56];
    time("56 experts, 896 rows", 56, counts, 1, 234);
  }
  if (argc > 1 && !std::strcmp(argv[1], "profile")) {
    if (argc > 2)
      time("56 experts, 56 rows", 56, std::vector<int>(56, 1), 1, 146);
    else
      time("56 experts, 146 rows each", 56, std::vector<int>(56, 146), 1, 685);
  }
  std::printf("%d failures\n", failures);
  return failures != 0;
}

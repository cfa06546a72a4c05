// The memory-bound kernels on the GPU: norm, SiTU, convolution, routing, cross entropy, AdamW; right against double precision, and their times.
#include <numeric>

#include "bench/gpu/gpu.h"
#include "k3/ops/activation/activation_cuda.h"
#include "k3/ops/conv/conv_cuda.h"
#include "k3/ops/loss/loss_cuda.h"
#include "k3/ops/moe/route_cuda.h"
#include "k3/ops/norm/norm_cuda.h"
#include "k3/ops/update/adamw_cuda.h"

using namespace k3;
using namespace k3::gpu;

namespace {

template <class T>
std::vector<T> as(const std::vector<float>& x) {
  if constexpr (std::is_same_v<T, float>)
    return x;
  else
    return gpu::to_bf16(x);
}

template <class T>
void check_norm(int64_t rows, int d) {
  constexpr bool wide = std::is_same_v<T, float>;
  Rng rng(1);
  auto x = as<T>(normals(rows * d, rng)), add = as<T>(normals(rows * d, rng)), dy = as<T>(normals(rows * d, rng));
  auto w = normals(d, rng, 1, 0.2), dw0 = normals(d, rng);
  Buffer<T> bx(x), ba(add), bs(rows * d), by(rows * d), bdy(dy), bdx(rows * d);
  Buffer<float> bw(w), bdw(dw0), part(264 * d);
  cuda::RmsNormArgs a{bx.data, ba.data, bs.data, bw.data, 1e-5f, rows, d, wide, by.data, bdy.data, bdx.data, bdw.data, part.data};
  launched(rms_norm_forward(a, nullptr));
  a.x = bs.data;
  launched(rms_norm_backward(a, nullptr));
  GPU(cudaDeviceSynchronize());
  auto s = widen(bs.download()), g = widen(dy);
  std::vector<double> y(rows * d), dx(rows * d), dw(dw0.begin(), dw0.end());
  for (int64_t n = 0; n < rows; ++n) {
    double sq = 0, dot = 0;
    for (int i = 0; i < d; ++i) sq += s[n * d + i] * s[n * d + i], dot += s[n * d + i] * g[n * d + i] * w[i];
    double r = 1 / std::sqrt(sq / d + 1e-5);
    for (int i = 0; i < d; ++i) {
      double v = s[n * d + i];
      y[n * d + i] = v * r * w[i], dx[n * d + i] = r * (g[n * d + i] * w[i] - v * r * r * dot / d), dw[i] += g[n * d + i] * v * r;
    }
  }
  std::string name = std::string(wide ? "float32 " : "bf16 ") + std::to_string(rows) + " x " + std::to_string(d);
  const double limit = wide ? 1e-6 : 2.5e-3;
  expect("rms_norm " + name, error(widen(by.download()), y), limit),
      expect("rms_norm backward " + name + ", dx", error(widen(bdx.download()), dx), limit);
  expect("rms_norm backward " + name + ", dw", error(widen(bdw.download()), dw), 1e-5);
}

template <class T>
void check_situ() {
  constexpr bool wide = std::is_same_v<T, float>;
  Rng rng(2);
  const int n = 4096;
  auto gf = normals(n, rng, 0, 6), uf = normals(n, rng, 0, 20);
  for (int i = 0; i < 64; ++i) gf[i] = float((i % 8 - 4) * 1e-4), uf[i] = float((i / 8 - 4) * 1e-3);
  auto g = as<T>(gf), u = as<T>(uf), dy = as<T>(normals(n, rng));
  Buffer<T> bg(g), bu(u), by(n), bd(dy), dg(n), du(n);
  cuda::SituArgs a{bg.data, bu.data, n, 4, 25, wide, by.data, bd.data, dg.data, du.data};
  launched(situ_forward(a, nullptr));
  launched(situ_backward(a, nullptr));
  GPU(cudaDeviceSynchronize());
  auto wg = widen(g), wu = widen(u), wd = widen(dy);
  std::vector<double> y(n), rg(n), ru(n);
  for (int i = 0; i < n; ++i) {
    double t = std::tanh(wg[i] / 4), s = 1 / (1 + std::exp(-wg[i])), w = std::tanh(wu[i] / 25);
    y[i] = 4 * t * s * 25 * w, rg[i] = wd[i] * ((1 - t * t) * s + 4 * t * s * (1 - s)) * 25 * w, ru[i] = wd[i] * 4 * t * s * (1 - w * w);
  }
  std::string name = wide ? "float32" : "bf16";
  const double limit = wide ? 1e-6 : 2.5e-3;
  expect("situ " + name, error(widen(by.download()), y), limit);
  expect("situ backward " + name, std::max(error(widen(dg.download()), rg), error(widen(du.download()), ru)), limit);
}

void check_conv() {
  Rng rng(3);
  const int C = 136;
  std::vector<int> lengths = {1, 2, 3, 4, 5, 0, 1, 1, 2, 70, 33}, begins = {0}, slots = {5, 0, -1, 3, 8, 2, 9, 4, 7, 6, 1};
  for (int n : lengths) begins.push_back(begins.back() + n);
  const int N = begins.back(), S = 12;
  auto x = gpu::to_bf16(normals(N * C, rng)), window = gpu::to_bf16(normals(S * 3 * C, rng));
  auto w = normals(C * 4, rng);
  std::vector<double> y(N * C), left = widen(window);
  for (size_t s = 0; s < lengths.size(); ++s) {
    auto at = [&](int t, int c) {
      return t >= begins[s] ? double(to_float(x[t * C + c]))
             : slots[s] < 0 ? 0.
                            : double(to_float(window[(slots[s] * 3 + 3 + t - begins[s]) * C + c]));
    };
    for (int c = 0; c < C; ++c) {
      for (int t = begins[s]; t < begins[s + 1]; ++t) {
        double z = 0;
        for (int j = 0; j < 4; ++j) z += w[c * 4 + j] * at(t - 3 + j, c);
        y[t * C + c] = z / (1 + std::exp(-z));
      }
      if (slots[s] >= 0)
        for (int i = 0; i < 3; ++i) left[(slots[s] * 3 + i) * C + c] = at(begins[s + 1] - 3 + i, c);
    }
  }
  Buffer<bf16> bx(x), bw(window), by(N * C);
  Buffer<float> weight(w);
  Buffer<int> bb(begins), bs(slots);
  launched(cuda::conv_silu_forward({bx.data, weight.data, bb.data, int(lengths.size()), N, C, bw.data, bw.data, bs.data, by.data}, nullptr));
  GPU(cudaDeviceSynchronize());
  expect("conv and SiLU, sequences shorter than the width", error(widen(by.download()), y), 2.5e-3);
  expect("conv, windows left behind", error(widen(bw.download()), left), 0);
}

void check_route() {
  Rng rng(4);
  for (auto [E, K] : {std::pair{896, 16}, {64, 6}, {33, 31}}) {
    const int T = 301;
    auto logits = normals(T * E, rng), bias = normals(E, rng, 0, 0.1);
    for (int i = 0; i < E * 3; ++i) logits[i] = float(i % 5);  // ties
    std::fill(bias.begin(), bias.begin() + E / 2, 0.f);
    std::vector<int> padding(T, 0);
    padding[7] = padding[300] = 1;
    Buffer<float> bl(logits), bb(bias), w(T * K), cut(T), rw(T * K);
    Buffer<int> bp(padding), chosen(T * K), begins(E + 1), gather(T * K), where(T * K), counts(cuda::sort_rows_counts(T, K, E));
    launched(cuda::route({bl.data, bb.data, bp.data, T, E, K, true, 2.f, chosen.data, w.data, cut.data}, nullptr));
    launched(cuda::sort_rows({chosen.data, w.data, T, E, K, begins.data, gather.data, rw.data, where.data, counts.data}, nullptr));
    GPU(cudaDeviceSynchronize());
    auto c = chosen.download(), b = begins.download(), ga = gather.download(), wh = where.download();
    auto got = w.download(), cutoff = cut.download();
    double worst = 0;
    bool right = true;
    for (int t = 0; t < T; ++t) {
      std::vector<int> order(E);
      std::vector<float> s(E);
      std::iota(order.begin(), order.end(), 0);
      for (int e = 0; e < E; ++e) s[e] = float(1 / (1 + std::exp(-double(logits[t * E + e]))));
      if (padding[t]) {
        for (int k = 0; k < K; ++k) right &= c[t * K + k] == -1 && wh[t * K + k] == -1;
        continue;
      }
      std::stable_sort(order.begin(), order.end(), [&](int i, int j) { return s[i] + bias[i] > s[j] + bias[j]; });
      double sum = 0;
      for (int k = 0; k < K; ++k) sum += s[c[t * K + k]];
      for (int k = 0; k < K; ++k) {
        // scores of device and host differ in the last bit: equal choices to 1e-6 may change places, exact ties may not
        right &=
            std::abs(double(s[order[k]] + bias[order[k]]) - (s[c[t * K + k]] + bias[c[t * K + k]])) < 1e-6 && (t >= 3 || c[t * K + k] == order[k]);
        worst = std::max(worst, std::abs(got[t * K + k] - 2 * s[c[t * K + k]] / sum));
        const int row = wh[t * K + k];
        right &= ga[row] == t && row >= b[c[t * K + k]] && row < b[c[t * K + k] + 1];
      }
      worst = std::max(worst, std::abs(double(cutoff[t]) - (s[order[K]] + bias[order[K]])));
    }
    for (int e = 0; e < E; ++e)
      for (int i = b[e] + 1; i < b[e + 1]; ++i) right &= ga[i] > ga[i - 1];
    right &= b[E] == (T - 2) * K;
    expect_true("route and sort_rows, " + std::to_string(E) + " experts, top " + std::to_string(K) + ": choice, ties, padding, order", right);
    expect("route, weights and cutoff", worst, 2e-6);
  }
}

void check_loss_and_adamw() {
  Rng rng(5);
  const int rows = 9, V = 8200;
  auto x = gpu::to_bf16(normals(rows * V, rng, 0, 4));
  for (int i = 0; i < 100; ++i) x[V + i] = bf16{0xff80};  // minus infinity
  std::vector<int> targets = {5, 8000, -1, 0, 8199, 77, 1, 2, 3};
  std::vector<double> g(rows * V, 0.), loss(rows, 0.);
  for (int n = 0; n < rows; ++n) {
    if (targets[n] < 0) continue;
    double top = -INFINITY, sum = 0;
    for (int i = 0; i < V; ++i) top = std::max(top, double(to_float(x[n * V + i])));
    for (int i = 0; i < V; ++i) sum += std::exp(to_float(x[n * V + i]) - top);
    loss[n] = std::log(sum) + top - to_float(x[n * V + targets[n]]);
    for (int i = 0; i < V; ++i) g[n * V + i] = (std::exp(to_float(x[n * V + i]) - top) / sum - (i == targets[n])) * 0.125;
  }
  Buffer<bf16> bx(x);
  Buffer<int> bt(targets);
  Buffer<float> bl(rows);
  launched(cuda::cross_entropy({bx.data, bt.data, rows, V, 0.125f, bl.data}, nullptr));
  GPU(cudaDeviceSynchronize());
  expect("cross entropy, gradient in place", error(widen(bx.download()), g), 2.5e-3),
      expect("cross entropy, loss", error(widen(bl.download()), loss), 1e-6);

  const int n = 4099;
  auto w = normals(n, rng), m = normals(n, rng, 0, 0.1), v = normals(n, rng), gr = normals(n, rng);
  for (float& y : v) y *= y;
  std::vector<double> right(n);
  for (int i = 0; i < n; ++i) {
    double q = gr[i] * 0.5, mm = 0.9 * m[i] + 0.1 * q, vv = 0.95 * v[i] + 0.05 * q * q;
    right[i] = w[i] - 1e-2 * (mm / (1 - std::pow(0.9, 3)) / (std::sqrt(vv / (1 - std::pow(0.95, 3))) + 1e-8) + 0.1 * w[i]);
  }
  Buffer<float> bw(w), bm(m), bv(v), bg(gr);
  Buffer<bf16> copy(n);
  launched(cuda::adamw({bw.data, bm.data, bv.data, bg.data, copy.data, n, 3, 1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.5f}, nullptr));
  GPU(cudaDeviceSynchronize());
  expect("adamw, weight", error(widen(bw.download()), right), 1e-6), expect("adamw, bf16 copy", error(widen(copy.download()), right), 2.5e-3);
}

void time_all() {
  Rng rng(6);
  const int64_t T = 8192, d = 7168;
  {
    Buffer<bf16> x(many_normals(T * d, rng)), y(T * d), dx(T * d);
    Buffer<float> w(std::vector<float>(d, 1.f)), dw(std::vector<float>(d, 0.f)), part(264 * d);
    cuda::RmsNormArgs a{x.data, nullptr, nullptr, w.data, 1e-5f, T, int(d), false, y.data, x.data, dx.data, dw.data, part.data};
    report("rms_norm forward, 8192 x 7168", time_us([&](int, cudaStream_t s) { launched(rms_norm_forward(a, s)); }), 55);
    report("rms_norm backward, 8192 x 7168", time_us([&](int, cudaStream_t s) { launched(rms_norm_backward(a, s)); }), 82);
  }
  {
    const int64_t n = T * 12288;
    Buffer<bf16> g(many_normals(n, rng)), u(many_normals(n, rng)), y(n), dg(n), du(n);
    cuda::SituArgs a{g.data, u.data, n, 4, 25, false, y.data, y.data, dg.data, du.data};
    report("situ forward, 8192 x 12288", time_us([&](int, cudaStream_t s) { launched(situ_forward(a, s)); }), 140);
    report("situ backward, 8192 x 12288", time_us([&](int, cudaStream_t s) { launched(situ_backward(a, s)); }), 234);
    Buffer<float> w(normals(12288 * 4, rng));
    Buffer<int> b(std::vector<int>{0, int(T)});
    report("conv and SiLU, 8192 x 12288", time_us([&](int, cudaStream_t s) {
             launched(cuda::conv_silu_forward({g.data, w.data, b.data, 1, T, 12288, nullptr, nullptr, nullptr, y.data}, s));
           }),
           94);
  }
  {
    Buffer<float> l(normals(T * 896, rng)), b(std::vector<float>(896, 0.f)), w(T * 16), cut(T), rw(T * 16);
    Buffer<int> c(T * 16), be(897), ga(T * 16), wh(T * 16), counts(cuda::sort_rows_counts(T, 16, 896));
    report("route, 8192 tokens, top 16 of 896", time_us([&](int, cudaStream_t s) {
             launched(cuda::route({l.data, b.data, nullptr, T, 896, 16, true, 1.f, c.data, w.data, cut.data}, s));
           }),
           7);
    report("sort_rows, 8192 tokens", time_us([&](int, cudaStream_t s) {
             launched(cuda::sort_rows({c.data, w.data, T, 896, 16, be.data, ga.data, rw.data, wh.data, counts.data}, s));
           }),
           1);
  }
  {
    const int64_t rows = 1024, V = 163840;
    Buffer<bf16> x(many_normals(rows * V, rng));
    Buffer<int> t(std::vector<int>(rows, 7));
    Buffer<float> l(rows);
    report("cross entropy, 1024 x 163840", time_us([&](int, cudaStream_t s) {
             launched(cuda::cross_entropy({x.data, t.data, rows, int(V), 1e-3f, l.data}, s));
           }),
           156);
  }
  {
    const int64_t n = 1 << 26;
    Buffer<float> w(n), m(n), v(n), g(n);
    w.zero(), m.zero(), v.zero(), g.zero();
    Buffer<bf16> c(n);
    report("adamw, 67 M weights", time_us([&](int, cudaStream_t s) {
             launched(cuda::adamw({w.data, m.data, v.data, g.data, c.data, n, 3, 1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.f}, s));
           }),
           n * 30 / 4.3e6);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (wants(argc, argv, "check")) {
    check_norm<bf16>(300, 7168), check_norm<float>(37, 512), check_norm<bf16>(1, 8), check_norm<float>(600, 3584);
    check_situ<bf16>(), check_situ<float>(), check_conv(), check_route(), check_loss_and_adamw();
  }
  if (wants(argc, argv, "time")) time_all();
  std::printf("%d failures\n", failures);
  return failures != 0;
}

// Attention over depth on the GPU: forward, fused forward and backward against double precision, and their times.
#include "bench/gpu/gpu.h"
#include "k3/ops/depth_mix/depth_mix_cuda.h"

using namespace k3;
using namespace k3::gpu;

namespace {

void check(int n, int64_t rows, int d, double size) {
  Rng rng(n * 7 + d);
  std::vector<std::vector<bf16>> v;
  for (int i = 0; i < n; ++i) v.push_back(gpu::to_bf16(normals(rows * d, rng, 0, size * (i + 1))));
  std::vector<float> w = normals(d, rng, 1, 0.2), p = normals(d, rng, 0, 3 / std::sqrt(d)), norm = normals(d, rng, 1, 0.2), dw0 = normals(d, rng),
                     dp0 = normals(d, rng);
  std::vector<bf16> add = gpu::to_bf16(normals(rows * d, rng)), dy = gpu::to_bf16(normals(rows * d, rng));
  std::string name = "depth mix, " + std::to_string(n) + " sources, " + std::to_string(rows) + " x " + std::to_string(d) + ", ";

  std::vector<Buffer<bf16>> dv, dd;
  for (int i = 0; i < n; ++i) dv.emplace_back(v[i]), dd.emplace_back(rows * d);
  Buffer<bf16> dadd(add), ddy(dy), y(rows * d), nn(rows * d), sum(rows * d);
  Buffer<float> fw(w), fp(p), fn(norm), stats(rows * 32), part(cuda::depth_mix_partial(d)), gw(dw0), gp(dp0);
  cuda::DepthMixArgs a{};
  for (int i = 0; i < n; ++i) a.v[i] = dv[i].data, a.dv[i] = dd[i].data;
  a.sources = n, a.w = fw.data, a.p = fp.data, a.eps = 1e-5f, a.rows = rows, a.d = d, a.y = y.data, a.stats = stats.data, a.dy = ddy.data;
  a.dw = gw.data, a.dp = gp.data, a.partial = part.data;

  std::vector<double> ry(rows * d, 0.), rn(rows * d), rdw(dw0.begin(), dw0.end()), rdp(dp0.begin(), dp0.end());
  std::vector<std::vector<double>> rdv(n, std::vector<double>(rows * d));
  auto reference = [&] {
    std::fill(ry.begin(), ry.end(), 0.);
    std::vector<double> du(d, 0.);
    for (int64_t t = 0; t < rows; ++t) {
      std::vector<double> r(n), s(n), c(n), alpha(n);
      double top = -INFINITY, total = 0, mean = 0;
      for (int i = 0; i < n; ++i) {
        double ss = 0, dot = 0;
        for (int k = 0; k < d; ++k) {
          double x = to_float(v[i][t * d + k]);
          ss += x * x, dot += x * w[k] * p[k], c[i] += x * to_float(dy[t * d + k]);
        }
        r[i] = 1 / std::sqrt(ss / d + 1e-5), s[i] = r[i] * dot, top = std::max(top, s[i]);
      }
      for (int i = 0; i < n; ++i) total += alpha[i] = std::exp(s[i] - top);
      for (int i = 0; i < n; ++i) alpha[i] /= total, mean += alpha[i] * c[i];
      for (int i = 0; i < n; ++i) {
        double ds = alpha[i] * (c[i] - mean);
        for (int k = 0; k < d; ++k) {
          double x = to_float(v[i][t * d + k]);
          ry[t * d + k] += alpha[i] * x;
          rdv[i][t * d + k] = alpha[i] * to_float(dy[t * d + k]) + ds * r[i] * w[k] * p[k] - ds * s[i] * r[i] * r[i] / d * x;
          du[k] += ds * r[i] * x;
        }
      }
      double square = 0;
      for (int k = 0; k < d; ++k) square += ry[t * d + k] * ry[t * d + k];
      for (int k = 0; k < d; ++k) rn[t * d + k] = ry[t * d + k] / std::sqrt(square / d + 1e-5) * norm[k];
    }
    for (int k = 0; k < d; ++k) rdw[k] = dw0[k] + du[k] * p[k], rdp[k] = dp0[k] + du[k] * w[k];
  };
  reference();
  launched(depth_mix_forward(a, nullptr));
  launched(depth_mix_backward(a, nullptr));
  GPU(cudaDeviceSynchronize());
  auto first = y.download();
  expect(name + "y", error(widen(first), ry), 2.5e-3);  // rounded to bf16: 1.7e-3
  double worst = 0;
  for (int i = 0; i < n; ++i) worst = std::max(worst, error(widen(dd[i].download()), rdv[i]));
  expect(name + "dv", worst, 2.5e-3);
  auto fdw = gw.download(), fdp = gp.download();
  expect(name + "dw", error(widen(fdw), rdw), 1e-4), expect(name + "dp", error(widen(fdp), rdp), 1e-4);
  gw.upload(dw0), gp.upload(dp0), y.poison(), part.poison();
  for (auto& x : dd) x.zero();
  a.add = true;
  launched(depth_mix_forward(a, nullptr));
  launched(depth_mix_backward(a, nullptr));
  GPU(cudaDeviceSynchronize());
  double again = 0;
  for (int i = 0; i < n; ++i) again = std::max(again, error(widen(dd[i].download()), rdv[i]));
  expect(name + "dv added to zeros", again, 2.5e-3);
  expect_true(name + "two runs are bitwise equal", same_bits(first, y.download()) && same_bits(fdw, gw.download()) && same_bits(fdp, gp.download()));

  a.addend = dadd.data, a.sum = sum.data, a.norm = fn.data, a.n = nn.data;  // fused: the last source grows first, the mix is normed
  for (int64_t i = 0; i < rows * d; ++i) v[n - 1][i] = k3::to_bf16(to_float(v[n - 1][i]) + to_float(add[i]));
  reference();
  launched(depth_mix_forward(a, nullptr));
  GPU(cudaDeviceSynchronize());
  expect(name + "fused y", error(widen(y.download()), ry), 2.5e-3), expect(name + "fused norm", error(widen(nn.download()), rn), 4e-3);
  expect(name + "fused sum", error(widen(sum.download()), widen(v[n - 1])), 0);
}

void time(int n, int64_t rows, double forward, double backward) {
  Rng rng(2);
  const int d = 7168;
  std::vector<Buffer<bf16>> v, dv;
  for (int i = 0; i < n; ++i) v.emplace_back(many_normals(rows * d, rng)), dv.emplace_back(rows * d);
  Buffer<bf16> y(rows * d), dy(many_normals(rows * d, rng)), add(many_normals(rows * d, rng, 0, 0.01)), norm_out(rows * d);
  Buffer<float> w(std::vector<float>(d, 1.f)), p(normals(d, rng, 0, 0.02)), stats(rows * 32), part(cuda::depth_mix_partial(d)),
      dw(std::vector<float>(d, 0.f)), dp(std::vector<float>(d, 0.f));
  cuda::DepthMixArgs a{};
  for (int i = 0; i < n; ++i) a.v[i] = v[i].data, a.dv[i] = dv[i].data;
  a.sources = n, a.w = w.data, a.p = p.data, a.eps = 1e-5f, a.rows = rows, a.d = d, a.y = y.data, a.stats = stats.data, a.dy = dy.data,
  a.dw = dw.data, a.dp = dp.data, a.partial = part.data;
  std::string name = ", T " + std::to_string(rows) + ", " + std::to_string(n) + " sources, d 7168";
  report("AttnRes forward" + name, time_us([&](int, cudaStream_t s) { launched(depth_mix_forward(a, s)); }), forward);
  report("AttnRes backward" + name, time_us([&](int, cudaStream_t s) { launched(depth_mix_backward(a, s)); }), backward);
  a.addend = add.data, a.sum = y.data, a.norm = w.data, a.n = norm_out.data;
  Buffer<bf16> sum(rows * d);
  a.sum = sum.data;
  report("AttnRes forward with addition and norm" + name, time_us([&](int, cudaStream_t s) { launched(depth_mix_forward(a, s)); }),
         forward * (n + 4) / (n + 1));
}

}  // namespace

int main(int argc, char** argv) {
  if (wants(argc, argv, "check"))
    check(9, 300, 7168, 1), check(1, 5, 7168, 1), check(4, 133, 512, 1), check(3, 40, 8, 1), check(9, 20, 7168, 1e4), check(2, 1, 4096, 1e-3),
        check(5, 270, 3584, 1);
  if (wants(argc, argv, "time")) time(9, 8192, 273, 519), time(4, 8192, 137, 246), time(9, 1024, 34, 65);
  std::printf("%d failures\n", failures);
  return failures != 0;
}

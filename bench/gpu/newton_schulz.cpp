// Newton-Schulz on the GPU: against the plain iteration in double precision, and its time.
#include "bench/gpu/gpu.h"
#include "k3/ops/update/newton_schulz_cuda.h"

using namespace k3;
using namespace k3::gpu;

namespace {

const float kFive[5][3] = {{3.4445f, -4.7750f, 2.0315f},
                           {3.4445f, -4.7750f, 2.0315f},
                           {3.4445f, -4.7750f, 2.0315f},
                           {3.4445f, -4.7750f, 2.0315f},
                           {3.4445f, -4.7750f, 2.0315f}};

std::vector<double> plain(const bf16* g, int n, double safety) {  // (128, n)
  const int D = 128;
  std::vector<double> x(D * n), y(D * n), A(D * D), B(D * D);
  double norm = 0;
  for (int i = 0; i < D * n; ++i) x[i] = to_float(g[i]), norm += x[i] * x[i];
  if (norm == 0) return x;
  for (double& v : x) v /= safety * std::sqrt(norm);
  for (auto& c : kFive) {
    for (int i = 0; i < D; ++i)
      for (int j = 0; j < D; ++j) {
        double s = 0;
        for (int k = 0; k < n; ++k) s += x[i * n + k] * x[j * n + k];
        A[i * D + j] = s;
      }
    for (int i = 0; i < D; ++i)
      for (int j = 0; j < D; ++j) {
        double s = 0;
        for (int k = 0; k < D; ++k) s += A[i * D + k] * A[k * D + j];
        B[i * D + j] = c[1] * A[i * D + j] + c[2] * s;
      }
    for (int i = 0; i < D; ++i)
      for (int k = 0; k < n; ++k) y[i * n + k] = c[0] * x[i * n + k];
    for (int i = 0; i < D; ++i)
      for (int j = 0; j < D; ++j)
        for (int k = 0; k < n; ++k) y[i * n + k] += B[i * D + j] * x[j * n + k];
    x.swap(y);
  }
  return x;
}

void check() {
  const int heads = 3, n = 384, D = 128;
  Rng rng(4);
  std::vector<float> g(heads * D * n, 0.f);
  for (int h = 0; h < 2; ++h)  // rows of very different size: singular values over three decades; the third block is zero
    for (int i = 0; i < D; ++i) {
      double size = std::pow(10., h == 0 ? 0. : -3. * i / D);
      for (int k = 0; k < n; ++k) g[(h * D + i) * n + k] = float(size * rng.normal());
    }
  auto g16 = gpu::to_bf16(g);
  Buffer<bf16> dg(g16), x(heads * D * n), q(heads * 2 * D * D);
  Buffer<float> gram(heads * D * D);
  cuda::NewtonSchulzArgs a{dg.data, heads, n, 5, kFive, 1.01f, gram.data, q.data, x.data};
  launched(newton_schulz(a, nullptr));
  GPU(cudaDeviceSynchronize());
  auto first = x.download();
  for (int h = 0; h < heads; ++h) {
    std::vector<double> got = widen(std::vector<bf16>(first.begin() + h * D * n, first.begin() + (h + 1) * D * n));
    expect("Newton-Schulz, block " + std::to_string(h), error(got, plain(&g16[h * D * n], n, 1.01)), 3e-3);  // result in bf16: 1.7e-3
  }
  x.poison(), gram.poison(), q.poison();
  launched(newton_schulz(a, nullptr));
  GPU(cudaDeviceSynchronize());
  expect_true("Newton-Schulz, two runs are bitwise equal", same_bits(first, x.download()));
}

void time() {
  const int heads = 96, n = 7168, D = 128;
  Rng rng(4);
  Buffer<bf16> g(many_normals(int64_t(heads) * D * n, rng)), x(int64_t(heads) * D * n), q(heads * 2 * D * D);
  Buffer<float> gram(heads * D * D);
  cuda::NewtonSchulzArgs a{g.data, heads, n, 5, kFive, 1.01f, gram.data, q.data, x.data};
  report("Newton-Schulz, 96 x 128 x 7168", time_us([&](int, cudaStream_t s) { launched(newton_schulz(a, s)); }), 123);
}

}  // namespace

int main(int argc, char** argv) {
  if (wants(argc, argv, "check")) check();
  if (wants(argc, argv, "time")) time();
  std::printf("%d failures\n", failures);
  return failures != 0;
}

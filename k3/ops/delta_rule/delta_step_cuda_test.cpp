// KDA's fused decode step against the same in double, and after the chunk kernel.
#include <gtest/gtest.h>

#include "k3/ops/delta_rule/delta_kernel_testing.h"

namespace k3::testing {
namespace {

using delta_step = kernel;

double silu(double x) { return x / (1 + std::exp(-x)); }

TEST_F(delta_step, cuda_equals_the_recurrence_and_filler_touches_nothing) {
  for (int which : {0, 1, 3, 7, 10}) {
    const Gates& g = kGates[which];
    SCOPED_TRACE(g.name);
    const int rows = 5, slots = 7, H = 3, W = H * D;
    Problem p = make({rows}, H, g, 11);
    Random rng(12);
    std::vector<float> conv[3], norm = rng.normals(D, 1, 0.1), state = rng.normals(int64_t(slots) * W * D, 0, 0.3),
                                window = rng.normals(slots * 9 * W), og = rng.normals(rows * W);
    for (auto& c : conv) c = rng.normals(W * 4, 0, 0.5);
    for (float& x : window) x = rounded(x);
    for (float& x : og) x = rounded(x);
    std::vector<int> slot = {4, -1, 0, 6, 2};
    std::vector<double> y(rows * W, 0.), S(state.begin(), state.end()), win(window.begin(), window.end());
    for (int r = 0; r < rows; ++r) {
      if (slot[r] < 0) continue;
      for (int h = 0; h < H; ++h) {
        std::vector<double> in[3];
        for (int i = 0; i < 3; ++i) {
          const auto& raw = i == 0 ? p.q : i == 1 ? p.k : p.v;
          for (int c = h * D; c < h * D + D; ++c) {
            double* w = &win[(int64_t(slot[r]) * 9 + i) * W + c];
            double now = raw[r * W + c];
            in[i].push_back(silu(conv[i][c * 4] * w[0] + conv[i][c * 4 + 1] * w[3 * W] + conv[i][c * 4 + 2] * w[6 * W] + conv[i][c * 4 + 3] * now));
            w[0] = w[3 * W], w[3 * W] = w[6 * W], w[6 * W] = now;
          }
        }
        double nq = 1e-6, nk = 1e-6, beta = 1 / (1 + std::exp(-double(p.b[r * H + h]))), out[D] = {}, u[D] = {}, square = 0;
        for (int i = 0; i < D; ++i) nq += in[0][i] * in[0][i], nk += in[1][i] * in[1][i];
        double* s = &S[(int64_t(slot[r]) * H + h) * D * D];
        for (int i = 0; i < D; ++i) {
          const double a = std::exp(log_decay(p, h, i, p.x[r * W + h * D + i]));
          for (int j = 0; j < D; ++j) u[j] += in[1][i] / std::sqrt(nk) * (s[i * D + j] *= a);
        }
        for (int j = 0; j < D; ++j) u[j] = beta * (in[2][j] - u[j]);
        for (int i = 0; i < D; ++i)
          for (int j = 0; j < D; ++j) out[j] += in[0][i] / std::sqrt(nq) * (s[i * D + j] += in[1][i] / std::sqrt(nk) * u[j]);
        for (double& x : out) x *= kScale, square += x * x;
        for (int j = 0; j < D; ++j)
          y[r * W + h * D + j] = out[j] / std::sqrt(square / D + 1e-5) * norm[j] / (1 + std::exp(-double(og[r * W + h * D + j])));
      }
    }
    There<bf16> q(narrowed(p.q)), k(narrowed(p.k)), v(narrowed(p.v)), x(narrowed(p.x)), b(narrowed(p.b)), gate(narrowed(og)), w(narrowed(window)),
        out(rows * W);
    There<float> c0(conv[0]), c1(conv[1]), c2(conv[2]), ds(state), A(p.A_log), dt(p.dt_bias), n(norm);
    There<int> sl(slot);
    cuda::DeltaStepArgs a{q.data,
                          k.data,
                          v.data,
                          x.data,
                          gate.data,
                          b.data,
                          W,
                          W,
                          W,
                          W,
                          W,
                          H,
                          W,
                          c0.data,
                          c1.data,
                          c2.data,
                          w.data,
                          ds.data,
                          sl.data,
                          {g.bounded, -5.f, A.data, dt.data},
                          float(kScale),
                          n.data,
                          1e-5f,
                          out.data,
                          rows,
                          H};
    K3_LAUNCH(delta_step(a, gpu::stream()));
    const auto first = out.download();
    EXPECT_LE(error(widened(first), y), 4e-3);  // y is rounded to bfloat16: 2^-9 at most, 1.7e-3 on average
    EXPECT_LE(error(ds, S), 3e-6);
    EXPECT_EQ(error(w, win), 0);
    out.poison(), ds.upload(state), w.upload(narrowed(window));
    a.chained = true;
    K3_LAUNCH(delta_step(a, gpu::stream()));
    EXPECT_TRUE(same(first, out.download())) << "a chained launch differs";
  }
}

// A token after a prompt: the memory that the chunk kernel leaves is the one that the step goes on with (taps of the convolution at the token alone).
TEST_F(delta_step, cuda_after_the_chunk_kernel_equals_the_chunk_kernel) {
  for (const Gates& g : {kGates[0], kGates[7]})
    for (int T : {1, 31, 32, 65}) {
      SCOPED_TRACE(std::string(g.name) + ", after " + std::to_string(T));
      const int H = 2, W = H * D;
      Problem p = make({T + 1}, H, g, uint64_t(T));
      Problem fed = p;  // what the chunk kernel reads is what the convolution made
      for (auto* v : {&fed.q, &fed.k, &fed.v})
        for (float& x : *v) x = rounded(float(silu(x)));
      There<bf16> q(narrowed(fed.q)), k(narrowed(fed.k)), v(narrowed(fed.v)), x(narrowed(p.x)), b(narrowed(p.b)), o(int64_t(p.q.size()));
      There<float> A(p.A_log), dt(p.dt_bias), whole(p.state), state(p.state);
      There<int> begins(std::vector<int>{0, T + 1}), slot(std::vector<int>{0});
      cuda::DeltaChunkArgs a{};
      a.q = q.data, a.k = k.data, a.v = v.data, a.x = x.data, a.b = b.data, a.o = o.data, a.scale = float(kScale);
      a.q_stride = a.k_stride = a.v_stride = a.x_stride = a.o_stride = W, a.b_stride = H;
      a.gate = {g.bounded, -5.f, A.data, dt.data}, a.begins = begins.data, a.sequences = 1, a.heads = H, a.tokens = T + 1;
      a.state_in = a.state_out = whole.data;
      K3_LAUNCH(delta_chunk_forward(a, gpu::stream()));
      gpu::synchronize();
      begins.upload({0, T}), a.tokens = T, a.state_in = a.state_out = state.data;
      K3_LAUNCH(delta_chunk_forward(a, gpu::stream()));
      const auto row = [&](const std::vector<float>& from, int64_t width) {
        return narrowed(std::vector<float>(from.begin() + T * width, from.begin() + (T + 1) * width));
      };
      std::vector<float> taps(size_t(W) * 4, 0.f);
      for (int c = 0; c < W; ++c) taps[size_t(c) * 4 + 3] = 1;
      There<bf16> rq(row(p.q, W)), rk(row(p.k, W)), rv(row(p.v, W)), rx(row(p.x, W)), rb(row(p.b, H)), rg(std::vector<bf16>(size_t(W), to_bf16(0.f))),
          window(std::vector<bf16>(size_t(9 * W), to_bf16(0.f))), y(W);
      There<float> conv(taps), norm(std::vector<float>(D, 1.f));
      cuda::DeltaStepArgs s{};
      s.q = rq.data, s.k = rk.data, s.v = rv.data, s.x = rx.data, s.g = rg.data, s.b = rb.data;
      s.q_stride = s.k_stride = s.v_stride = s.x_stride = s.g_stride = s.y_stride = W, s.b_stride = H;
      s.q_conv = s.k_conv = s.v_conv = conv.data, s.window = window.data, s.state = state.data, s.slots = slot.data;
      s.gate = a.gate, s.scale = float(kScale), s.norm = norm.data, s.eps = 1e-5f, s.y = y.data, s.rows = 1, s.heads = H;
      K3_LAUNCH(delta_step(s, gpu::stream()));
      EXPECT_LE(error(state, widened(whole.download())), 5e-3);
    }
}

}  // namespace
}  // namespace k3::testing

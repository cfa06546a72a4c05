#include "k3/ops/update/update.h"

#include <gtest/gtest.h>

#include "k3/ops/testing.h"
#include "k3/ops/update/update_ref.h"

namespace k3 {
namespace {

using testing::Values;

Tensor tensor(Values& v, Shape s) { return Tensor(v.data(), DType::f32, s); }
bool equal(const Values& a, const Values& b) { return std::memcmp(a.data(), b.data(), size_t(a.size()) * 4) == 0; }

// Singular values by one-sided Jacobi: rotate pairs of rows until all are orthogonal; their lengths are what is asked for.
std::vector<double> singular_values(std::vector<double> x, int64_t rows, int64_t cols) {
  if (rows > cols) {
    std::vector<double> t(x.size());
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < cols; ++j) t[j * rows + i] = x[i * cols + j];
    x = t, std::swap(rows, cols);
  }
  for (double worst = 1; worst > 1e-10;) {
    worst = 0;
    for (int64_t p = 0; p < rows; ++p)
      for (int64_t q = p + 1; q < rows; ++q) {
        double *a = &x[p * cols], *b = &x[q * cols], aa = 0, bb = 0, ab = 0;
        for (int64_t i = 0; i < cols; ++i) aa += a[i] * a[i], bb += b[i] * b[i], ab += a[i] * b[i];
        if (ab == 0 || std::abs(ab) <= 1e-12 * std::sqrt(aa * bb)) continue;
        worst = std::max(worst, std::abs(ab) / std::sqrt(aa * bb));
        double z = (bb - aa) / (2 * ab), t = (z >= 0 ? 1 : -1) / (std::abs(z) + std::sqrt(1 + z * z)), c = 1 / std::sqrt(1 + t * t), s = c * t;
        for (int64_t i = 0; i < cols; ++i) {
          double u = c * a[i] - s * b[i];
          b[i] = s * a[i] + c * b[i], a[i] = u;
        }
      }
  }
  std::vector<double> out;
  for (int64_t p = 0; p < rows; ++p) {
    double s = 0;
    for (int64_t i = 0; i < cols; ++i) s += x[p * cols + i] * x[p * cols + i];
    out.push_back(std::sqrt(s));
  }
  std::sort(out.begin(), out.end());
  return out;
}

// Orthonormal rows, from random ones by Gram and Schmidt.
std::vector<double> orthonormal(int64_t rows, int64_t cols, uint64_t seed) {
  std::vector<double> x = Values(rows * cols, seed).as_double();
  for (int64_t p = 0; p < rows; ++p)
    for (int64_t twice = 0; twice < 2; ++twice) {
      for (int64_t q = 0; q < p; ++q) {
        double dot = 0;
        for (int64_t i = 0; i < cols; ++i) dot += x[p * cols + i] * x[q * cols + i];
        for (int64_t i = 0; i < cols; ++i) x[p * cols + i] -= dot * x[q * cols + i];
      }
      double s = 0;
      for (int64_t i = 0; i < cols; ++i) s += x[p * cols + i] * x[p * cols + i];
      for (int64_t i = 0; i < cols; ++i) x[p * cols + i] /= std::sqrt(s);
    }
  return x;
}

// U diag(s) V^T with m = min(rows, cols) singular values falling evenly on a log scale from 1 to `least`, times `size`
Values with_singular_values(int64_t rows, int64_t cols, double least, double size, uint64_t seed) {
  int64_t m = std::min(rows, cols);
  auto u = orthonormal(m, rows, seed), v = orthonormal(m, cols, seed + 1);
  Values x(rows * cols, 0);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < cols; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < m; ++k) sum += u[k * rows + i] * v[k * cols + j] * std::pow(least, m > 1 ? double(k) / double(m - 1) : 0);
      x[i * cols + j] = float(size * sum);
    }
  return x;
}

constexpr std::pair<int64_t, int64_t> kShapes[] = {{1, 1}, {1, 40}, {40, 1}, {24, 24}, {33, 48}, {48, 33}, {16, 100}, {100, 16}, {37, 74}};

TEST(update, newton_schulz_brings_every_singular_value_near_one) {
  for (auto isa : testing::levels())
    for (auto [rows, cols] : kShapes)
      for (double size : {1e-3, 1.0, 1e6}) {
        testing::ForceIsa force(isa);
        testing::Step step(false, size_t(1) << 22);
        Values x = with_singular_values(rows, cols, 0.006, size, 1);  // the least is about 0.0025 |X|_F
        newton_schulz(step.context, tensor(x, {1, rows, cols}));
        auto s = singular_values(x.as_double(), rows, cols);
        EXPECT_GE(s.front(), 0.68) << rows << " x " << cols;
        EXPECT_LE(s.back(), 1.21) << rows << " x " << cols;
      }
}

// The plain iteration magnifies the rounding of one step by at most a = 3.4 per later step: a^5 eps = 3e-5 on the smallest direction.
// The form for long blocks works on squares of singular values, which costs the smallest directions more: kernels.md 13 measures 1.5e-4 over
// m = 64 directions with the recursion in float32; with m = 16 one direction holds twice the share of the norm.
TEST(update, newton_schulz_equals_the_reference_at_every_level) {
  for (auto isa : testing::levels())
    for (auto [rows, cols] : kShapes) {
      testing::ForceIsa force(isa);
      testing::Step step(false, size_t(1) << 22);
      for (double least : {1.0, 0.3, 0.006}) {
        Values x = with_singular_values(rows, cols, least, 3, 1);
        auto want = x.as_double();
        ref::newton_schulz(want.data(), rows, cols);
        newton_schulz(step.context, tensor(x, {1, rows, cols}));
        double error = 0, norm = 0;
        for (int64_t i = 0; i < x.size(); ++i) error += (x[i] - want[i]) * (x[i] - want[i]), norm += want[i] * want[i];
        EXPECT_LE(std::sqrt(error / norm), 3e-4) << rows << " x " << cols << " least " << least;
      }
    }
}

TEST(update, blocks_are_orthogonalised_each_by_itself_and_zero_stays_zero) {
  int64_t blocks = 5;
  for (auto [rows, cols] : {std::pair<int64_t, int64_t>{20, 30}, {30, 20}, {16, 70}, {208, 210}, {130, 520}}) {  // small ones, large ones
    testing::Step step(false, size_t(1) << 26);
    int64_t size = rows * cols;
    Values all(blocks * size, 3);
    for (int64_t b = 0; b < blocks; ++b)
      for (int64_t i = 0; i < size; ++i) all[b * size + i] *= b == 3 ? 0 : float(std::pow(10, b));
    Values before = all;
    newton_schulz(step.context, tensor(all, {blocks, rows, cols}));
    for (int64_t b = 0; b < blocks; ++b) {
      Values one = before.slice(b * size, size);
      newton_schulz(step.context, tensor(one, {1, rows, cols}));
      EXPECT_TRUE(equal(one, all.slice(b * size, size))) << "block " << b;
      if (b == 3) { EXPECT_TRUE(equal(one, Values(size, 0, 0))); }
    }
  }
}

double norm_of(const Values& v, int64_t at, int64_t n) {
  double s = 0;
  for (int64_t i = at; i < at + n; ++i) s += double(v[i]) * v[i];
  return std::sqrt(s);
}

// training.md 1.2: gradients whose heads differ 6.8 times in norm; updates differ 2.28 times when the matrix is taken whole.
TEST(update, one_block_a_head_evens_out_what_the_whole_matrix_leaves_uneven) {
  const int64_t heads = 16, rows = 32, cols = 300;  // taller than wide, as the K3 projections are
  Values grad(heads * rows * cols, 1);
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t i = 0; i < rows * cols; ++i) grad[h * rows * cols + i] *= float(std::pow(6.8, double(h) / (heads - 1)));
  auto spread = [&](int64_t blocks) {
    testing::Step step(false, size_t(1) << 24);
    Values w(grad.size(), 0, 0), m(grad.size(), 0, 0);
    muon_step(step.context, {{tensor(w, {heads * rows, cols}), tensor(grad, {heads * rows, cols}), tensor(m, {heads * rows, cols}), blocks}},
              {.lr = 1});
    double most = 0, least = INFINITY;
    for (int64_t h = 0; h < heads; ++h)
      most = std::max(most, norm_of(w, h * rows * cols, rows * cols)), least = std::min(least, norm_of(w, h * rows * cols, rows * cols));
    return most / least;
  };
  double whole = spread(1), by_head = spread(heads);
  fmt::print("update norms of heads, largest over smallest: whole {:.2f}, by head {:.3f}\n", whole, by_head);
  EXPECT_GT(whole, 2);
  EXPECT_LT(by_head, 1.05);
}

struct Matrix {
  Values w, g, m;
  Matrix(int64_t n, uint64_t seed) : w(n, seed, 0.1), g(n, seed + 1), m(n, seed + 2) {}
};

TEST(update, a_head_without_gradient_does_not_move_and_the_others_do_not_notice) {
  const int64_t heads = 5, rows = 16, cols = 48, size = rows * cols;
  Matrix a(heads * size, 1);
  std::fill_n(a.g.data() + 2 * size, size, 0.0f);
  std::fill_n(a.m.data() + 2 * size, size, 0.0f);
  Matrix before = a, b = a;
  for (int64_t i = 0; i < size; ++i) b.g[2 * size + i] = float(i % 7);
  testing::Step step(false, size_t(1) << 24);
  for (Matrix* x : {&a, &b}) {
    Shape s{heads * rows, cols};
    muon_step(step.context, {{tensor(x->w, s), tensor(x->g, s), tensor(x->m, s), heads}}, {.lr = 0.1f, .weight_decay = 0});
  }
  for (int64_t h = 0; h < heads; ++h) {
    EXPECT_EQ(equal(a.w.slice(h * size, size), before.w.slice(h * size, size)), h == 2) << "head " << h;
    EXPECT_EQ(equal(a.w.slice(h * size, size), b.w.slice(h * size, size)), h != 2) << "head " << h;
  }
}

TEST(update, fused_and_separate_matrices_get_the_same_bits_alone_or_in_a_list) {
  const int64_t rows = 32, cols = 80, size = rows * cols;
  Matrix fused(3 * size, 1);  // q, k and v of two heads each
  Matrix other(40 * 24, 9), alone = other;
  std::vector<Matrix> parts;
  for (int64_t i = 0; i < 3; ++i) {
    Matrix& p = parts.emplace_back(size, 0);
    p.w = fused.w.slice(i * size, size), p.g = fused.g.slice(i * size, size), p.m = fused.m.slice(i * size, size);
  }
  testing::Step step(false, size_t(1) << 24);
  auto matrix = [](Matrix& x, int64_t r, int64_t c, int64_t blocks) {
    return MuonMatrix{tensor(x.w, {r, c}), tensor(x.g, {r, c}), tensor(x.m, {r, c}), blocks};
  };
  const MuonOptions o{.lr = 0.02f};
  muon_step(step.context, {matrix(fused, 3 * rows, cols, 6), matrix(other, 40, 24, 1)}, o);
  for (Matrix& p : parts) muon_step(step.context, {matrix(p, rows, cols, 2)}, o);
  muon_step(step.context, {matrix(alone, 40, 24, 1)}, o);
  for (int64_t i = 0; i < 3; ++i) EXPECT_TRUE(equal(fused.w.slice(i * size, size), parts[i].w)) << i;
  EXPECT_TRUE(equal(other.w, alone.w));
}

TEST(update, muon_equals_the_reference_over_several_steps) {
  for (auto isa : testing::levels())
    for (bool nesterov : {true, false})
      for (auto [rows, cols, blocks] : {std::array<int64_t, 3>{20, 30, 1}, {36, 50, 3}, {50, 20, 1}}) {
        testing::ForceIsa force(isa);
        testing::Step step(false, size_t(1) << 24);
        int64_t n = rows * cols, each = n / blocks;
        Matrix x(n, 1);
        auto w = x.w.as_double(), m = x.m.as_double();
        for (int at = 0; at < 4; ++at) {
          Values g(n, uint64_t(50 + at));
          auto gd = g.as_double();
          muon_step(step.context, {{tensor(x.w, {rows, cols}), tensor(g, {rows, cols}), tensor(x.m, {rows, cols}), blocks}},
                    {.lr = 0.05f, .momentum = 0.95f, .weight_decay = 0.1f, .grad_scale = 0.5f, .nesterov = nesterov});
          for (int64_t b = 0; b < blocks; ++b)
            ref::muon_step(&w[b * each], &gd[b * each], &m[b * each], rows / blocks, cols, {0.05f, 0.95f, 0.1f, 0.5, nesterov});
        }
        testing::expect_near(tensor(x.m, {n}), m, 1e-6, "momentum");
        testing::expect_near(tensor(x.w, {n}), w, 2e-4, "weight");  // newton_schulz's own error, times the share of the update in w
      }
}

TEST(update, muon_refuses_blocks_that_do_not_divide) {
  testing::Step step(false, 1 << 20);
  Matrix x(60, 1);
  EXPECT_THAT(
      [&] {
        muon_step(step.context, {{tensor(x.w, {10, 6}), tensor(x.g, {10, 6}), tensor(x.m, {10, 6}), 3}}, {});
      },
      testing::throws_error("[muon] a weight of 10 x 6 doesn't divide into 3 blocks of rows"));
}

TEST(update, adamw_equals_a_double_reference) {
  for (auto isa : testing::levels())
    for (int64_t n : {5, 17, 40000}) {
      testing::ForceIsa force(isa);
      testing::Step step(false, 1 << 20);
      Values w(n, 1), m(n, 0, 0), v(n, 0, 0);
      auto wd = w.as_double(), md = m.as_double(), vd = v.as_double();
      for (int64_t t = 1; t <= 20; ++t) {
        Values g(n, uint64_t(10 + t));
        for (int64_t i = 0; i < n; i += 5) g[i] *= i % 2 ? 0 : 1e-9f;  // without gradient, or with one near eps
        AdamWOptions o{.lr = 0.01f, .step = t, .grad_scale = 0.25f};
        adamw_step(step.context, tensor(w, {n}), tensor(g, {n}), tensor(m, {n}), tensor(v, {n}), o);
        ref::adamw_step(wd.data(), g.as_double().data(), md.data(), vd.data(), n, t, {o.lr, o.beta1, o.beta2, o.eps, o.weight_decay, o.grad_scale});
      }
      testing::expect_near(tensor(w, {n}), wd, 1e-5, "w");  // 20 steps of at most lr, each with a few eps, and eps of w itself each time
      testing::expect_near(tensor(m, {n}), md, 1e-6, "m");
      testing::expect_near(tensor(v, {n}), vd, 1e-6, "v");
    }
  testing::Step step(false, 1 << 20);
  Values w(3, 1);
  EXPECT_THAT([&] { adamw_step(step.context, tensor(w, {3}), tensor(w, {3}), tensor(w, {3}), tensor(w, {3}), {.step = 0}); },
              testing::throws_error("[adamw] steps count from 1, this is 0"));
}

TEST(update, the_gradient_norm_does_not_depend_on_grouping) {
  const int64_t n = 100000;
  Values g(n, 1, 1e18);  // squares beyond float32's range
  double want = norm_of(g, 0, n);
  testing::Step step(false, 1 << 20);
  for (int64_t parts : {1, 2, 7, 1000}) {
    std::vector<Param> params(parts);
    std::vector<Param*> list;
    for (int64_t i = 0; i < parts; ++i) {
      int64_t a = i * n / parts, b = (i + 1) * n / parts;
      params[i].grad = Tensor(g.data() + a, DType::f32, {b - a});
      list.push_back(&params[i]);
    }
    GradientNorm all = gradient_norm(step.context, list);
    EXPECT_NEAR(all.norm / want, 1, 1e-13);
    EXPECT_EQ(all.bad, "");
    double ranks = 0;
    for (Param& p : params) ranks += sum_of_squares(p.grad);
    EXPECT_NEAR(std::sqrt(ranks) / want, 1, 1e-13);
  }
}

TEST(update, the_first_gradient_that_is_not_finite_is_named) {
  testing::Step step(false, 1 << 20);
  for (float bad : {INFINITY, -INFINITY, NAN}) {
    Values a(50, 1), b(50, 2), c(50, 3);
    b[49] = bad, c[0] = bad;
    std::vector<Param> params(4);
    params[0].name = "a", params[0].grad = tensor(a, {50});
    params[1].name = "frozen";
    params[2].name = "b", params[2].grad = tensor(b, {50});
    params[3].name = "c", params[3].grad = tensor(c, {50});
    GradientNorm n = gradient_norm(step.context, {&params[0], &params[1], &params[2], &params[3]});
    EXPECT_EQ(n.bad, "b");
    EXPECT_FALSE(std::isfinite(n.norm));
  }
}

// One batch of tokens through q_b and kv_b with a shared key: the largest logit of each head.
TEST(update, qk_clip_makes_the_largest_logit_tau_and_leaves_the_others_alone) {
  const int64_t heads = 4, nope = 8, shared = 4, v = 6, rank = 10, tokens = 20;
  Values q(heads * (nope + shared) * rank, 1), kv(heads * (nope + v) * rank, 2), x(tokens * rank, 3), y(tokens * rank, 4), key(tokens * shared, 5);
  for (int64_t i = 0; i < (nope + shared) * rank; ++i) q[2 * (nope + shared) * rank + i] *= 0.01f;  // head 2 stays small
  auto largest = [&](int64_t h) {
    double most = -INFINITY;
    for (int64_t i = 0; i < tokens; ++i)
      for (int64_t j = 0; j <= i; ++j) {
        double logit = 0;
        for (int64_t d = 0; d < nope + shared; ++d) {
          double a = 0, b = d < nope ? 0 : key[j * shared + d - nope];
          for (int64_t r = 0; r < rank; ++r) a += double(q[(h * (nope + shared) + d) * rank + r]) * x[i * rank + r];
          for (int64_t r = 0; r < rank && d < nope; ++r) b += double(kv[(h * (nope + v) + d) * rank + r]) * y[j * rank + r];
          logit += a * b;
        }
        most = std::max(most, logit / std::sqrt(double(nope + shared)));
      }
    return most;
  };
  Param pq, pk;
  pq.name = "q_b_proj.weight", pq.value = tensor(q, {heads * (nope + shared), rank});
  pk.name = "kv_b_proj.weight", pk.value = tensor(kv, {heads * (nope + v), rank});
  std::vector<float> logits;
  for (int64_t h = 0; h < heads; ++h) logits.push_back(float(largest(h)));
  const float tau = 9;
  Values q_before = q, kv_before = kv;
  testing::Step step(false, 1 << 20);
  EXPECT_EQ(qk_clip(step.context, pq, pk, logits, tau, nope, shared, v), 3);
  for (int64_t h = 0; h < heads; ++h) {
    EXPECT_NEAR(largest(h), h == 2 ? logits[2] : tau, 1e-5 * tau) << "head " << h;
    int64_t at = (h * (nope + v) + nope) * rank;
    EXPECT_TRUE(equal(kv.slice(at, v * rank), kv_before.slice(at, v * rank))) << "v of head " << h;
  }
  int64_t at = 2 * (nope + shared) * rank;
  EXPECT_TRUE(equal(q.slice(at, (nope + shared) * rank), q_before.slice(at, (nope + shared) * rank)));
  EXPECT_THAT([&] { qk_clip(step.context, pq, pk, {1, 2}, tau, nope, shared, v); }, testing::throws_error("[qk_clip] 2 heads of 8 + 4 and 8 + 6"));
}

TEST(update, one_thread_equals_many) {
  testing::expect_same_bits_at_any_thread_count([&](testing::Step& step) {
    int64_t rows = 96, cols = 600;
    Param w = step.param("w", Values(rows * cols, 1), {rows, cols}), m = step.param("m", Values(rows * cols, 2), {rows, cols});
    Param v = step.param("v", Values(rows * cols, 0, 0), {rows, cols}), g = step.param("g", Values(rows * cols, 3), {rows, cols});
    muon_step(step.context, {{w.value, g.value, m.value, 3}, {v.value, g.value, w.grad, 1}}, {.lr = 0.1f});
    adamw_step(step.context, v.value, g.value, m.value, w.grad, {.lr = 0.1f});
    Tensor norm = step.arena().lend(DType::f64, {1});
    *norm.as<double>() = sum_of_squares(g.value);
    return std::vector<Tensor>{w.value, m.value, v.value, norm};
  });
}

TEST(update, the_null_device_counts_and_touches_nothing) {
  Arena arena(0, Device::null);
  Context c;
  c.device = Device::null, c.arena = &arena;
  double flops = 0;
  c.on_cost = [&](std::string_view, const Cost& cost) { flops += cost.flops; };
  auto tensor = [](Shape s) { return Tensor(nullptr, DType::f32, s, Device::null); };
  muon_step(c, {{tensor({64, 40}), tensor({64, 40}), tensor({64, 40}), 2}}, {});
  double square = 2.0 * 32 * 32;
  EXPECT_EQ(flops, 2 * 5 * (2 * square * 40 + square * 32));
  newton_schulz(c, tensor({3, 16, 64}));
  adamw_step(c, tensor({5}), tensor({5}), tensor({5}), tensor({5}), {});
  Param p;
  p.grad = tensor({4});
  EXPECT_EQ(gradient_norm(c, {&p}).norm, 0);
  EXPECT_GT(arena.peak(), 0u);
}

}  // namespace
}  // namespace k3

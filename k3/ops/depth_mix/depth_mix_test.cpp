#include "k3/ops/depth_mix/depth_mix.h"

#include <gtest/gtest.h>

#include "k3/ops/depth_mix/depth_mix_ref.h"
#include "k3/ops/testing.h"

namespace k3 {
namespace {

using testing::Step;
using testing::Values;

// Sums of d terms: sqrt(d) * eps, with a margin of 8 for the softmax between them and the way back.
double tolerance(int64_t d) { return 8 * 6e-8 * std::sqrt(double(d) + 4); }

struct Inputs {
  int64_t n, rows, d;
  std::vector<Values> v;
  Values w, query, dh;
  Inputs(int64_t sources, int64_t r, int64_t width) : n(sources), rows(r), d(width), w(d, 91), query(d, 92, 0.3), dh(rows * d, 93) {
    for (int64_t i = 0; i < n; ++i) v.emplace_back(rows * d, uint64_t(i + 1), double(i + 1));
  }
};
struct Call {
  std::vector<Var> v;
  Param *w, *query;
  Var h;
};
Call run(Step& step, const Inputs& in) {
  Call r;
  for (auto& x : in.v) r.v.push_back(step.input(x, {in.rows, in.d}));
  r.w = &step.keep(step.param("mlp_res_norm.weight", in.w, {in.d}));
  r.query = &step.keep(step.param("mlp_res_proj.weight", in.query, {1, in.d}));
  r.h = depth_mix(r.v, *r.w, *r.query, 1e-5f);
  return r;
}

TEST(depth_mix, backward_equals_complex_step) {
  testing::expect_complex_step(
      {{2 * 5}, {2 * 5}, {2 * 5}, {5}, {5}},
      []<class S>(const std::vector<const S*>& in, S* out) {
        ref::depth_mix<S>({in[0], in[1], in[2]}, in[3], in[4], 1e-5, out, 2, 5);
      },
      2 * 5,
      [](auto in, const double* dy, auto grad) {
        ref::depth_mix_backward<double>({in[0], in[1], in[2]}, in[3], in[4], 1e-5, dy, {grad[0], grad[1], grad[2]}, grad[3], grad[4], 2, 5);
      });
}

TEST(depth_mix, the_published_example_comes_out) {
  Step step;
  Param w = step.param("norm", Values(std::vector<float>{1, 1, 0.5f, 2}), {4}),
        p = step.param("proj", Values(std::vector<float>{0.1f, -0.2f, 0.3f, 0.4f}), {1, 4});
  Var h = depth_mix({step.input(Values(std::vector<float>{1, 2, 3, 4}), {1, 4}), step.input(Values(std::vector<float>{-1, 0.5f, 2, 0}), {1, 4})}, w,
                    p, 1e-5f);
  const double want[] = {0.513874, 1.635405, 2.756937, 3.027748};
  for (int i = 0; i < 4; ++i) EXPECT_NEAR(h.f32()[i], want[i], 1e-6);
}

TEST(depth_mix, cpu_equals_reference_at_every_level) {
  for (auto isa : testing::levels())
    for (auto [n, rows, d] : {std::array<int64_t, 3>{2, 1, 5}, {2, 3, 17}, {9, 33, 64}, {3, 65, 100}, {20, 2, 259}}) {
      testing::ForceIsa force(isa);
      Inputs in(n, rows, d);
      Step step;
      Call r = run(step, in);
      step.backward(r.h, in.dh);
      std::vector<std::vector<double>> v, dv(n, std::vector<double>(rows * d));
      std::vector<const double*> pv;
      std::vector<double*> pdv;
      for (auto& x : in.v) v.push_back(x.as_double());
      for (int64_t i = 0; i < n; ++i) pv.push_back(v[i].data()), pdv.push_back(dv[i].data());
      std::vector<double> h(rows * d), dw(d), dq(d);
      auto w = in.w.as_double(), q = in.query.as_double(), dh = in.dh.as_double();
      ref::depth_mix(pv, w.data(), q.data(), 1e-5, h.data(), rows, d);
      ref::depth_mix_backward(pv, w.data(), q.data(), 1e-5, dh.data(), pdv, dw.data(), dq.data(), rows, d);
      testing::expect_near(r.h.value(), h, tolerance(d), "h");
      for (int64_t i = 0; i < n; ++i) testing::expect_near(r.v[i].grad(), dv[i], tolerance(d), "dv");
      testing::expect_near(r.w->grad, dw, tolerance(d + rows * n), "dw");
      testing::expect_near(r.query->grad, dq, tolerance(d + rows * n), "dquery");
    }
}

TEST(depth_mix, one_source_is_returned_as_it_is) {
  Step step;
  Inputs in(1, 3, 8);
  Call r = run(step, in);
  EXPECT_EQ(r.h.f32(), r.v[0].f32());
  step.backward(r.h, in.dh);
  EXPECT_TRUE(testing::same_bits(r.v[0].grad(), step.input(in.dh, {3, 8}).value()));
  for (int64_t i = 0; i < 8; ++i) EXPECT_EQ(r.query->grad.f32()[i], 0.0f);
}

// The initial state of training: the mean of the sources; the gain gets no gradient, the query does.
TEST(depth_mix, a_zero_query_gives_the_mean) {
  Inputs in(5, 4, 40);
  for (int64_t i = 0; i < in.d; ++i) in.query[i] = 0;
  Step step;
  Call r = run(step, in);
  step.backward(r.h, in.dh);
  std::vector<double> mean(4 * 40);
  for (auto& v : in.v)
    for (int64_t i = 0; i < v.size(); ++i) mean[i] += double(v[i]) / 5;
  testing::expect_near(r.h.value(), mean, tolerance(1), "h");
  double size = 0;
  for (int64_t i = 0; i < in.d; ++i) {
    EXPECT_EQ(r.w->grad.f32()[i], 0.0f);
    size += std::abs(double(r.query->grad.f32()[i]));
  }
  EXPECT_GT(size, 1e-3);
}

// Scores see the direction only, the mix sees the raw vectors: sources twice as large give twice the result.
TEST(depth_mix, sources_are_mixed_raw_and_scored_normed) {
  Inputs in(3, 4, 64), large = in;
  for (auto& v : large.v)
    for (int64_t i = 0; i < v.size(); ++i) v[i] *= 1024;
  Step step;
  Tensor a = run(step, in).h.value(), b = run(step, large).h.value();
  for (int64_t i = 0; i < a.size(); ++i) EXPECT_NEAR(b.f32()[i], 1024 * a.f32()[i], 1e-3 * 1024);  // eps moves the scores by 1e-5
}

TEST(depth_mix, huge_and_zero_sources_stay_finite) {
  Inputs in(4, 3, 33);
  for (int64_t i = 0; i < in.v[0].size(); ++i) in.v[0][i] *= 1e16f, in.v[1][i] = 0, in.v[2][i] *= 1e-30f;
  for (int64_t i = 0; i < in.d; ++i) in.query[i] *= 1e6f;
  Step step;
  Call r = run(step, in);
  step.backward(r.h, in.dh);
  for (const Tensor& t : {r.h.value(), r.v[0].grad(), r.v[1].grad(), r.v[2].grad(), r.v[3].grad(), r.w->grad, r.query->grad})
    for (int64_t i = 0; i < t.size(); ++i) ASSERT_TRUE(std::isfinite(t.f32()[i]));
}

// A block's vector is a source of all later mixes: every one of them adds to its gradient; a source may stand in one list twice.
TEST(depth_mix, a_source_collects_the_gradients_of_all_its_mixes) {
  Inputs in(2, 3, 20);
  Step step;
  Call r = run(step, in);
  Var twice = depth_mix({r.v[0], r.v[1], r.v[0]}, *r.w, *r.query, 1e-5f);
  twice.grad();
  std::memcpy(twice.grad().data(), in.dh.data(), twice.grad().bytes());
  step.backward(r.h, in.dh);

  Step apart;
  Call first = run(apart, in);
  Var copy = apart.input(in.v[0], {3, 20});
  Var three = depth_mix({first.v[0], first.v[1], copy}, *first.w, *first.query, 1e-5f);
  std::memcpy(three.grad().data(), in.dh.data(), three.grad().bytes());
  apart.backward(first.h, in.dh);
  std::vector<double> want = testing::as_double(first.v[0].grad());
  for (size_t i = 0; i < want.size(); ++i) want[i] += copy.grad().f32()[i];
  testing::expect_near(r.v[0].grad(), want, tolerance(20), "dv");
}

TEST(depth_mix, a_row_does_not_depend_on_its_neighbours) {
  Inputs in(3, 70, 37);
  Step step(false);
  Tensor all = run(step, in).h.value();
  for (int64_t t : {0, 1, 7, 8, 31, 32, 69}) {
    Inputs one = in;
    one.rows = 1;
    for (auto& v : one.v) v = v.slice(t * 37, 37);
    EXPECT_TRUE(testing::same_bits(run(step, one).h.value(), all.row_range(t, t + 1))) << t;
  }
}

TEST(depth_mix, one_thread_equals_many) {
  Inputs in(4, 100, 130);
  testing::expect_same_bits_at_any_thread_count([&](Step& step) {
    Call r = run(step, in);
    step.backward(r.h, in.dh);
    return std::vector<Tensor>{r.h.value(), r.v[0].grad(), r.v[3].grad(), r.w->grad, r.query->grad};
  });
}

TEST(depth_mix, other_shapes_are_refused_by_name) {
  Step step;
  Inputs in(2, 3, 8);
  Call r = run(step, in);
  EXPECT_THAT([&] { depth_mix({}, *r.w, *r.query, 1e-5f); }, testing::throws_error("[depth_mix] no source to mix with mlp_res_proj.weight"));
  EXPECT_THAT(
      [&] {
        depth_mix({r.v[0], r.v[1].reshape({6, 4})}, *r.w, *r.query, 1e-5f);
      },
      testing::throws_error("[depth_mix] a source is (6 x 4) and the first (3 x 8)"));
  Param narrow = step.param("mlp_res_norm.weight", Values(7, 1), {7});
  EXPECT_THAT([&] { depth_mix(r.v, narrow, *r.query, 1e-5f); },
              testing::throws_error("[depth_mix] the sources have 8 columns but mlp_res_norm.weight has 7 values"));
}

TEST(depth_mix, the_null_device_needs_the_same_memory_to_the_byte) {
  auto peak = [](Device device) {
    Arena arena(device == Device::null ? 0 : 1 << 24, device);
    Tape tape;
    Context c;
    c.device = device, c.arena = &arena, c.tape = &tape;
    auto param = [&](const char* name) {
      Param p;
      p.name = name, p.value = arena.lend_zeroed(DType::f32, {40}), p.grad = arena.lend_zeroed(DType::f32, {40});
      return p;
    };
    Param w = param("w"), q = param("q");
    Var y = depth_mix({Var(c, arena.lend_zeroed(DType::f32, {70, 40})), Var(c, arena.lend_zeroed(DType::f32, {70, 40}))}, w, q, 1e-5f);
    y.grad();
    tape.run_backward();
    return arena.peak();
  };
  EXPECT_EQ(peak(Device::null), peak(Device::cpu));
}

// Both devices may be as far from double as the CPU's kernel; the worst of a million elements is further out than that of thousands.
TEST(depth_mix, cuda_equals_cpu) {
  for (auto [n, rows, d] : {std::array<int64_t, 3>{2, 1, 5},
                            {2, 3, 17},
                            {9, 33, 64},
                            {3, 65, 100},
                            {20, 2, 259},
                            {2, 0, 8},
                            {8, 35, 600},
                            {3, 70, 1024},
                            {1, 17, 512},
                            {2, 35, 1028},
                            {9, 40, 7168},
                            {16, 5, 2048},
                            {17, 3, 1028}}) {
    Inputs in(n, rows, d);
    testing::expect_cuda_equals_cpu(2.5 * tolerance(d + rows * n), [&](Step& step) {
      Call r = run(step, in);
      step.backward(r.h, in.dh);
      std::vector<Tensor> out = {r.h.value(), r.w->grad, r.query->grad};
      for (const Var& v : r.v) out.push_back(v.grad());
      return out;
    });
  }
}

// One source, sources that are all the same (equal logits), and norms whose squares just fit.
TEST(depth_mix, cuda_one_source_equal_logits_and_huge_norms_equal_cpu) {
  for (auto [n, size, same] : {std::tuple{int64_t(1), 1.0, false}, {5, 1.0, true}, {4, 1e15, false}, {4, 1e-20, false}, {9, 3e3, false}}) {
    SCOPED_TRACE(fmt::format("{} sources of size {}{}", n, size, same ? ", all the same" : ""));
    Inputs in(n, 33, 100);
    for (int64_t i = 0; i < n; ++i)
      for (int64_t k = 0; k < in.v[size_t(i)].size(); ++k) in.v[size_t(i)][k] = same ? in.v[0][k] : float(in.v[size_t(i)][k] * size);
    testing::expect_cuda_equals_cpu(2 * tolerance(100 + 33 * n), [&](Step& step) {
      Call r = run(step, in);
      step.backward(r.h, in.dh);
      std::vector<Tensor> out = {r.h.value()};
      // equal sources: the scores have no gradient but rounding
      if (n > 1 && !same) out.insert(out.end(), {r.w->grad, r.query->grad});
      for (const Var& v : r.v) out.push_back(v.grad());
      return out;
    });
  }
}

}  // namespace
}  // namespace k3

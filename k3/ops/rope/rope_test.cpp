#include "k3/ops/rope/rope.h"

#include <gtest/gtest.h>

#include "k3/ops/rope/rope_ref.h"
#include "k3/ops/testing.h"

namespace k3 {
namespace {

using testing::Values;

const std::vector<int64_t> kPositions = {0, 1, 2, 0, 1, 70000};

TEST(rope, backward_equals_complex_step) {
  testing::expect_complex_step(
      {{6 * 2 * 7}}, [&]<class S>(const std::vector<const S*>& in, S* out) { ref::rope<S>(in[0], kPositions.data(), out, 6, 2, 3, 4, 100, 1); },
      6 * 14,
      [&](auto, const double* dy, auto grad) {
        std::vector<double> dx(6 * 14);
        ref::rope<double>(dy, kPositions.data(), dx.data(), 6, 2, 3, 4, 100, -1);
        for (size_t i = 0; i < dx.size(); ++i) grad[0][i] += dx[i];
      });
}

// Two products and a sum in float32, cosine and sine rounded once: a few 6e-8.
TEST(rope, cpu_equals_reference) {
  for (auto [heads, plain, width] : {std::array<int64_t, 3>{1, 0, 2}, {3, 5, 8}, {2, 128, 64}}) {
    const RopeShape shape{heads, plain, width};
    const int64_t n = 6, row = heads * (plain + width);
    Values x(n * row, 1), dy(n * row, 2);
    Batch batch = Batch::of_lengths({3, 0, 2, 1});
    testing::Step step;
    Var in = step.input(x, {n, row});
    Var y = rope(in, shape, batch, {0, 9, 0, 70000});
    step.backward(y, dy);
    std::vector<double> want(size_t(n * row)), dx(size_t(n * row));
    ref::rope(x.as_double().data(), kPositions.data(), want.data(), n, heads, plain, width, shape.theta, 1);
    ref::rope(dy.as_double().data(), kPositions.data(), dx.data(), n, heads, plain, width, shape.theta, -1);
    testing::expect_near(y.value(), want, 4 * 6e-8, "y");
    testing::expect_near(in.grad(), dx, 4 * 6e-8, "dx");
  }
}

// (R_t q) . (R_s k) depends on t - s alone.
TEST(rope, scores_see_the_distance_only) {
  auto score = [](int64_t t, int64_t s) {
    testing::Step step(false);
    auto row = [&](uint64_t seed, int64_t at) { return rope(step.input(Values(64, seed), {1, 64}), {1, 0, 64}, Batch::one(1), {at}); };
    Var q = row(1, t), k = row(2, s);
    double sum = 0;
    for (int64_t i = 0; i < 64; ++i) sum += double(q.f32()[i]) * double(k.f32()[i]);
    return sum;
  };
  EXPECT_NEAR(score(7, 3), score(100004, 100000), 1e-4);
  EXPECT_GT(std::abs(score(7, 3) - score(8, 3)), 1e-3);
}

TEST(rope, any_cut_equals_whole) {
  const RopeShape shape{2, 6, 10};
  Values x(40 * 32, 3);
  testing::Step step(false);
  Var whole = rope(step.input(x, {40, 32}), shape, Batch::one(40));
  for (int64_t cut : {1, 13, 39}) {
    Var a = rope(step.input(x.slice(0, cut * 32), {cut, 32}), shape, Batch::one(cut));
    Var b = rope(step.input(x.slice(cut * 32, (40 - cut) * 32), {40 - cut, 32}), shape, Batch::one(40 - cut), {cut});
    EXPECT_TRUE(testing::same_bits(a.value(), whole.value().row_range(0, cut)));
    EXPECT_TRUE(testing::same_bits(b.value(), whole.value().row_range(cut, 40)));
  }
}

TEST(rope, one_thread_equals_many) {
  testing::expect_same_bits_at_any_thread_count([](testing::Step& step) {
    Var x = step.input(Values(200 * 24, 1), {200, 24});
    Var y = rope(x, {2, 4, 8}, Batch::of_lengths({150, 50}));
    step.backward(y, Values(200 * 24, 2));
    return std::vector<Tensor>{y.value(), x.grad()};
  });
}

// The same double-precision angles, cosine and sine rounded once; a product may be fused with the sum.
TEST(rope, cuda_equals_cpu) {
  for (auto [heads, plain, width] : {std::array<int64_t, 3>{1, 0, 2}, {3, 5, 8}, {2, 128, 64}, {1, 3, 700}}) {
    const RopeShape shape{heads, plain, width};
    const int64_t row = heads * (plain + width);
    for (const auto& [lengths, first] :
         {std::pair<std::vector<int64_t>, std::vector<int64_t>>{{3, 0, 2, 1}, {0, 9, 0, 70000}}, {{70}, {}}, {{0}, {}}}) {
      const Batch batch = Batch::of_lengths(lengths);
      const int64_t n = batch.tokens();
      Values x(n * row, 1), dy(n * row, 2);
      testing::expect_cuda_equals_cpu(4 * 6e-8, [&, &first = first](testing::Step& step) {
        Var in = step.input(x, {n, row});
        Var y = rope(in, shape, batch, first);
        step.backward(y, dy);
        return std::vector<Tensor>{y.value(), in.grad()};
      });
    }
  }
}

TEST(rope, bad_arguments_are_named) {
  testing::Step step;
  Var x = step.input(Values(20, 1), {2, 10});
  EXPECT_THAT([&] { rope(x, {1, 7, 3}, Batch::one(2)); }, testing::throws_error("must be even"));
  EXPECT_THAT([&] { rope(x, {1, 4, 4}, Batch::one(2)); }, testing::throws_error("are 2 x 8"));
  EXPECT_THAT([&] { rope(x, {1, 6, 4, 0}, Batch::one(2)); }, testing::throws_error("theta is 0"));
  EXPECT_THAT([&] { rope(x, {1, 6, 4}, Batch::one(2), {1, 2}); }, testing::throws_error("2 first positions for 1 sequences"));
}

}  // namespace
}  // namespace k3

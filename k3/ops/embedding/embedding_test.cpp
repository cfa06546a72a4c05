#include "k3/ops/embedding/embedding.h"

#include <gtest/gtest.h>

#include "k3/ops/embedding/embedding_ref.h"
#include "k3/ops/testing.h"

namespace k3 {
namespace {

using testing::Values;

Tensor ids_of(std::vector<int32_t>& ids) { return Tensor(ids.data(), DType::i32, {int64_t(ids.size())}); }

TEST(embedding, backward_equals_complex_step) {
  std::vector<int32_t> ids = {2, 0, 2, 3, 2};
  testing::expect_complex_step(
      {{4 * 3}}, [&]<class S>(const std::vector<const S*>& in, S* out) { ref::embedding<S>(ids.data(), in[0], out, 5, 3); }, 5 * 3,
      [&](auto, const double* dy, auto grad) { ref::embedding_backward<double>(ids.data(), dy, grad[0], 5, 3); });
}

// Copies are exact; a row of the gradient is a sum of at most 200 terms.
TEST(embedding, cpu_equals_reference_at_every_level) {
  for (auto isa : testing::levels())
    for (auto [rows, d] : {std::pair<int64_t, int64_t>{1, 1}, {3, 17}, {200, 130}, {0, 4}}) {
      testing::ForceIsa force(isa);
      std::vector<int32_t> ids(rows);
      for (int64_t n = 0; n < rows; ++n) ids[n] = int32_t(Rng{1, 1}.below(11, n));
      Values table(11 * d, 2), dy(rows * d, 3);
      testing::Step step;
      Param p = step.param("embed_tokens.weight", table, {11, d});
      Var y = embedding(step.context, ids_of(ids), p);
      step.backward(y, dy);
      std::vector<double> ry(rows * d), rdt(11 * d);
      ref::embedding(ids.data(), table.as_double().data(), ry.data(), rows, d);
      ref::embedding_backward(ids.data(), dy.as_double().data(), rdt.data(), rows, d);
      testing::expect_near(y.value(), ry, 0, "y");
      testing::expect_near(p.grad, rdt, 8 * 6e-8 * std::sqrt(204.0), "dtable");
    }
}

TEST(embedding, a_bf16_table_is_read_exactly) {
  for (auto isa : testing::levels()) {
    testing::ForceIsa force(isa);
    std::vector<bf16> table(7 * 19);
    for (size_t i = 0; i < table.size(); ++i) table[i] = to_bf16(float(Rng{1, 2}.normal(i)));
    std::vector<int32_t> ids = {6, 0, 3};
    testing::Step step(false);
    Param p{.name = "embed_tokens.weight", .value = Tensor(table.data(), DType::bf16, {7, 19})};
    Var y = embedding(step.context, ids_of(ids), p);
    for (int64_t n = 0; n < 3; ++n)
      for (int64_t i = 0; i < 19; ++i) EXPECT_EQ(y.f32()[n * 19 + i], to_float(table[ids[n] * 19 + i]));
  }
}

TEST(embedding, a_row_does_not_depend_on_its_neighbours) {
  std::vector<int32_t> ids = {4, 1, 1, 0}, one = {1};
  testing::Step step;
  Param p = step.param("w", Values(5 * 21, 1), {5, 21});
  Var all = embedding(step.context, ids_of(ids), p), alone = embedding(step.context, ids_of(one), p);
  EXPECT_TRUE(testing::same_bits(all.value().row_range(2, 3), alone.value()));
}

TEST(embedding, one_thread_equals_many) {
  int64_t rows = 500, d = 700;
  std::vector<int32_t> ids(rows);
  for (int64_t n = 0; n < rows; ++n) ids[n] = int32_t(Rng{1, 1}.below(5, n));
  Values table(5 * d, 1), dy(rows * d, 2);
  testing::expect_same_bits_at_any_thread_count([&](testing::Step& step) {
    Param& p = step.keep(step.param("w", table, {5, d}));
    Var y = embedding(step.context, ids_of(ids), p);
    step.backward(y, dy);
    return std::vector<Tensor>{y.value(), p.grad};
  });
}

TEST(embedding, an_id_outside_the_table_is_refused_with_its_position) {
  testing::Step step;
  Param p = step.param("model.embed_tokens.weight", Values(20, 1), {5, 4});
  std::vector<int32_t> high = {0, 4, 5}, low = {0, -1};
  EXPECT_THAT([&] { embedding(step.context, ids_of(high), p); },
              testing::throws_error("[embedding] the id at position 2 is 5, but model.embed_tokens.weight has rows 0 to 4"));
  EXPECT_THAT([&] { embedding(step.context, ids_of(low), p); }, testing::throws_error("[embedding] the id at position 1 is -1"));
}

TEST(embedding, the_null_device_reads_no_ids) {
  Arena arena(1 << 20, Device::null), weights(1 << 20, Device::null);
  Tape tape;
  Context c{.device = Device::null, .arena = &arena, .tape = &tape};
  Param p{.name = "w", .value = weights.lend(DType::f32, {5, 4}), .grad = weights.lend(DType::f32, {5, 4})};
  Var y = embedding(c, Tensor(nullptr, DType::i32, {3}, Device::null), p);
  y.grad();
  tape.run_backward();
  EXPECT_EQ(arena.peak(), 2 * 64u);
}

// More tokens than threads of a block, few rows: every id comes often. The sums have the CPU's order, so the bits are the CPU's.
TEST(embedding, cuda_equals_cpu) {
  for (auto [rows, d] : {std::pair<int64_t, int64_t>{1, 1}, {3, 17}, {700, 130}, {0, 4}}) {
    std::vector<int32_t> ids(rows);
    for (int64_t n = 0; n < rows; ++n) ids[n] = int32_t(Rng{1, 1}.below(11, n));
    Values table(11 * d, 2), dy(rows * d, 3);
    testing::expect_cuda_equals_cpu(0, [&, rows = rows, d = d](testing::Step& step) {
      Param& p = step.keep(step.param("w", table, {11, d}));
      Var y = embedding(step.context, ids_of(ids), p);
      step.backward(y, dy);
      return std::vector<Tensor>{y.value(), p.grad};
    });
  }
}

TEST(embedding, cuda_marks_the_parts_of_the_gradient_that_it_touches) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  const int64_t d = 300, vocabulary = 200, parts = (d * vocabulary + kGradPart - 1) / kGradPart;
  testing::Step step(true, size_t(1) << 28, Device::cuda);
  Param& p = step.keep(step.param("w", Values(vocabulary * d, 1), {vocabulary, d}));
  p.touched = step.arena().lend_zeroed(DType::u8, {parts});
  std::vector<int32_t> ids{3, 136, 3, 27};  // row 27 ends in part 0 and begins part 1 at 8192 = 27 * 300 + 92
  step.backward(embedding(step.context, ids_of(ids), p), Values(4 * d, 2));
  const HostCopy grad(p.grad), touched(p.touched);
  std::vector<uint8_t> want(static_cast<size_t>(parts));
  for (int32_t id : ids)
    for (int64_t i = id * d; i < (id + 1) * d; ++i) want[size_t(i / kGradPart)] = 1;
  int64_t marked = 0;
  for (int64_t i = 0; i < parts; ++i) EXPECT_EQ(touched.tensor().as<uint8_t>()[i], want[size_t(i)]) << i, marked += want[size_t(i)];
  EXPECT_LT(marked, parts);
  for (int64_t i = 0; i < d * vocabulary; ++i)
    if (!want[size_t(i / kGradPart)]) { EXPECT_EQ(grad.f32()[i], 0) << i; }
}

}  // namespace
}  // namespace k3

#include "k3/model/model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "k3/model/testing.h"
#include "k3/ops/loss/loss.h"
#include "k3/ops/norm/norm.h"

namespace k3 {
namespace {

using testing::some_ids;
using testing::tensor_of;

class model : public ::testing::TestWithParam<const char*> {
 protected:
  Config config() const {
    Config c = std::string(GetParam()) == "k3" ? testing::tiny_k3() : testing::tiny_linear();
    c.finish();
    return c;
  }
};

// Hidden vectors of ids[a..b) in one call.
Tensor call(Model& m, testing::Step& step, const std::vector<int32_t>& ids, int64_t a, int64_t b, ModelState* state, int32_t slot = 0) {
  Batch batch = Batch::one(b - a);
  if (state) batch.slots = {slot};
  return m.forward(step.context, Tensor(const_cast<int32_t*>(ids.data() + a), DType::i32, {b - a}), batch, state).value();
}

TEST_P(model, any_cut_equals_whole_equals_training_forward) {
  Model m(config());
  testing::fill(m);
  auto ids = some_ids(70, m.config().vocab_size);
  testing::Step training;
  Tensor whole = call(m, training, ids, 0, 70, nullptr);
  for (const std::vector<int64_t>& cuts : std::vector<std::vector<int64_t>>{{70}, {1, 69}, {16, 16, 38}, {3, 60, 7}, std::vector<int64_t>(70, 1)}) {
    testing::Step step(false);
    ModelState state = m.new_state(1, Device::cpu, true);
    int64_t at = 0;
    for (int64_t n : cuts) {
      ASSERT_TRUE(testing::same_bits(call(m, step, ids, at, at + n, &state), whole.row_range(at, at + n))) << at << " + " << n;
      at += n;
    }
  }
}

TEST_P(model, cuda_equals_cpu) {
  testing::expect_gradients_on_cuda_equal_cpu(config(), [](Model& m, testing::Step& step) {
    auto ids = some_ids(64, m.config().vocab_size), targets = some_ids(64, m.config().vocab_size, 4);
    const Var h = m.forward(step.context, tensor_of(ids), Batch::of_lengths({1, 30, 2, 31}));
    const double sum = cross_entropy(h, m.lm_head(), tensor_of(targets), 1.0f / 64).sum;
    step.context.tape->run_backward();
    return sum;
  });
}

// Prefill in pieces and token by token through the states, against the whole. To rounding: attention may sum a decoded token in another order.
TEST_P(model, any_cut_is_near_the_whole_on_the_gpu) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  Model m(config());
  testing::fill(m);
  m.params().move_to(Device::cuda);
  auto ids = some_ids(70, m.config().vocab_size);
  testing::Step step(false, size_t(1) << 30, Device::cuda);
  const HostCopy whole(call(m, step, ids, 0, 70, nullptr));
  for (const std::vector<int64_t>& cuts : std::vector<std::vector<int64_t>>{{70}, {1, 69}, {16, 16, 38}, std::vector<int64_t>(70, 1)}) {
    ModelState state = m.new_state(1, Device::cuda, true);
    int64_t at = 0;
    for (int64_t n : cuts) {
      const HostCopy part(call(m, step, ids, at, at + n, &state));
      testing::expect_near(part.tensor(), testing::as_double(whole.tensor().row_range(at, at + n)), 1e-4, "rows from " + std::to_string(at));
      at += n;
    }
  }
}

// One token a thousand times (logs, tables): all at once and token by token on the GPU as on the CPU, and finite.
TEST_P(model, a_thousand_copies_of_one_token_on_the_gpu_equal_the_cpu) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  const int64_t n = testing::few_shapes() ? 100 : 1000, tail = 20;
  Model m(config());
  testing::fill(m);
  const std::vector<int32_t> ids(size_t(n), 5);
  testing::Step host(false), step(false, size_t(1) << 30, Device::cuda);
  const Tensor want = call(m, host, ids, 0, n, nullptr);
  m.params().move_to(Device::cuda);
  ModelState state = m.new_state(1, Device::cuda, true);
  int64_t at = 0;
  for (int64_t size : {n - tail, tail / 2}) {
    const HostCopy part(call(m, step, ids, at, at + size, &state));
    testing::expect_near(part.tensor(), testing::as_double(want.row_range(at, at + size)), 1e-4, "rows from " + std::to_string(at));
    at += size;
  }
  for (; at < n; ++at) {
    const HostCopy row(call(m, step, ids, at, at + 1, &state));
    testing::expect_near(row.tensor(), testing::as_double(want.row_range(at, at + 1)), 1e-4, "row " + std::to_string(at));
  }
}

std::vector<float> hidden_on(Device device, const Config& config, const std::vector<int32_t>& ids, const Batch& batch) {
  Model m(config);
  testing::fill(m);
  m.params().move_to(device);
  testing::Step step(false, size_t(1) << 30, device);
  const HostCopy copy(m.forward(step.context, tensor_of(ids), batch).value());
  return {copy.f32(), copy.f32() + copy.tensor().size()};
}

// Two documents in one batch: whatever the first one is, the second one's rows keep their bits, at any border.
TEST_P(model, a_packed_document_does_not_see_the_one_before) {
  for (int64_t border : {1, 3, 63, 64, 65}) {
    const int64_t n = border + 40, d = config().hidden_size;
    auto one = some_ids(n, config().vocab_size, 5), other = some_ids(n, config().vocab_size, 6);
    std::copy(one.begin() + border, one.end(), other.begin() + border);
    const Batch batch = Batch::of_lengths({border, 40});
    for (Device device : {Device::cpu, Device::cuda}) {
      if (device == Device::cuda && !gpu::why_not().empty()) break;
      const auto a = hidden_on(device, config(), one, batch), b = hidden_on(device, config(), other, batch);
      EXPECT_TRUE(std::equal(a.begin() + border * d, a.end(), b.begin() + border * d)) << "border " << border << ", device " << int(device);
      EXPECT_FALSE(std::equal(a.begin(), a.begin() + border * d, b.begin())) << "border " << border << ", device " << int(device);
    }
  }
}

TEST_P(model, a_later_token_changes_no_earlier_row) {  // on the CPU
  const int64_t n = 130, d = config().hidden_size;
  const auto ids = some_ids(n, config().vocab_size, 5);
  for (int64_t at : {21, 64, 127}) {
    auto changed = ids;
    changed[size_t(at)] = (changed[size_t(at)] + 7) % int32_t(config().vocab_size);
    const auto a = hidden_on(Device::cpu, config(), ids, Batch::one(n)), b = hidden_on(Device::cpu, config(), changed, Batch::one(n));
    EXPECT_TRUE(std::equal(a.begin(), a.begin() + at * d, b.begin())) << "token " << at;
    EXPECT_FALSE(std::equal(a.begin() + at * d, a.end(), b.begin() + at * d)) << "token " << at;
  }
}

// The loss reads one document alone. Each has ids of its own, so what the others' embeddings get is what leaked: exactly nothing.
TEST_P(model, gradients_stay_in_the_document_of_the_loss) {
  const std::vector<int64_t> lengths = {100, 37, 64, 5};
  const Batch batch = Batch::of_lengths(lengths);
  const int64_t n = batch.tokens(), share = config().vocab_size / 4, d = config().hidden_size;
  std::vector<int32_t> ids;
  for (int64_t s = 0; s < 4; ++s)
    for (int32_t id : some_ids(lengths[size_t(s)], share, uint64_t(s))) ids.push_back(int32_t(s * share) + id);
  for (int64_t s = 0; s < 4; ++s) {
    const auto begin = ids.begin() + batch.begin(s), end = begin + batch.length(s);
    Model m(config());
    testing::fill(m);
    m.params().allocate_grads();
    std::vector<int32_t> targets(size_t(n), kIgnored);
    for (int64_t i = batch.begin(s); i < batch.begin(s) + batch.length(s); ++i) targets[size_t(i)] = int32_t(i % config().vocab_size);
    testing::Step step;
    cross_entropy(m.forward(step.context, tensor_of(ids), batch), m.lm_head(), tensor_of(targets), 1);
    step.context.tape->run_backward();
    const float* grad = m.params().find("model.embed_tokens.weight")->grad.f32();
    for (int64_t row = 0; row < 4 * share; ++row) {
      double size = 0;
      for (int64_t i = 0; i < d; ++i) size += std::abs(double(grad[row * d + i]));
      ASSERT_EQ(size > 0, std::find(begin, end, int32_t(row)) != end) << "document " << s << ", embedding " << row << ": " << size;
      ASSERT_LT(size, 1e4);
    }
  }
}

TEST_P(model, packed_equals_separate) {
  Model m(config());
  testing::fill(m);
  auto ids = some_ids(64, m.config().vocab_size);
  testing::Step step(false);
  Batch batch = Batch::of_lengths({1, 30, 2, 31});
  Tensor all = m.forward(step.context, tensor_of(ids), batch).value();
  for (int64_t s = 0; s < 4; ++s) {
    int64_t a = batch.begin(s), b = a + batch.length(s);
    EXPECT_TRUE(testing::same_bits(call(m, step, ids, a, b, nullptr), all.row_range(a, b))) << s;
  }
}

TEST_P(model, padding_rows_change_nothing) {
  Model m(config());
  testing::fill(m);
  auto ids = some_ids(30, m.config().vocab_size);
  testing::Step step(false);
  Tensor want = call(m, step, ids, 0, 20, nullptr);
  Batch batch = Batch::one(30);
  batch.padding.assign(30, 0);
  for (size_t i = 20; i < 30; ++i) batch.padding[i] = 1;
  Tensor got = m.forward(step.context, tensor_of(ids), batch).value();
  EXPECT_TRUE(testing::same_bits(got.row_range(0, 20), want));
}

std::vector<std::vector<float>> gradients(Model& m, const std::vector<int32_t>& ids, const Batch& batch) {
  testing::Step step;
  m.params().allocate_grads();
  std::vector<int32_t> targets(ids.begin() + 1, ids.end());
  targets.push_back(kIgnored);
  Var h = m.forward(step.context, tensor_of(ids), batch);
  cross_entropy(h, m.lm_head(), tensor_of(targets), 1.0f / float(ids.size()));
  step.context.tape->run_backward();
  std::vector<std::vector<float>> all;
  for (Param& p : m.params().all())
    if (!p.grad.empty()) all.emplace_back(p.grad.f32(), p.grad.f32() + p.grad.size());
  return all;
}

TEST_P(model, recomputing_activations_changes_no_bit) {
  Model m(config());
  testing::fill(m);
  auto ids = some_ids(50, m.config().vocab_size);
  auto kept = gradients(m, ids, Batch::of_lengths({20, 30}));
  m.recompute = true;
  EXPECT_EQ(gradients(m, ids, Batch::of_lengths({20, 30})), kept);
}

TEST_P(model, one_thread_equals_many) {
  Model m(config());
  testing::fill(m);
  auto ids = some_ids(50, m.config().vocab_size);
  int before = thread_count();
  set_thread_count(1);
  auto one = gradients(m, ids, Batch::of_lengths({20, 30}));
  set_thread_count(5);
  EXPECT_EQ(gradients(m, ids, Batch::of_lengths({20, 30})), one);
  set_thread_count(before);
}

TEST_P(model, gradients_of_one_document_do_not_see_another) {
  Model m(config());
  testing::fill(m);
  auto a = some_ids(50, m.config().vocab_size), b = a;
  for (int i = 0; i < 20; ++i) b[size_t(i)] = (b[size_t(i)] + 7) % int32_t(m.config().vocab_size);
  auto hidden = [&](const std::vector<int32_t>& ids) {
    testing::Step step(false);
    Tensor t = m.forward(step.context, tensor_of(ids), Batch::of_lengths({20, 30})).value();
    return std::vector<float>(t.row_range(20, 50).f32(), t.row_range(20, 50).f32() + 30 * t.cols());
  };
  EXPECT_EQ(hidden(a), hidden(b));
}

TEST_P(model, states_can_be_forked_saved_and_undone) {
  Model m(config());
  testing::fill(m);
  auto ids = some_ids(60, m.config().vocab_size);
  testing::Step step(false);
  ModelState state = m.new_state(3, Device::cpu, true);
  call(m, step, ids, 0, 35, &state, 0);
  state.copy(1, 0);
  Blob blob;
  state.save(0, blob);
  Tensor want = call(m, step, ids, 35, 40, &state, 0);
  EXPECT_TRUE(testing::same_bits(call(m, step, ids, 35, 40, &state, 1), want));
  state.load(2, blob);
  call(m, step, ids, 50, 52, &state, 2);
  ASSERT_TRUE(state.drop(2, 2));
  EXPECT_TRUE(testing::same_bits(call(m, step, ids, 35, 40, &state, 2), want));
  blob.bytes[blob.bytes.size() / 2 + 3] ^= 1;
  Blob cut;
  cut.bytes.assign(blob.bytes.begin(), blob.bytes.end() - 9);
  EXPECT_THROW(state.load(2, cut), Error);
  EXPECT_EQ(state.tokens(2), 0);
}

TEST_P(model, the_null_device_predicts_the_memory_of_a_training_step) {
  for (bool recompute : {false, true}) {
    Model m(config());
    testing::fill(m);
    m.recompute = recompute;
    auto ids = some_ids(60, m.config().vocab_size);
    auto peak = [&](Device device) {
      Arena arena(size_t(1) << 30, device);
      Tape tape;
      Context c;
      c.arena = &arena, c.tape = &tape, c.device = device;
      Var h = m.forward(c, tensor_of(ids), Batch::of_lengths({25, 35}));
      cross_entropy(h, m.lm_head(), tensor_of(ids), 1);
      tape.run_backward();
      return arena.peak();
    };
    m.params().allocate_grads();
    EXPECT_EQ(peak(Device::null), peak(Device::cpu)) << recompute;
  }
}

INSTANTIATE_TEST_SUITE_P(family, model, ::testing::Values("k3", "linear"), [](const auto& info) { return std::string(info.param); });

// The slope along a random direction of each parameter, from both losses together: only the shared paths (embedding, head, backbone through the
// features) make it other than the sum of two trained apart. A dense model: a router's choice has no slope.
TEST(mtp, backward_follows_the_forward) {
  Config c = testing::tiny_k3();
  c.num_experts = 0, c.num_nextn_predict_layers = 1, c.num_hidden_layers = 3;
  c.set("mixers=kda,mla");
  c.finish();
  Model m(c, true);
  testing::fill(m);
  m.params().allocate_grads();
  const std::vector<int32_t> ids = some_ids(40, c.vocab_size), next = some_ids(40, c.vocab_size, 4), targets = some_ids(40, c.vocab_size, 5);
  Batch batch = Batch::of_lengths({23, 17}), padded = batch;
  padded.padding.assign(40, 0), padded.padding[22] = padded.padding[39] = 1;
  std::vector<int32_t> after_next = targets;
  after_next[22] = after_next[39] = kIgnored;
  auto loss = [&](testing::Step& step) {
    Var features;
    Var h = m.forward(step.context, tensor_of(ids), batch, nullptr, &features);
    double sum = cross_entropy(h, m.lm_head(), tensor_of(targets), 1).sum;
    return sum + 0.5 * cross_entropy(m.mtp_forward(features, tensor_of(next), padded), m.lm_head(), tensor_of(after_next), 0.5f).sum;
  };
  testing::Step step;
  loss(step);
  step.context.tape->run_backward();
  for (Param& p : m.params().all()) {
    if (p.grad.empty()) continue;
    testing::Values v(p.value.size(), 11), before(p.value.size(), 1);
    std::memcpy(before.data(), p.value.data(), p.value.bytes());
    double scale = 1 / std::sqrt(double(p.value.size())), slope = 0;
    for (int64_t i = 0; i < p.value.size(); ++i) slope += p.grad.f32()[i] * v[i] * scale;
    auto moved = [&](double by) {
      for (int64_t i = 0; i < p.value.size(); ++i) p.value.f32()[i] = before[i] + float(by * v[i] * scale);
      testing::Step s(false);
      return loss(s);
    };
    const double h = 1e-2, measured = (moved(h) - moved(-h)) / (2 * h);
    std::memcpy(p.value.data(), before.data(), p.value.bytes());
    EXPECT_NEAR(measured, slope, 6e-3 * (std::abs(slope) + 1)) << p.name;  // the loss is near 270: rounding 1e-5 / h beside the curvature h^2
  }
}

TEST(mtp, reads_the_depth_before_the_final_norm) {
  Config c = testing::tiny_k3();
  c.finish();
  Model m(c);
  testing::fill(m);
  testing::Step step(false);
  Var features, h = m.forward(step.context, tensor_of(some_ids(9, c.vocab_size)), Batch::one(9), nullptr, &features);
  EXPECT_TRUE(testing::same_bits(rms_norm(features, *m.params().find("model.norm.weight"), float(c.rms_norm_eps)).value(), h.value()));
  EXPECT_FALSE(testing::same_bits(features.value(), h.value()));
}

TEST(mtp, is_left_out_unless_asked_for) {
  Config c = testing::tiny_k3();
  c.num_nextn_predict_layers = 1;
  c.finish();
  Model without(c), with(c, true);
  EXPECT_FALSE(without.has_mtp());
  EXPECT_EQ(without.config().num_nextn_predict_layers, 0);
  EXPECT_EQ(without.layers(), 9);
  EXPECT_EQ(with.layers(), 10);
  EXPECT_EQ(without.params().find("model.layers.9.eh_proj.weight"), nullptr);
  EXPECT_EQ(with.params().find("model.layers.9.eh_proj.weight")->shape, Shape({48, 96}));
  testing::Step step;
  EXPECT_THAT(
      [&] {
        without.mtp_forward(step.input(testing::Values(48, 1), {1, 48}), tensor_of({1}), Batch::one(1));
      },
      testing::throws_error("set num_nextn_predict_layers=1"));
}

TEST(model_start, depth_attention_at_zero_query_is_the_plain_residual_network) {
  Config c = testing::tiny_k3(), plain = c;
  plain.attn_res_block_size = 0;
  c.finish(), plain.finish();
  Model a(c), b(plain);
  a.params().allocate(Device::cpu), b.params().allocate(Device::cpu);
  initialize(a, 1), initialize(b, 1);
  auto ids = some_ids(20, c.vocab_size);
  testing::Step step(false);
  Tensor x = call(a, step, ids, 0, 20, nullptr), y = call(b, step, ids, 0, 20, nullptr);
  // equal but for eps inside the norms: a mean is smaller than a sum by the number of sources, at most 4 here
  testing::expect_near(x, testing::as_double(y), 1e-3, "hidden");
}

TEST(model_start, many_seeds_give_finite_gates_inside_their_range) {
  Config c = testing::tiny_k3(), l = testing::tiny_linear();
  c.finish(), l.finish();
  for (Config* config : {&c, &l}) {
    Model m(*config);
    m.params().allocate(Device::cpu);
    for (uint64_t seed = 0; seed < 20; ++seed) {
      initialize(m, seed);
      for (Param& p : m.params().all())
        for (int64_t i = 0; i < p.value.size(); ++i) {
          float v = p.value.f32()[i];
          ASSERT_TRUE(std::isfinite(v)) << p.name;
          bool in_range = p.name.ends_with("A_log") ? v >= 0 && v <= std::log(16.0f) : !p.name.ends_with("dt_bias") || (v >= -9.3f && v <= -2.2f);
          ASSERT_TRUE(in_range) << p.name << " " << v;
        }
    }
  }
}

}  // namespace
}  // namespace k3

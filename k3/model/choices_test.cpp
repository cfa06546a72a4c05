// The facts that every choice must prove in a whole model: feed-forward part, activation, residual and mixer, each as one or two --set away from
// K3 in miniature. A new one joins by a row. docs/choices.md is the table of these names.
#include <gtest/gtest.h>

#include <filesystem>

#include "k3/core/gpu.h"
#include "k3/model/checkpoint.h"
#include "k3/model/choices.h"
#include "k3/model/testing.h"
#include "k3/ops/loss/loss.h"

namespace k3 {
namespace {

using testing::some_ids;
using testing::tensor_of;
using testing::Values;

struct Choice {
  std::string name;
  std::vector<std::string> set;
};
std::vector<Choice> choices() {
  std::vector<Choice> all = {
      {"ffn_dense", {"ffn=dense"}},
      {"ffn_moe", {"ffn=moe"}},
      {"ffn_latent_moe", {"ffn=latent_moe"}},
      {"ffn_latent_moe_eff", {"routed_expert_hidden_size=0", "latent_moe_alpha=2", "latent_moe_variant=eff"}},
      {"ffn_latent_moe_acc", {"routed_expert_hidden_size=0", "latent_moe_alpha=2", "latent_moe_variant=acc"}},
      {"ffn_norm_none", {"latent_moe_norm=none"}},
      {"ffn_norm_down", {"latent_moe_norm=down"}},
      {"ffn_norm_up", {"latent_moe_norm=up"}},
      {"ffn_norm_both", {"latent_moe_norm=both"}},
      {"ffn_no_shared_expert", {"num_shared_experts=0"}},
      {"ffn_three_shared_experts", {"num_shared_experts=3"}},
      {"activation_swiglu", {"activation=swiglu"}},
      {"activation_situ", {"activation=situ"}},
      {"activation_clipped", {"activation=clipped"}},
      {"residual_plain", {"residual=plain"}},
      {"residual_attnres_full", {"residual=attnres", "attn_res_block_size=1"}},
      {"residual_attnres_blocks_of_3", {"residual=attnres", "attn_res_block_size=3"}},
      {"residual_attnres_one_block", {"residual=attnres", "attn_res_block_size=4"}},
  };
  for (const std::string& m : mixer_names()) all.push_back({"mixer_" + m, {"mixers=" + m}});
  return all;
}

void PrintTo(const Choice& c, std::ostream* out) { *out << c.name; }
class choice : public ::testing::TestWithParam<Choice> {
 protected:
  Config config() const {
    Config c = testing::tiny_k3();
    c.num_hidden_layers = 4, c.attn_res_block_size = 2, c.set("mixers=kda,mla");
    for (const std::string& s : GetParam().set) c.set(s);
    c.finish();
    return c;
  }
};

std::vector<float> hidden(Model& m, const std::vector<int32_t>& ids, const Batch& batch) {
  testing::Step step(false);
  Tensor t = m.forward(step.context, tensor_of(ids), batch).value();
  return {t.f32(), t.f32() + t.size()};
}

// The choice of experts is held, since a loss jumps where it changes: distinct experts, 5 having no factor in common with their number.
class Held {
 public:
  Held(Model& m, int64_t n) {
    const int64_t k = std::max<int64_t>(1, m.config().num_experts_per_token);
    for (int64_t i = 0; i < n * k; ++i) ids_.push_back(int32_t((i / k * 3 + i % k * 5) % std::max<int64_t>(1, m.config().num_experts)));
    routes_ = Tensor(ids_.data(), DType::i32, {n, k});
    for (int64_t l = 0; l < m.config().num_hidden_layers; ++l) m.ffn(l).force_routes(&routes_);
  }
  Held(const Held&) = delete;

 private:
  std::vector<int32_t> ids_;
  Tensor routes_;
};

TEST_P(choice, gradients_follow_the_loss) {
  Model m(config());
  testing::fill(m);
  m.params().allocate_grads();
  const int64_t n = 40;
  const Batch batch = Batch::of_lengths({25, 15});
  auto ids = some_ids(n, m.config().vocab_size), targets = some_ids(n, m.config().vocab_size, 4);
  const Held held(m, n);
  auto loss = [&](bool backward) {
    testing::Step step(backward);
    const double sum = cross_entropy(m.forward(step.context, tensor_of(ids), batch), m.lm_head(), tensor_of(targets), 1).sum;
    if (backward) step.context.tape->run_backward();
    return sum;
  };
  loss(true);
  int checked = 0;
  for (Param& p : m.params().all()) {
    if (p.grad.empty()) continue;
    // All elements move at random by about a hundredth of what they are: a change of a hundredth of |gradient| * scale would be seen. What the
    // forward rounds, sqrt(40) tokens * 5 nats * eps, is 4e-6 and 2e-4 of a slope; the third derivative adds h^2.
    const double h = 2e-3, scale = p.role.kind == Role::Kind::vector ? 0.3 : 1 / std::sqrt(double(p.shape[p.shape.rank - 1]));
    Values v(p.value.size(), 11, scale), before(p.value.size(), 1);
    std::memcpy(before.data(), p.value.data(), p.value.bytes());
    double slope = 0, size = 0;
    for (int64_t i = 0; i < p.value.size(); ++i) slope += double(p.grad.f32()[i]) * v[i], size += std::pow(double(p.grad.f32()[i]) * scale, 2);
    auto moved = [&](double sign) {
      for (int64_t i = 0; i < p.value.size(); ++i) p.value.f32()[i] = before[i] + float(sign * h * v[i]);
      return loss(false);
    };
    const double measured = (moved(1) - moved(-1)) / (2 * h);
    std::memcpy(p.value.data(), before.data(), p.value.bytes());
    EXPECT_NEAR(measured, slope, 1e-2 * std::sqrt(size) + 3e-3) << p.name;
    ++checked;
  }
  EXPECT_GT(checked, 20);
}

TEST_P(choice, decode_equals_prefill) {
  Model m(config());
  testing::fill(m);
  auto ids = some_ids(40, m.config().vocab_size);
  const std::vector<float> whole = hidden(m, ids, Batch::one(40));
  for (const std::vector<int64_t>& cuts : {std::vector<int64_t>{40}, {7, 20, 13}, std::vector<int64_t>(40, 1)}) {
    testing::Step step(false);
    ModelState state = m.new_state(1, Device::cpu, true);
    std::vector<float> got;
    int64_t at = 0;
    for (int64_t size : cuts) {
      Batch batch = Batch::one(size);
      batch.slots = {0};
      const std::vector<int32_t> part(ids.begin() + at, ids.begin() + at + size);
      Tensor t = m.forward(step.context, tensor_of(part), batch, &state).value();
      got.insert(got.end(), t.f32(), t.f32() + t.size()), at += size;
    }
    EXPECT_EQ(got, whole) << cuts.size() << " calls";
  }
}

TEST_P(choice, packed_equals_separate) {
  Model m(config());
  testing::fill(m);
  auto ids = some_ids(50, m.config().vocab_size);
  const Batch batch = Batch::of_lengths({1, 30, 2, 17});
  std::vector<float> alone;
  for (int64_t s = 0; s < 4; ++s) {
    auto part = hidden(m, {ids.begin() + batch.begin(s), ids.begin() + batch.begin(s) + batch.length(s)}, Batch::one(batch.length(s)));
    alone.insert(alone.end(), part.begin(), part.end());
  }
  EXPECT_EQ(hidden(m, ids, batch), alone);
}

TEST_P(choice, saved_and_loaded_is_the_same_model) {
  Model m(config());
  testing::fill(m);
  const std::string folder = ::testing::TempDir() + "k3_choice_" + GetParam().name + std::to_string(getpid());
  std::filesystem::remove_all(folder);
  save(m, folder);
  Config c = Config::load(folder);
  c.finish();
  Model again(c);
  Snapshot snapshot(folder);
  load(again, snapshot, {});
  auto ids = some_ids(20, c.vocab_size);
  EXPECT_EQ(hidden(again, ids, Batch::one(20)), hidden(m, ids, Batch::one(20)));
  std::filesystem::remove_all(folder);
}

TEST_P(choice, cuda_equals_cpu) {
  testing::expect_gradients_on_cuda_equal_cpu(config(), [](Model& m, testing::Step& step) {
    const int64_t n = 40;
    const Held held(m, n);
    auto ids = some_ids(n, m.config().vocab_size), targets = some_ids(n, m.config().vocab_size, 4);
    const Var h = m.forward(step.context, tensor_of(ids), Batch::of_lengths({1, 24, 0, 15}));
    const double sum = cross_entropy(h, m.lm_head(), tensor_of(targets), 1.0f / float(n)).sum;
    step.context.tape->run_backward();
    return sum;
  });
}

// The states on the GPU: one call, pieces, token by token. To rounding, since some sums are taken in another order.
TEST_P(choice, decode_on_the_gpu_equals_the_cpu) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  Model m(config());
  testing::fill(m);
  auto ids = some_ids(40, m.config().vocab_size);
  const std::vector<float> whole = hidden(m, ids, Batch::one(40));
  m.params().move_to(Device::cuda);
  const int64_t d = m.config().hidden_size;
  for (const std::vector<int64_t>& cuts : {std::vector<int64_t>{40}, {7, 20, 13}, std::vector<int64_t>(40, 1)}) {
    testing::Step step(false, size_t(1) << 30, Device::cuda);
    ModelState state = m.new_state(1, Device::cuda, true);
    int64_t at = 0;
    for (int64_t size : cuts) {
      Batch batch = Batch::one(size);
      batch.slots = {0};
      const std::vector<int32_t> part(ids.begin() + at, ids.begin() + at + size);
      const HostCopy got(m.forward(step.context, tensor_of(part), batch, &state).value());
      const std::vector<double> want(whole.begin() + at * d, whole.begin() + (at + size) * d);
      testing::expect_near(got.tensor(), want, 1e-4, "rows from " + std::to_string(at) + " of " + std::to_string(cuts.size()) + " calls");
      at += size;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(every, choice, ::testing::ValuesIn(choices()), [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace k3

// Which parameter gets which update, and that the update is the one its name says.
#include <cmath>
#include <cstring>
#include <memory>

#include "k3/model/init.h"
#include "k3/train/optimizer.h"
#include "k3/train/testing.h"

namespace k3 {
namespace {

using testing::TemporaryFolder;
using testing::throws_error;

Config finished() {
  auto json = testing::tiny_config();
  json.erase("train");
  Config c = Config::parse(json);
  c.vocab_size = 64;
  c.finish();
  return c;
}

struct Rig {
  Model model{finished()};
  TrainOptions options;
  std::unique_ptr<Optimizer> optimizer;
  Arena arena{size_t(1) << 26};
  Context context{.arena = &arena};

  explicit Rig(const std::string& kind) {
    options.optimizer = kind, options.weight_decay = 0, options.gradient_clip = 0;
    model.params().allocate(Device::cpu);
    initialize(model, 1);
    model.params().allocate_grads();
    optimizer = std::make_unique<Optimizer>(model.params(), options);
    for (Param& p : model.params().all())
      for (int64_t i = 0; i < p.grad.size(); ++i) p.grad.f32()[i] = float(Rng{9, checksum(p.name.data(), p.name.size())}.normal(uint64_t(i)));
  }
  Param& operator[](const std::string& name) { return *model.params().find(name); }
};

const std::string kQ = "model.layers.0.self_attn.q_proj.weight";

std::vector<float> rows(const Tensor& t, int64_t a, int64_t b) {
  Tensor r = t.row_range(a, b);
  return {r.f32(), r.f32() + r.size()};
}

TEST(optimizer, assigns_by_role_and_prints_the_split) {
  Rig heads("muon_per_head"), whole("muon"), adamw("adamw");
  EXPECT_EQ(heads.optimizer->muon_tensors(), whole.optimizer->muon_tensors());
  EXPECT_EQ(whole.optimizer->muon_blocks(), whole.optimizer->muon_tensors());
  // two heads: q, k, v of the KDA layer and q_b add one block each, kv_b (K and V of each head apart) three
  EXPECT_EQ(heads.optimizer->muon_blocks(), heads.optimizer->muon_tensors() + 4 + 3);
  EXPECT_EQ(adamw.optimizer->muon_tensors(), 0);
  const std::string text = heads.optimizer->split();
  auto part = [&](const std::string& title) {
    size_t at = text.find(title);
    EXPECT_NE(at, std::string::npos) << title;
    return text.substr(at, text.find('\n', at) - at);
  };
  using ::testing::HasSubstr;
  using ::testing::Not;
  EXPECT_THAT(part("muon, each head by itself, 5 tensors"), HasSubstr("q_proj"));
  EXPECT_THAT(part("muon, whole"), HasSubstr("experts.*.w1 x6"));
  EXPECT_THAT(part("adamw with decay, 3 tensors"), HasSubstr("b_proj"));
  EXPECT_THAT(part("adamw with decay"), HasSubstr("embed_tokens"));
  EXPECT_THAT(part("adamw without decay"), HasSubstr("A_log"));
  EXPECT_THAT(part("adamw without decay"), HasSubstr("res_proj"));
  EXPECT_THAT(part("adamw without decay"), HasSubstr("q_conv1d"));
  EXPECT_THAT(part("no optimizer, 1 tensors"), HasSubstr("e_score_correction_bias"));
  EXPECT_THAT(part("muon, whole"), Not(HasSubstr("conv")));
}

TEST(optimizer, a_muon_without_matrices_is_an_error) {
  ParamSet set;
  set.vector("gain", {4});
  set.allocate(Device::cpu), set.allocate_grads();
  TrainOptions o;
  EXPECT_THAT([&] { Optimizer(set, o); }, throws_error("optimizer is muon_per_head but the model has no matrix for it; use optimizer=adamw"));
  o.optimizer = "adamw";
  EXPECT_NO_THROW(Optimizer(set, o));
}

// The gradient of head 0 is a thousand times larger in one of two models. By itself, head 1 moves the same, to the bit; orthogonalised
// together it does not.
TEST(optimizer, a_head_moves_by_its_own_gradient_alone) {
  for (bool per_head : {true, false}) {
    Rig a(per_head ? "muon_per_head" : "muon"), b(per_head ? "muon_per_head" : "muon");
    for (int64_t i = 0; i < 8 * 16; ++i) b[kQ].grad.f32()[i] *= 1000;
    a.optimizer->step(a.context, 0.01), b.optimizer->step(b.context, 0.01);
    EXPECT_EQ(rows(a[kQ].value, 8, 16) == rows(b[kQ].value, 8, 16), per_head);
  }
}

TEST(optimizer, a_head_without_gradient_stays) {
  Rig r("muon_per_head");
  for (int64_t i = 0; i < 8 * 16; ++i) r[kQ].grad.f32()[i] = 0;
  const auto still = rows(r[kQ].value, 0, 8), moves = rows(r[kQ].value, 8, 16);
  r.optimizer->step(r.context, 0.01);
  EXPECT_EQ(rows(r[kQ].value, 0, 8), still);
  EXPECT_NE(rows(r[kQ].value, 8, 16), moves);
}

// The step of a matrix has root mean square 0.2 times that of the singular values that Newton-Schulz leaves (0.68 to 1.21), with all of
// them positive; plain gradient descent would have kept the gradient's own scale.
TEST(optimizer, muon_is_not_gradient_descent) {
  Rig r("muon_per_head");
  const auto before = rows(r[kQ].value, 0, 16);
  for (int64_t i = 0; i < r[kQ].grad.size(); ++i) r[kQ].grad.f32()[i] *= 1e-3f;
  r.optimizer->step(r.context, 1.0);
  double sum = 0;
  const auto after = rows(r[kQ].value, 0, 16);
  for (size_t i = 0; i < after.size(); ++i) sum += std::pow(double(after[i]) - double(before[i]), 2);
  const double rms = std::sqrt(sum / double(after.size()));
  EXPECT_GT(rms, 0.2 * 0.68);
  EXPECT_LT(rms, 0.2 * 1.21);
}

TEST(optimizer, the_norm_is_that_of_all_gradients_whatever_the_groups) {
  Rig a("muon_per_head"), b("adamw");
  double squares = 0;
  for (const Param& p : a.model.params().all())
    for (int64_t i = 0; i < p.grad.size(); ++i) squares += std::pow(double(p.grad.f32()[i]), 2);
  const double first = a.optimizer->step(a.context, 0.01).norm, second = b.optimizer->step(b.context, 0.01).norm;
  EXPECT_EQ(first, second);
  EXPECT_NEAR(first, std::sqrt(squares), 1e-9 * first);
}

// Without gradients only decay moves a weight: matrices, embedding, head and b_proj shrink by lr * decay, vectors and the router bias stay.
TEST(optimizer, decay_reaches_matrices_and_rows_but_no_vector) {
  for (const char* kind : {"muon_per_head", "muon", "adamw"}) {
    Rig r(kind);
    r.options.weight_decay = 0.5;
    r.model.params().zero_grads();
    for (Param& p : r.model.params().all()) p.value.f32()[0] = 1;
    Optimizer o(r.model.params(), r.options);
    o.step(r.context, 0.5);
    for (const Param& p : r.model.params().all()) {
      const bool decays = p.role.kind == Role::Kind::matrix || p.role.kind == Role::Kind::scalar_row;
      EXPECT_EQ(p.value.f32()[0], decays ? 0.75f : 1.0f) << kind << " " << p.name;
    }
  }
}

// Clipping scales what AdamW's moments see: m = (1 - beta1) g after one step.
TEST(optimizer, clips_to_the_global_norm) {
  for (double clip : {0.0, 1.0, 1e6}) {
    Rig r("adamw");
    r.options.gradient_clip = clip;
    Optimizer o(r.model.params(), r.options);
    const double norm = o.step(r.context, 0.01).norm, scale = clip > 0 && norm > clip ? clip / norm : 1;
    const float m = o.moments()[0].value.f32()[5], g = r.model.params().all()[0].grad.f32()[5];
    EXPECT_EQ(o.moments()[0].name, "adamw.m." + r.model.params().all()[0].name);
    EXPECT_NEAR(m, 0.1 * scale * double(g), 1e-6 * std::abs(0.1 * scale * double(g)) + 1e-12) << clip;
  }
}

TEST(optimizer, one_infinity_changes_nothing_and_is_named) {
  Rig r("muon_per_head");
  r[kQ].grad.f32()[7] = INFINITY;
  const auto before = rows(r[kQ].value, 0, 16);
  Optimizer::Result result = r.optimizer->step(r.context, 0.01);
  EXPECT_EQ(result.bad, kQ);
  EXPECT_EQ(rows(r[kQ].value, 0, 16), before);
  EXPECT_EQ(r.optimizer->updates, 0);
}

TEST(optimizer, moments_come_back_and_wrong_ones_are_refused) {
  TemporaryFolder folder;
  Rig a("muon_per_head"), b("muon_per_head"), other("adamw");
  a.optimizer->step(a.context, 0.01);
  const std::string path = folder / "o.safetensors";
  write_safetensors(path, a.optimizer->moments());
  b.optimizer->load_moments(Snapshot(path));
  auto x = a.optimizer->moments(), y = b.optimizer->moments();
  for (size_t i = 0; i < x.size(); ++i) EXPECT_EQ(std::memcmp(x[i].value.data(), y[i].value.data(), x[i].value.bytes()), 0) << x[i].name;
  EXPECT_THAT([&] { other.optimizer->load_moments(Snapshot(path)); }, throws_error("lacks adamw.m."));
  auto cut = x;
  cut.pop_back();
  write_safetensors(path, cut);
  EXPECT_THAT([&] { b.optimizer->load_moments(Snapshot(path)); }, throws_error("lacks " + x.back().name));
  auto wrong = x;
  wrong[0].value = wrong[0].value.reshape({wrong[0].value.size()});
  write_safetensors(path, wrong);
  EXPECT_THAT([&] { b.optimizer->load_moments(Snapshot(path)); }, throws_error("but must be F32"));
  auto more = x;
  more.push_back({"extra", x[0].value});
  write_safetensors(path, more);
  EXPECT_THAT([&] { b.optimizer->load_moments(Snapshot(path)); }, throws_error("tensors but this model and optimizer need"));
}

}  // namespace
}  // namespace k3

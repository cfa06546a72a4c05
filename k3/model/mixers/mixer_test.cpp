// The facts that every mixer must prove. A new one joins by its row in choices.cpp; free widths by a row in variants().
#include <gtest/gtest.h>

#include "k3/model/choices.h"
#include "k3/model/testing.h"

namespace k3 {
namespace {

using testing::Values;

class mixer : public ::testing::TestWithParam<std::string> {};

// Widths and parts that a mixer leaves free, beside each name's own shape.
struct Variant {
  std::string name, mixer;
  std::vector<std::string> set;
};
const std::vector<Variant>& variants() {
  static const std::vector<Variant> all = {
      {"mla_without_extra_branch", "mla", {"qk_rope_head_dim=0", "kv_lora_rank=36", "qk_nope_head_dim=24"}},  // 576/0 in miniature
      {"mla_mostly_latent", "mla", {"qk_rope_head_dim=16", "kv_lora_rank=20", "v_head_dim=8", "q_lora_rank=0", "mla_use_output_gate=false"}},
      {"mla_rotated", "mla", {"mla_use_nope=false", "rope_theta=100"}},
      {"kda_softplus_low_rank_gate", "kda", {"gate_lower_bound=null", "use_full_rank_gate=false"}},
      {"gqa_three_kv_heads", "gqa", {"num_key_value_heads=3"}},
  };
  return all;
}
std::vector<std::string> names() {
  std::vector<std::string> all = mixer_names();
  for (const Variant& v : variants()) all.push_back(v.name);
  return all;
}

// One mixer with random parameters.
struct Made {
  Config config;
  ParamSet params;
  std::unique_ptr<Mixer> mixer;

  explicit Made(const std::string& name) : config(testing::tiny_k3()) {
    config.kda_layers.clear(), config.full_attn_layers.clear();
    config.num_hidden_layers = 1, config.num_key_value_heads = 1, config.mixers = {name};
    for (const Variant& v : variants())
      if (name == v.name) {
        config.mixers = {v.mixer};
        for (const std::string& s : v.set) config.set(s);
      }
    config.finish();
    mixer = make_mixer(config, {params, "self_attn."}, 0);
    params.allocate(Device::cpu);
    params.allocate_grads();
    uint64_t stream = 0;
    for (Param& p : params.all()) {
      double scale = p.role.kind == Role::Kind::vector ? 0.3 : 1 / std::sqrt(double(p.shape[p.shape.rank - 1])),
             shift = p.name.ends_with("norm.weight");
      Values v(p.value.size(), 100 + stream++, scale, shift);
      std::memcpy(p.value.data(), v.data(), p.value.bytes());
    }
  }
  int64_t d() const { return config.hidden_size; }
  // Rows a..b-1 of `x` in one call on slot `slot`.
  Tensor call(testing::Step& step, const Values& x, int64_t a, int64_t b, State* s, int32_t slot = 0) {
    Batch batch = Batch::one(b - a);
    if (s) batch.slots = {slot};
    return mixer->forward(step.input(x.slice(a * d(), (b - a) * d()), {b - a, d()}), batch, s).value();
  }
};

TEST_P(mixer, backward_follows_the_forward) {
  Made m(GetParam());
  int64_t n = 37;
  Values x(n * m.d(), 1), dy(n * m.d(), 2);
  testing::Step step;
  Var vx = step.input(x, {n, m.d()});
  Batch batch = Batch::of_lengths({20, 1, 16});
  Var y = m.mixer->forward(vx, batch, nullptr);
  step.backward(y, dy);
  auto loss = [&](const Values& at) {
    testing::Step s(false);
    Tensor out = m.mixer->forward(s.input(at, {n, m.d()}), batch, nullptr).value();
    double sum = 0;
    for (int64_t i = 0; i < out.size(); ++i) sum += double(out.f32()[i]) * dy[i];
    return sum;
  };
  // A central difference along one random direction: float32 forward noise eps*|loss|/h against curvature h^2; h = 1e-2 leaves about 1e-3.
  const double h = 1e-2;
  auto expect_slope = [&](double slope, double measured, const std::string& what) {
    EXPECT_NEAR(measured, slope, 4e-3 * (std::abs(slope) + 1)) << what;
  };
  Values direction(n * m.d(), 7), plus = x, minus = x;
  double slope = 0;
  for (int64_t i = 0; i < x.size(); ++i) {
    plus[i] += float(h * direction[i] / std::sqrt(double(x.size()))), minus[i] -= float(h * direction[i] / std::sqrt(double(x.size())));
    slope += vx.grad().f32()[i] * direction[i] / std::sqrt(double(x.size()));
  }
  expect_slope(slope, (loss(plus) - loss(minus)) / (2 * h), "x");
  for (Param& p : m.params.all()) {
    if (p.grad.empty()) continue;
    Values v(p.value.size(), 11), before(p.value.size(), 1);
    std::memcpy(before.data(), p.value.data(), p.value.bytes());
    double scale = 1 / std::sqrt(double(p.value.size())), s = 0;
    for (int64_t i = 0; i < p.value.size(); ++i) s += p.grad.f32()[i] * v[i] * scale;
    auto moved = [&](double sign) {
      for (int64_t i = 0; i < p.value.size(); ++i) p.value.f32()[i] = before[i] + float(sign * h * v[i] * scale);
      return loss(x);
    };
    double measured = (moved(1) - moved(-1)) / (2 * h);
    std::memcpy(p.value.data(), before.data(), p.value.bytes());
    expect_slope(s, measured, p.name);
  }
}

TEST_P(mixer, any_cut_equals_whole_and_decode_equals_prefill) {
  for (auto isa : testing::levels()) {
    testing::ForceIsa force(isa);
    Made m(GetParam());
    int64_t n = 150;
    Values x(n * m.d(), 1);
    testing::Step training;
    Tensor whole = m.call(training, x, 0, n, nullptr);  // the training forward
    for (const std::vector<int64_t>& cuts : std::vector<std::vector<int64_t>>{{n}, {1, 1, 1, 147}, {16, 16, 118}, {37, 100, 13}, {129, 21}}) {
      auto state = m.mixer->new_state(1, Device::cpu, true);
      testing::Step step(false);
      int64_t at = 0;
      for (int64_t size : cuts) {
        EXPECT_TRUE(testing::same_bits(m.call(step, x, at, at + size, state.get()), whole.row_range(at, at + size))) << at << " + " << size;
        at += size;
      }
    }
    auto state = m.mixer->new_state(1, Device::cpu, true);
    testing::Step step(false);
    for (int64_t t = 0; t < n; ++t)
      ASSERT_TRUE(testing::same_bits(m.call(step, x, t, t + 1, state.get()), whole.row_range(t, t + 1)))
          << "token " << t << " at " << cpu::name_of(isa);
  }
}

TEST_P(mixer, packed_equals_separate) {
  Made m(GetParam());
  std::vector<int64_t> lengths = {1, 40, 3, 0, 17, 2};
  Batch batch = Batch::of_lengths(lengths);
  Values x(batch.tokens() * m.d(), 1), dy(batch.tokens() * m.d(), 2);
  testing::Step packed;
  Var vx = packed.input(x, {batch.tokens(), m.d()});
  Var y = m.mixer->forward(vx, batch, nullptr);
  packed.backward(y, dy);
  for (int64_t s = 0; s < batch.sequences(); ++s) {
    if (batch.length(s) == 0) continue;
    testing::Step alone;
    int64_t a = batch.begin(s), n = batch.length(s);
    Var ax = alone.input(x.slice(a * m.d(), n * m.d()), {n, m.d()});
    Var ay = m.mixer->forward(ax, Batch::one(n), nullptr);
    alone.backward(ay, dy.slice(a * m.d(), n * m.d()));
    EXPECT_TRUE(testing::same_bits(ay.value(), y.value().row_range(a, a + n))) << "sequence " << s;
    EXPECT_TRUE(testing::same_bits(ax.grad(), vx.grad().row_range(a, a + n))) << "gradient of sequence " << s;
  }
}

TEST_P(mixer, batch_neighbours_change_nothing) {
  Made m(GetParam());
  Values x(3 * 50 * m.d(), 1);
  auto together = m.mixer->new_state(3, Device::cpu, true), alone = m.mixer->new_state(3, Device::cpu, true);
  testing::Step step(false);
  // three sequences of 7, 50 and 1 tokens in slots 2, 0, 1, then one more token each
  std::vector<int64_t> lengths = {7, 50, 1};
  for (int round = 0; round < 2; ++round) {
    Batch batch = Batch::of_lengths(round ? std::vector<int64_t>{1, 1, 1} : lengths);
    batch.slots = {2, 0, 1};
    Tensor all = m.mixer->forward(step.input(x.slice(0, batch.tokens() * m.d()), {batch.tokens(), m.d()}), batch, together.get()).value();
    for (int64_t s = 0; s < 3; ++s) {
      Tensor one = m.call(step, x, batch.begin(s), batch.begin(s) + batch.length(s), alone.get(), batch.slots[size_t(s)]);
      EXPECT_TRUE(testing::same_bits(one, all.row_range(batch.begin(s), batch.begin(s) + batch.length(s)))) << round << " " << s;
    }
  }
}

TEST_P(mixer, a_state_can_be_forked_saved_and_undone) {
  Made m(GetParam());
  Values x(60 * m.d(), 1);
  auto state = m.mixer->new_state(3, Device::cpu, true);
  testing::Step step(false);
  m.call(step, x, 0, 37, state.get(), 0);
  state->copy(1, 0);
  Blob blob;
  state->save(0, blob);
  Tensor want = m.call(step, x, 37, 50, state.get(), 0);
  EXPECT_TRUE(testing::same_bits(m.call(step, x, 37, 50, state.get(), 1), want)) << "fork";
  state->load(2, blob);
  EXPECT_EQ(state->tokens(2), 37);
  EXPECT_TRUE(testing::same_bits(m.call(step, x, 37, 50, state.get(), 2), want)) << "save and load";
  // read two tokens that were wrong guesses, drop them, go on
  Tensor next = m.call(step, x, 50, 55, state.get(), 0);
  m.call(step, x, 3, 5, state.get(), 1);
  ASSERT_TRUE(state->drop(1, 2));
  EXPECT_EQ(state->tokens(1), 50);
  EXPECT_TRUE(testing::same_bits(m.call(step, x, 50, 55, state.get(), 1), next)) << "undo";
  state->reset(0);
  testing::Step fresh(false);
  auto clean = m.mixer->new_state(1, Device::cpu, true);
  EXPECT_TRUE(testing::same_bits(m.call(step, x, 5, 9, state.get(), 0), m.call(fresh, x, 5, 9, clean.get(), 0))) << "reset";
}

TEST_P(mixer, the_fast_decode_form_equals_the_exact_one_to_rounding) {
  Made m(GetParam());
  Values x(70 * m.d(), 1);
  testing::Step exact(false), fast(false);
  fast.context.deterministic = false;
  auto a = m.mixer->new_state(1, Device::cpu, true), b = m.mixer->new_state(1, Device::cpu, false);
  for (auto [first, last] : {std::pair<int64_t, int64_t>{0, 66}, {66, 67}, {67, 70}}) {
    Tensor want = m.call(exact, x, first, last, a.get()), got = m.call(fast, x, first, last, b.get());
    testing::expect_near(got, testing::as_double(want), 2e-5, "y");  // sums of a few hundred terms of size 1: sqrt(1000) * eps, margin 10
  }
}

TEST_P(mixer, one_thread_equals_many) {
  int64_t n = 90;
  testing::expect_same_bits_at_any_thread_count([&](testing::Step& step) {
    Made m(GetParam());
    Values x(n * m.d(), 1), dy(n * m.d(), 2);
    Var vx = step.input(x, {n, m.d()});
    Var y = m.mixer->forward(vx, Batch::of_lengths({30, 60}), nullptr);
    step.backward(y, dy);
    std::vector<Tensor> out = {y.value(), vx.grad()};
    for (Param& p : m.params.all())
      if (!p.grad.empty()) {
        Tensor copy = step.arena().lend(DType::f32, p.grad.shape());
        std::memcpy(copy.data(), p.grad.data(), p.grad.bytes());
        out.push_back(copy);
      }
    return out;
  });
}

TEST_P(mixer, the_null_device_predicts_the_memory_of_a_step) {
  Made m(GetParam());
  int64_t n = 75;
  auto peak = [&](Device device) {
    Arena arena(size_t(1) << 28, device);
    Tape tape;
    Context c;
    c.arena = &arena, c.tape = &tape, c.device = device;
    Var x(c, DType::f32, {n, m.d()});
    if (device == Device::cpu) std::memset(x.value().data(), 0, x.value().bytes());
    Var y = m.mixer->forward(x, Batch::of_lengths({33, 42}), nullptr);
    y.grad();
    tape.run_backward();
    return arena.peak();
  };
  EXPECT_EQ(peak(Device::null), peak(Device::cpu));
}

// Forward, the gradient of the input and of every parameter: packed, with one token and with an empty sequence.
TEST_P(mixer, cuda_equals_cpu) {
  const int64_t n = 37;
  const Config shape = Made(GetParam()).config;
  Values x(n * shape.hidden_size, 1), dy(n * shape.hidden_size, 2);
  testing::expect_cuda_equals_cpu(1e-4, [&](testing::Step& step) {
    Made m(GetParam());
    std::vector<Tensor> out;
    for (Param& p : m.params.all()) {  // as parameters of the step, which knows the device
      const Param& moved = step.keep(step.param(p.name, Values(std::vector<float>(p.value.f32(), p.value.f32() + p.value.size())), p.shape));
      p.value = moved.value, p.grad = p.grad.empty() ? Tensor() : moved.grad;
      if (!p.grad.empty()) out.push_back(p.grad);
    }
    Var in = step.input(x, {n, shape.hidden_size});
    Var y = m.mixer->forward(in, Batch::of_lengths({20, 0, 1, 16}), nullptr);
    step.backward(y, dy);
    out.push_back(y.value()), out.push_back(in.grad());
    return out;
  });
}

// On the GPU, to the bit: sequences of 7, 50 and 1 tokens side by side and each alone, then a token more each; and rows of padding full of NaN.
TEST_P(mixer, batch_neighbours_change_nothing_on_the_gpu) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  Made m(GetParam());
  testing::Step step(false, size_t(1) << 30, Device::cuda);
  for (Param& p : m.params.all())
    p.value = step.keep(step.param(p.name, Values(std::vector<float>(p.value.f32(), p.value.f32() + p.value.size())), p.shape, false)).value,
    p.grad = {};
  Values x(60 * m.d(), 1);
  auto together = m.mixer->new_state(3, Device::cuda, true), alone = m.mixer->new_state(3, Device::cuda, true);
  for (int round = 0; round < 2; ++round) {
    Batch batch = Batch::of_lengths(round ? std::vector<int64_t>{2, 1, 1} : std::vector<int64_t>{7, 50, 1});
    batch.slots = {2, 0, 1};
    Values in = x;
    if (round) {
      batch.padding = {0, 1, 0, 0};  // sequence 0 has one token and a row that is none
      for (int64_t i = 0; i < m.d(); ++i) in[m.d() + i] = NAN;
    }
    const Tensor all = m.mixer->forward(step.input(in.slice(0, batch.tokens() * m.d()), {batch.tokens(), m.d()}), batch, together.get()).value();
    for (int64_t s = 0; s < 3; ++s) {
      const int64_t a = batch.begin(s), n = round ? 1 : batch.length(s);
      const Tensor one = m.call(step, x, a, a + n, alone.get(), batch.slots[size_t(s)]);
      EXPECT_EQ(testing::bytes_of(one), testing::bytes_of(all.row_range(a, a + n))) << "round " << round << " sequence " << s;
      EXPECT_EQ(together->tokens(batch.slots[size_t(s)]), alone->tokens(batch.slots[size_t(s)]));
    }
  }
}

// Loss on one sequence of a pack: on the GPU the gradients of the others' inputs are exactly zero, and its own are those of the sequence alone.
TEST_P(mixer, gradients_stay_in_their_sequence_on_the_gpu) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  const std::vector<int64_t> lengths = {40, 0, 37, 1, 5};
  const Batch batch = Batch::of_lengths(lengths);
  Made m(GetParam());
  const int64_t d = m.d(), n = batch.tokens();
  testing::Step params(false, size_t(1) << 30, Device::cuda);
  for (Param& p : m.params.all()) {
    const Param& moved = params.keep(params.param(p.name, Values(std::vector<float>(p.value.f32(), p.value.f32() + p.value.size())), p.shape));
    p.value = moved.value, p.grad = p.grad.empty() ? Tensor() : moved.grad;
  }
  Values x(n * d, 1), dy(n * d, 2);
  for (int64_t s = 0; s < batch.sequences(); ++s) {
    const int64_t a = batch.begin(s), count = batch.length(s);
    if (count == 0) continue;
    Values one = dy;
    for (int64_t i = 0; i < n * d; ++i)
      if (i < a * d || i >= (a + count) * d) one[i] = 0;
    testing::Step packed(true, size_t(1) << 30, Device::cuda), alone(true, size_t(1) << 30, Device::cuda);
    Var in = packed.input(x, {n, d});
    packed.backward(m.mixer->forward(in, batch, nullptr), one);
    Var lone = alone.input(x.slice(a * d, count * d), {count, d});
    alone.backward(m.mixer->forward(lone, Batch::one(count), nullptr), dy.slice(a * d, count * d));
    const HostCopy got(in.grad()), want(lone.grad());
    for (int64_t i = 0; i < n * d; ++i)
      if (i < a * d || i >= (a + count) * d) { ASSERT_EQ(got.f32()[i], 0.0f) << "loss on sequence " << s << ", gradient of row " << i / d; }
    // one token of attention: what goes through its only weight is rounding
    testing::expect_near(got.tensor().row_range(a, a + count), testing::as_double(want.tensor()), 1e-5, "sequence " + std::to_string(s));
  }
}

INSTANTIATE_TEST_SUITE_P(every, mixer, ::testing::ValuesIn(names()), [](const auto& info) { return info.param; });

}  // namespace
}  // namespace k3

// A step that runs as one captured graph: the bits of its launches one by one, whatever changes between steps.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>

#include "k3/core/gpu.h"
#include "k3/train/eval.h"
#include "k3/train/testing.h"

namespace k3 {
namespace {

// Documents of 8 and of 16 tokens, so that rows of 16 are cut in few ways, and steps of one shape come again.
std::string even_text() {
  std::string text;
  const Rng rng{3, 3};
  for (int d = 0; d < 60; ++d) {
    const int tokens = d % 3 ? 8 : 16;
    for (int i = 0; i < tokens - 2; ++i) text += "etaoin shrdlu"[rng.below(13, uint64_t(d * 100 + i))];
    text += "\n%\n";
  }
  return text;
}

struct Trial : testing::SmallRun {
  int captured = 0;

  Trial(const std::vector<std::string>& assignments, bool bf16, bool as_graph) : SmallRun(assignments, even_text(), Device::cuda, bf16) {
    trainer->captured = as_graph;
  }
  // As a resumed run has it: the weights and moments of another one.
  void take_over(const Trial& other) {
    const auto to = trainer->optimizer().moments(), from = other.trainer->optimizer().moments();  // no row is behind now
    auto p = other.model->params().all().begin();
    for (Param& mine : model->params().all()) {
      copy_values(mine.value, p->value);
      if (!mine.narrow.empty()) copy_values(mine.narrow, p->narrow);
      ++p;
    }
    for (size_t i = 0; i < to.size(); ++i) copy_values(to[i].value, from[i].value);
    trainer->optimizer().updates = other.trainer->optimizer().updates;
    trainer->set_steps_done(other.trainer->steps_done());
  }
  std::string bits() const {
    std::string all;
    auto add = [&](const Tensor& t) {
      const HostCopy copy(t);
      all.append(static_cast<const char*>(copy.tensor().data()), t.bytes());
    };
    for (const NamedTensor& m : trainer->optimizer().moments()) add(m.value);
    for (const Param& p : model->params().all()) add(p.value);
    return all;
  }
  StepReport step(int i) {
    StepReport r = trainer->step(i % 3 == 0);
    captured += r.launches > 0;
    return r;
  }
  double held_out() { return evaluate(*model, *file, split.held_out, tokenizer, {16, 64, 0}).loss; }
};

void expect_equal(const StepReport& a, const StepReport& b, int step) {
  EXPECT_EQ(a.loss, b.loss) << step;
  EXPECT_EQ(a.mtp_loss, b.mtp_loss) << step;
  EXPECT_EQ(a.bits_per_byte, b.bits_per_byte) << step;
  EXPECT_EQ(a.gradient_norm, b.gradient_norm) << step;
  EXPECT_EQ(a.clipped_heads, b.clipped_heads) << step;
  EXPECT_EQ(a.load, b.load) << step;
  EXPECT_EQ(a.bad, b.bad) << step;
  ASSERT_EQ(a.gates.size(), b.gates.size()) << step;
  for (size_t i = 0; i < a.gates.size(); ++i) {
    EXPECT_EQ(a.gates[i].layer, b.gates[i].layer) << step;
    EXPECT_EQ(a.gates[i].open, b.gates[i].open) << step;
    if (a.gates[i].keep == a.gates[i].keep) { EXPECT_EQ(a.gates[i].keep, b.gates[i].keep) << step; }
  }
}

using Sets = std::vector<std::string>;
class captured_step : public ::testing::TestWithParam<std::pair<std::string, Sets>> {};

TEST_P(captured_step, equals_the_launched_one_to_the_bit) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  for (bool bf16 : {false, true}) {
    Sets sets = GetParam().second;
    sets.push_back("steps=24");
    Trial launched(sets, bf16, false), captured(sets, bf16, true);
    std::unique_ptr<Trial> resumed;
    for (int i = 0; i < 24; ++i) {
      if (i == 12) resumed = std::make_unique<Trial>(sets, bf16, true), resumed->take_over(captured);
      const StepReport a = launched.step(i), b = captured.step(i);
      expect_equal(a, b, i);
      if (resumed) expect_equal(a, resumed->step(i), i);
      if (i % 7 == 6) { EXPECT_EQ(launched.held_out(), captured.held_out()) << i; }
    }
    EXPECT_TRUE(launched.bits() == captured.bits());
    EXPECT_TRUE(launched.bits() == resumed->bits());
    EXPECT_EQ(launched.captured, 0);
    if (GetParam().first == "quantile_exact") {
      EXPECT_EQ(captured.captured, 0) << "its margins come to the host in the middle of a step";
    } else {
      EXPECT_GE(captured.captured, 3);
      EXPECT_GE(resumed->captured, 1);
    }
  }
}

const Sets kOneRow{"batch_tokens=16", "micro_batch_tokens=16"};
Sets one_row(Sets more) {
  more.insert(more.begin(), kOneRow.begin(), kOneRow.end());
  return more;
}
INSTANTIATE_TEST_SUITE_P(
    every, captured_step,
    ::testing::Values(std::pair<std::string, Sets>{"as_it_is", one_row({})}, std::pair{"muon_whole", one_row({"optimizer=muon"})},
                      std::pair{"adamw", one_row({"optimizer=adamw"})}, std::pair{"accumulation", Sets{"batch_tokens=32", "micro_batch_tokens=16"}},
                      std::pair{"recompute", one_row({"recompute=true"})}, std::pair{"sign", one_row({"balance=sign"})},
                      std::pair{"quantile_exact", one_row({"balance=quantile_exact"})}, std::pair{"qk_clip", one_row({"qk_clip_tau=0.001"})},
                      std::pair{"two_ahead", one_row({"num_nextn_predict_layers=1"})}, std::pair{"rotation", one_row({"mla_use_nope=false"})}),
    [](const auto& info) { return info.param.first; });

TEST(captured, what_a_graph_cannot_know_is_an_error_and_lists_are_kept) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  Buffer there(64, Device::cuda);
  float x[16] = {7};
  const Tensor t = there.view(DType::f32, {16});
  EXPECT_THROW(gpu::Graph([&] { write(t, x); }), Error);
  EXPECT_THROW(gpu::Graph([&] { HostCopy copy(t); }), Error);
  std::vector<float> list{1, 2, 3, 4};
  Arena arena(size_t(1) << 20, Device::cuda);
  gpu::Graph graph([&] {
    const float* at = listed(Device::cuda, arena, list);
    gpu::copy(t.data(), at, 16);
  });
  list.assign(4, 9);
  for (int run = 0; run < 2; ++run) {
    gpu::clear(t.data(), t.bytes());
    graph.launch();
    EXPECT_EQ(HostCopy(t).f32()[2], 3);
  }
}

TEST(captured, fed_values_are_those_of_the_run) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  Buffer there(64, Device::cuda);
  const Tensor t = there.view(DType::f32, {16});
  Arena arena(size_t(1) << 20, Device::cuda);
  Feed feed;
  Readback later;
  later.keep();
  Context c{.device = Device::cuda, .arena = &arena, .later = &later, .feed = &feed};
  float now = 1, seen = 0;
  gpu::Graph graph([&] {
    const float* at = c.fed<float>(arena, 1, [&](float* to) { *to = now; });
    gpu::copy(t.data(), at, 4);
    c.read(t, [&](const void* p) { seen = *static_cast<const float*>(p); });
  });
  for (now = 5; now < 8; ++now) {
    feed.send();
    graph.launch();
    later.deliver();
    EXPECT_EQ(seen, now);
  }
}

TEST(captured, branches_run_after_what_was_before_and_before_what_comes_after) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  const size_t n = size_t(64) << 20;
  Buffer a(n, Device::cuda), b(n, Device::cuda), c(n, Device::cuda);
  auto work = [&] {
    gpu::fill(a.data(), 1, n);
    gpu::Branches side;
    side.run(0, [&] { gpu::copy(b.data(), a.data(), n); });
    side.run(5, [&] { gpu::copy(c.data(), a.data(), n); });
    side.join();
    gpu::fill(a.data(), 2, n);
    gpu::copy(a.data(), b.data(), n / 2), gpu::copy(a.data() + n / 2, c.data(), n / 2);
  };
  auto check = [&] {
    const HostCopy copy(a.view(DType::u8, {int64_t(n)}));
    const uint8_t* p = copy.tensor().as<uint8_t>();
    EXPECT_TRUE(p[0] == 1 && p[n - 1] == 1 && std::memcmp(p, p + 1, n - 1) == 0);
  };
  for (int i = 0; i < 5; ++i) {
    gpu::clear(b.data(), n), gpu::clear(c.data(), n);
    work();
    check();
  }
  const gpu::Graph graph(work);
  for (int i = 0; i < 5; ++i) {
    gpu::clear(b.data(), n), gpu::clear(c.data(), n);
    graph.launch();
    check();
  }
}

}  // namespace
}  // namespace k3

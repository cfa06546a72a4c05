#include "k3/ops/conv/conv.h"

#include <gtest/gtest.h>

#include <array>

#include "k3/ops/conv/conv_ref.h"
#include "k3/ops/testing.h"

namespace k3 {
namespace {

using testing::Values;

// Documents shorter than the window, an empty one, one longer than a block of rows.
const std::vector<int64_t> kLengths = {1, 2, 3, 4, 5, 1, 0, 1, 2, 70};
int64_t total(const std::vector<int64_t>& lengths) { return Batch::of_lengths(lengths).tokens(); }

TEST(conv, backward_equals_complex_step) {
  for (auto [tokens, width] : {std::pair<int64_t, int64_t>{6, 4}, {2, 4}, {1, 4}, {9, 8}, {3, 1}})
    testing::expect_complex_step(
        {{tokens * 3}, {3 * width}},
        [&]<class S>(const std::vector<const S*>& in, S* out) { ref::conv_silu<S>(in[0], in[1], out, tokens, 3, width); }, tokens * 3,
        [&](auto in, const double* dy, auto grad) { ref::conv_silu_backward<double>(in[0], in[1], dy, grad[0], grad[1], tokens, 3, width); });
}

// y and dx: chains of `width` terms and a sigmoid; dw: a sum over N tokens. sqrt(terms) * eps with a margin of 8.
double tolerance(int64_t terms) { return 8 * 6e-8 * std::sqrt(double(terms) + 4); }

void expect_equals_reference(const std::vector<int64_t>& lengths, int64_t channels, int64_t width) {
  int64_t n = total(lengths);
  Values x(n * channels, 1), w(channels * width, 2), dy(n * channels, 3);
  testing::Step step;
  Param p = step.param("q_conv1d.weight", w, {channels, 1, width});
  Var vx = step.input(x, {n, channels}), y = conv_silu(vx, p, Batch::of_lengths(lengths));
  step.backward(y, dy);
  auto xd = x.as_double(), wd = w.as_double(), dyd = dy.as_double();
  std::vector<double> ry(n * channels), rdx(n * channels), rdw(channels * width);
  int64_t at = 0;
  for (int64_t tokens : lengths) {
    ref::conv_silu(&xd[at], wd.data(), &ry[at], tokens, channels, width);
    ref::conv_silu_backward(&xd[at], wd.data(), &dyd[at], &rdx[at], rdw.data(), tokens, channels, width);
    at += tokens * channels;
  }
  testing::expect_near(y.value(), ry, tolerance(width), "y");
  testing::expect_near(vx.grad(), rdx, tolerance(width), "dx");
  testing::expect_near(p.grad, rdw, tolerance(n), "dw");
}

TEST(conv, cpu_equals_reference_at_every_level) {
  for (auto isa : testing::levels()) {
    testing::ForceIsa force(isa);
    for (int64_t channels : {1, 5, 16, 70, 600})
      for (int64_t width : {1, 2, 4, 8}) expect_equals_reference({kLengths.begin(), kLengths.end()}, channels, width);
    expect_equals_reference({1}, 33, 4);
  }
}

// The same 480 tokens as 1, 2 and 16 rows of a batch: dw is right in each, so it is not counted again for a row.
TEST(conv, weight_gradient_is_right_however_the_tokens_are_laid_out) {
  for (int64_t rows : {1, 2, 16}) expect_equals_reference(std::vector<int64_t>(rows, 480 / rows), 24, 4);
}

TEST(conv, gradients_add_up_over_calls) {
  int64_t n = 5, d = 3;
  Values x(n * d, 1), w(d * 4, 2), dy(n * d, 3);
  testing::Step once, twice;
  Param p1 = once.param("w", w, {d, 4}), p2 = twice.param("w", w, {d, 4});
  once.backward(conv_silu(once.input(x, {n, d}), p1, Batch::one(n)), dy);
  for (int i = 0; i < 2; ++i) twice.backward(conv_silu(twice.input(x, {n, d}), p2, Batch::one(n)), dy);
  for (int64_t i = 0; i < d * 4; ++i) EXPECT_EQ(p2.grad.f32()[i], 2 * p1.grad.f32()[i]);
}

TEST(conv, packed_documents_do_not_see_each_other) {
  int64_t d = 20;
  for (int64_t border : {1, 3, 63, 64, 65}) {
    int64_t n = border + 10;
    Values x(n * d, 1), other = x, w(d * 4, 2), dy(n * d, 3);
    for (int64_t i = 0; i < border * d; ++i) other[i] = float(1e3 + i), dy[i] = 0;
    Tensor y[2], dx[2];
    testing::Step step;
    Param p = step.param("w", w, {d, 4});
    for (int i = 0; i < 2; ++i) {
      Var v = step.input(i ? other : x, {n, d}), out = conv_silu(v, p, Batch::of_lengths({border, 10}));
      step.backward(out, dy);
      y[i] = out.value().row_range(border, n), dx[i] = v.grad();
    }
    EXPECT_TRUE(testing::same_bits(y[0], y[1]));
    EXPECT_TRUE(testing::same_bits(dx[0].row_range(border, n), dx[1].row_range(border, n)));
    for (int64_t i = 0; i < border * d; ++i) EXPECT_EQ(dx[1].f32()[i], 0);
  }
}

// Feeds rows of x through `state` in pieces, one sequence in one slot.
std::vector<float> feed(testing::Step& step, Param& p, const Values& x, int64_t d, int64_t first, int64_t last, ConvState& state, int32_t slot,
                        const std::vector<int64_t>& pieces) {
  std::vector<float> out;
  for (size_t i = 0; first < last; ++i) {
    int64_t n = std::min(pieces[i % pieces.size()], last - first);
    Batch b = Batch::one(n);
    b.slots = {slot};
    Var y = conv_silu(step.input(x.slice(first * d, n * d), {n, d}), p, b, &state);
    out.insert(out.end(), y.f32(), y.f32() + y.size());
    first += n;
  }
  return out;
}

TEST(conv, any_cut_equals_whole) {
  int64_t n = 150, d = 37;
  for (auto isa : testing::levels())
    for (int64_t width : {1, 4, 8}) {
      testing::ForceIsa force(isa);
      Values x(n * d, 1), w(d * width, 2);
      testing::Step step(false);
      Param p = step.param("w", w, {d, width});
      Var whole = conv_silu(step.input(x, {n, d}), p, Batch::one(n));
      std::vector<float> want(whole.f32(), whole.f32() + whole.size());
      for (const std::vector<int64_t>& pieces : {std::vector<int64_t>{1}, {2}, {3}, {1, 0, 7, 2}, {64, 1}, {19, 20}, {150}}) {
        ConvState state(3, d, width);
        EXPECT_EQ(feed(step, p, x, d, 0, n, state, 1, pieces), want) << "pieces of " << pieces[0];
        EXPECT_EQ(state.tokens(1), n);
        EXPECT_EQ(state.tokens(0), 0);
      }
    }
}

TEST(conv, a_sequence_does_not_depend_on_its_neighbours) {
  int64_t d = 21;
  Values x(100 * d, 1), y0(100 * d, 8), w(d * 4, 2);
  testing::Step step(false);
  Param p = step.param("w", w, {d, 4});
  ConvState alone(1, d, 4), together(4, d, 4);
  std::vector<float> want = feed(step, p, x, d, 0, 30, alone, 0, {30}), got;
  for (int64_t at = 0; at < 30; at += 10) {  // 10 tokens of ours between neighbours of 7, 0 and 3
    Batch b = Batch::of_lengths({7, 10, 0, 3});
    b.slots = {3, 2, 0, 1};
    Values rows = y0.slice(at * d, 20 * d);
    for (int64_t i = 0; i < 10 * d; ++i) rows[7 * d + i] = x[at * d + i];
    Var y = conv_silu(step.input(rows, {20, d}), p, b, &together);
    got.insert(got.end(), y.f32() + 7 * d, y.f32() + 17 * d);
  }
  EXPECT_EQ(got, want);
}

TEST(conv, padding_on_either_side_changes_nothing) {
  int64_t d = 18;
  for (int64_t tokens : {1, 3, 17, 64})
    for (int64_t left : {0, 2, 5}) {
      int64_t n = 70, right = n - tokens - left;
      if (right < 0) continue;
      Values x(tokens * d, 1), w(d * 4, 2), dy(tokens * d, 3), padded(n * d, 4), padded_dy(n * d, 5);
      Batch b = Batch::one(n);
      b.padding.assign(n, 1);
      for (int64_t i = 0; i < n * d; ++i) padded[i] = padded_dy[i] = NAN;
      for (int64_t t = 0; t < tokens; ++t) b.padding[left + t] = 0;
      for (int64_t i = 0; i < tokens * d; ++i) padded[left * d + i] = x[i], padded_dy[left * d + i] = dy[i];
      testing::Step one, two;
      Param p1 = one.param("w", w, {d, 4}), p2 = two.param("w", w, {d, 4});
      Var x1 = one.input(x, {tokens, d}), x2 = two.input(padded, {n, d});
      Var y1 = conv_silu(x1, p1, Batch::one(tokens)), y2 = conv_silu(x2, p2, b);
      one.backward(y1, dy), two.backward(y2, padded_dy);
      EXPECT_TRUE(testing::same_bits(y1.value(), y2.value().row_range(left, left + tokens)));
      EXPECT_TRUE(testing::same_bits(x1.grad(), x2.grad().row_range(left, left + tokens)));
      testing::expect_near(p2.grad, testing::as_double(p1.grad), tolerance(tokens), "dw");
      for (int64_t i = 0; i < n * d; ++i) EXPECT_TRUE(!b.padding[i / d] || (y2.f32()[i] == 0 && x2.grad().f32()[i] == 0));
      // and the state that is handed on
      testing::Step generate(false);
      ConvState s1(1, d, 4), s2(1, d, 4);
      Batch b1 = Batch::one(tokens);
      b1.slots = b.slots = {0};
      conv_silu(generate.input(x, {tokens, d}), p1, b1, &s1);
      conv_silu(generate.input(padded, {n, d}), p1, b, &s2);
      Blob save1, save2;
      s1.save(0, save1), s2.save(0, save2);
      EXPECT_EQ(save1.bytes, save2.bytes);
    }
}

// Dropping the last tokens leaves what there would be had they never come, up to sixteen back, from any position.
TEST(conv, dropped_tokens_leave_no_trace) {
  int64_t d = 5;
  for (int64_t width : {1, 4, 8}) {
    Values x(200 * d, 1), other(200 * d, 9), w(d * width, 2);
    testing::Step step(false);
    Param p = step.param("w", w, {d, width});
    for (int64_t n : {1, 3, 16, 17, 19, 40, 64})
      for (int64_t drop : {0, 1, 2, 15, 16}) {
        if (drop > n) continue;
        ConvState straight(1, d, width), undone(1, d, width);
        feed(step, p, x, d, 0, n - drop, straight, 0, {7});
        feed(step, p, x, d, 0, n - drop, undone, 0, {5});
        feed(step, p, other, d, n - drop, n, undone, 0, {3});
        undone.drop(0, drop);
        EXPECT_EQ(undone.tokens(0), n - drop);
        EXPECT_EQ(feed(step, p, x, d, n - drop, n + 30, undone, 0, {2}), feed(step, p, x, d, n - drop, n + 30, straight, 0, {2}))
            << n << " tokens, " << drop << " dropped";
      }
  }
}

TEST(conv, what_is_no_longer_known_cannot_be_dropped) {
  int64_t d = 2;
  testing::Step step(false);
  Param p = step.param("w", Values(d * 4, 2), {d, 4});
  Values x(60 * d, 1);
  ConvState state(2, d, 4);
  feed(step, p, x, d, 0, 40, state, 0, {40});
  EXPECT_THAT([&] { state.drop(0, 17); },
              testing::throws_error("17 tokens can't be dropped from slot 0: it goes back to token 21 only, and token 20"));
  state.drop(0, 16);
  EXPECT_THAT([&] { state.drop(0, 1); }, testing::throws_error("1 tokens can't be dropped from slot 0: it goes back to token 21 only"));
  feed(step, p, x, d, 24, 26, state, 0, {1});
  state.drop(0, 2);
  EXPECT_THAT([&] { state.drop(0, 1); }, testing::throws_error("can't be dropped"));
  EXPECT_THAT([&] { state.drop(1, 1); }, testing::throws_error("1 tokens can't be dropped from slot 1, which has 0"));
}

TEST(conv, a_saved_or_copied_state_goes_on_as_the_first) {
  int64_t d = 6;
  testing::Step step(false);
  Param p = step.param("w", Values(d * 4, 2), {d, 4});
  Values x(100 * d, 1);
  for (int64_t n : {0, 2, 19, 45}) {
    ConvState state(3, d, 4), fresh(2, d, 4);
    feed(step, p, x, d, 50, 90, state, 1, {40});  // a former owner of the slot
    state.reset(1);
    feed(step, p, x, d, 0, n, state, 1, {4});
    state.copy(0, 1);
    Blob blob;
    state.save(1, blob);
    fresh.load(1, blob);
    EXPECT_TRUE(blob.at_end());
    auto want = feed(step, p, x, d, n, n + 9, state, 1, {1});
    EXPECT_EQ(feed(step, p, x, d, n, n + 9, state, 0, {2}), want);
    EXPECT_EQ(feed(step, p, x, d, n, n + 9, fresh, 1, {3}), want);
    EXPECT_LE(blob.bytes.size(), std::min<size_t>(size_t(n) * d * 4, fresh.bytes_per_slot()) + 200);  // and nothing of the former owner
  }
  ConvState narrow(1, d, 3), other(1, d, 4);
  Blob blob, damaged;
  other.save(0, blob);
  EXPECT_THAT([&] { narrow.load(0, blob); }, testing::throws_error("[conv state] the bytes are of 6 channels and width 4, this model has 6 and 3"));
  damaged.put_value("conv.channels", d), damaged.put_value("conv.width", int64_t(4));
  damaged.put_value("conv.first", int64_t(5)), damaged.put_value("conv.count", int64_t(6));
  EXPECT_THAT([&] { other.load(0, damaged); }, testing::throws_error("[conv state] tokens 5 to 6 make no state of width 4"));
  EXPECT_EQ(other.bytes_per_slot(), 19u * d * 4);
}

TEST(conv, one_thread_equals_many) {
  int64_t n = total(kLengths) * 3, d = 1100;
  Values x(n * d, 1), w(d * 4, 2), dy(n * d, 3);
  testing::expect_same_bits_at_any_thread_count([&](testing::Step& step) {
    Param& p = step.keep(step.param("w", w, {d, 4}));
    Var v = step.input(x, {n, d}), y = conv_silu(v, p, Batch::of_lengths({n / 3, n / 3, n / 3}));
    step.backward(y, dy);
    return std::vector<Tensor>{y.value(), v.grad(), p.grad};
  });
}

TEST(conv, the_null_device_lends_the_same_and_touches_nothing) {
  auto run = [](Device device) {
    Arena arena(1 << 20, device), weights(1 << 10, device);
    Tape tape;
    Context c{.device = device, .arena = &arena, .tape = &tape};
    Param p{.name = "w", .value = weights.lend_zeroed(DType::f32, {8, 4}), .grad = weights.lend_zeroed(DType::f32, {8, 4})};
    Var x(c, DType::f32, {10, 8}), y = conv_silu(x, p, Batch::one(10));
    y.grad();
    tape.run_backward();
    c.tape = nullptr;
    ConvState state(1, 8, 4, device);
    Batch b = Batch::one(10);
    b.slots = {0};
    conv_silu(x, p, b, &state);
    return std::pair(arena.peak(), state.tokens(0));
  };
  EXPECT_EQ(run(Device::null), run(Device::cpu));
}

TEST(conv, what_does_not_fit_is_refused) {
  testing::Step step(false), training;
  Param p = step.param("k_conv1d.weight", Values(12, 1), {3, 4}), wide = step.param("w", Values(27, 1), {3, 9});
  Var x = step.input(Values(6, 1), {2, 3}), y = step.input(Values(8, 1), {2, 4}), t = training.input(Values(6, 1), {2, 3});
  ConvState state(2, 3, 4), other(2, 3, 3);
  Batch b = Batch::of_lengths({1, 1}), same = b, none = b;
  b.slots = {0, 2}, same.slots = {1, 1};
  EXPECT_THAT([&] { conv_silu(y, p, b); }, testing::throws_error("[conv] x has 4 columns but k_conv1d.weight is F32 3 x 4"));
  EXPECT_THAT([&] { conv_silu(x, wide, b); }, testing::throws_error("[conv] w has width 9, must be 1 to 8"));
  EXPECT_THAT([&] { conv_silu(x, p, Batch::one(3)); }, testing::throws_error("[conv] the batch has 3 tokens but x has 2 rows"));
  EXPECT_THAT([&] { conv_silu(x, p, b, &state); }, testing::throws_error("[conv] slot 2 of a state with 2"));
  EXPECT_THAT([&] { conv_silu(x, p, same, &state); }, testing::throws_error("[conv] two sequences of the batch have slot 1"));
  EXPECT_THAT([&] { conv_silu(x, p, none, &state); }, testing::throws_error("[conv] 2 sequences but 0 slots"));
  EXPECT_THAT([&] { conv_silu(x, p, same, &other); }, testing::throws_error("[conv] the state is of 3 channels and width 3, x and w of 3 and 4"));
  EXPECT_THAT([&] { conv_silu(t, p, same, &state); }, testing::throws_error("[conv] a state has no gradient"));
}

TEST(conv, cuda_equals_cpu) {
  for (auto [width, d] : {std::pair<int64_t, int64_t>{1, 37}, {4, 37}, {8, 37}, {4, 36}, {4, 520}})
    for (const std::vector<int64_t>& lengths : {std::vector<int64_t>{1},
                                                {150},
                                                {3, 0, 70, 1, 2},
                                                {1, 2, 3, 4, 5, 1, 1, 2},
                                                {128},
                                                {64, 64},
                                                std::vector<int64_t>(16, 8)}) {  // the last three: the same tokens in 1, 2 and 16 rows
      for (bool padded : {false, true}) {
        if (testing::few_shapes() && (width == 8 || d == 36 || lengths.size() == 2)) continue;
        Batch batch = Batch::of_lengths(lengths);
        const int64_t n = batch.tokens();
        if (padded)
          for (int64_t i = 0; i < n; ++i) batch.padding.push_back(i % 5 == 2);
        Values x(n * d, 1), w(d * width, 2), dy(n * d, 3);
        testing::expect_cuda_equals_cpu(tolerance(n + width), [&, width = width, d = d](testing::Step& step) {
          Param& p = step.keep(step.param("w", w, {d, width}));
          Var v = step.input(x, {n, d}), y = conv_silu(v, p, batch);
          step.backward(y, dy);
          return std::vector<Tensor>{y.value(), v.grad(), p.grad};
        });
      }
    }
}

// In pieces through a state, with a fork and a saved copy on the way: the bits of the whole.
TEST(conv, any_cut_equals_whole_on_the_gpu) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  for (const int64_t d : {37, 36, 520}) {
    const int64_t n = 90, width = 4;
    testing::Step step(false, size_t(1) << 30, Device::cuda);
    Param p = step.param("w", Values(d * width, 2), {d, width}, false);
    Var x = step.input(Values(n * d, 1), {n, d});
    const Tensor whole = conv_silu(x, p, Batch::one(n)).value();
    ConvState state(3, d, width, Device::cuda);
    int32_t slot = 1;
    int64_t at = 0, turn = 0;
    for (int64_t piece : {1, 2, 0, 40, 1, 1, 20, 25}) {
      Batch b = Batch::one(piece);
      b.slots = {slot};
      EXPECT_EQ(testing::bytes_of(conv_silu(Var(step.context, x.value().row_range(at, at + piece)), p, b, &state).value()),
                testing::bytes_of(whole.row_range(at, at + piece)))
          << "at " << at;
      at += piece;
      if (++turn == 4) state.copy(2, slot), slot = 2;
      if (turn == 6) {
        Blob blob;
        state.save(slot, blob);
        state.load(0, blob), slot = 0;
      }
    }
    EXPECT_EQ(at, n);
  }
}

// Packed sequences, widths with kernels of their own and without: three together have the bits of one after the other, and one of them another shape
// changes nothing.
TEST(conv, cuda_several_in_one_launch_equal_one_by_one) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  for (auto [d, width, other] : {std::array<int64_t, 3>{40, 4, 40}, {7, 3, 7}, {40, 4, 24}}) {
    const int64_t n = 150;
    std::vector<std::vector<char>> alone;
    for (bool together : {false, true}) {
      testing::Step step(true, size_t(1) << 28, Device::cuda);
      std::vector<Var> xs, ys;
      std::vector<Param*> ws;
      for (int64_t i = 0; i < 3; ++i) {
        const int64_t channels = i == 2 ? other : d;
        xs.push_back(step.input(Values(n * channels, uint64_t(10 + i)), {n, channels}));
        ws.push_back(&step.keep(step.param("w", Values(channels * width, uint64_t(20 + i)), {channels, 1, width})));
      }
      const Batch batch = Batch::of_lengths({1, 90, 59});
      if (together)
        ys = conv_silu(xs, ws, batch, {nullptr, nullptr, nullptr});
      else
        for (size_t i = 0; i < 3; ++i) ys.push_back(conv_silu(xs[i], *ws[i], batch));
      for (size_t i = 0; i < 3; ++i) write(ys[i].grad(), Values(ys[i].size(), uint64_t(30 + i)).data());
      step.context.tape->run_backward();
      for (size_t i = 0; i < 3; ++i)
        for (const Tensor& t : {ys[i].value(), xs[i].grad(), ws[i]->grad}) {
          if (!together) {
            alone.push_back(testing::bytes_of(t));
            continue;
          }
          EXPECT_EQ(testing::bytes_of(t), alone.front()) << d << " " << i;
          alone.erase(alone.begin());
        }
    }
  }
}

}  // namespace
}  // namespace k3

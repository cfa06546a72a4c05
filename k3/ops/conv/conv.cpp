#include "k3/ops/conv/conv.h"

#include <algorithm>
#include <cstring>

#include "k3/core/error.h"
#include "k3/core/listed.h"
#include "k3/core/threads.h"
#include "k3/ops/conv/conv_float_cuda.h"
#include "k3/ops/conv/conv_kernels.h"
#include "k3/ops/conv/conv_step_cuda.h"
#include "k3/tape/tape.h"

namespace k3 {

ConvState::ConvState(int64_t slots, int64_t channels, int64_t width, Device device)
    : channels_(channels), width_(width), at_(size_t(slots)), buffer_(size_t(slots * (kUndo + width - 1) * channels) * sizeof(float), device) {}

void ConvState::check(int64_t slot) const { K3_CHECK(slot >= 0 && slot < slots(), "[conv state] slot {} of {}", slot, slots()); }

int64_t ConvState::tokens(int64_t slot) const {
  check(slot);
  return at_[slot].count;
}

void ConvState::reset(int64_t slot) {
  check(slot);
  at_[slot] = {};
}

void ConvState::copy(int64_t to, int64_t from) {
  check(to), check(from);
  if (to == from) return;
  at_[to] = at_[from];
  copy_values(rows().row_range(to * history(), (to + 1) * history()), rows().row_range(from * history(), (from + 1) * history()));
}

void ConvState::advance(int64_t slot, int64_t n) {
  Span& s = at_[slot];
  s.count += n;
  s.first = std::max(s.first, s.count - history());
}

void ConvState::drop(int64_t slot, int64_t n) {
  check(slot);
  Span& s = at_[slot];
  int64_t left = s.count - n;
  K3_CHECK(n >= 0 && left >= 0, "[conv state] {} tokens can't be dropped from slot {}, which has {}", n, slot, s.count);
  K3_CHECK(s.first <= std::max<int64_t>(0, left - (width_ - 1)),
           "[conv state] {} tokens can't be dropped from slot {}: it goes back to token {} only, and token {} is needed to go on", n, slot, s.first,
           std::max<int64_t>(0, left - (width_ - 1)));
  s.count = left;
}

// Only the rows that belong to the sequence: a slot's former owner never travels with it.
void ConvState::save(int64_t slot, Blob& blob) const {
  check(slot);
  const Span& s = at_[slot];
  blob.put_value("conv.channels", channels_), blob.put_value("conv.width", width_);
  blob.put_value("conv.first", s.first), blob.put_value("conv.count", s.count);
  std::vector<float> rows(size_t((s.count - s.first) * channels_));
  const HostCopy all(this->rows().row_range(slot * history(), (slot + 1) * history()));
  for (int64_t p = s.first; p < s.count; ++p)
    std::memcpy(rows.data() + (p - s.first) * channels_, all.f32() + p % history() * channels_, size_t(channels_) * sizeof(float));
  blob.put("conv.rows", rows.data(), rows.size() * sizeof(float));
}

void ConvState::load(int64_t slot, Blob& blob) {
  check(slot);
  auto channels = blob.get_value<int64_t>("conv.channels"), width = blob.get_value<int64_t>("conv.width");
  K3_CHECK(channels == channels_ && width == width_, "[conv state] the bytes are of {} channels and width {}, this model has {} and {}", channels,
           width, channels_, width_);
  Span s;
  s.first = blob.get_value<int64_t>("conv.first"), s.count = blob.get_value<int64_t>("conv.count");
  K3_CHECK(0 <= s.first && s.first <= s.count && s.count - s.first <= history() && (s.first == 0 || s.count - s.first >= width_ - 1),
           "[conv state] tokens {} to {} make no state of width {}: the bytes are damaged", s.first, s.count, width_);
  std::vector<float> rows(size_t((s.count - s.first) * channels_));
  blob.get("conv.rows", rows.data(), rows.size() * sizeof(float));
  for (int64_t p = s.first; p < s.count; ++p) write(this->rows().row_range(row(slot, p), row(slot, p) + 1), rows.data() + (p - s.first) * channels_);
  at_[slot] = s;
}

namespace {

bool is_padding(const Batch& b, int64_t row) { return !b.padding.empty() && b.padding[row]; }

// Fills taps (rows, width). `recent` holds the rows of the last width-1 real tokens, as taps, newest last.
void find_taps(const Batch& batch, const ConvState* state, int64_t width, int32_t* taps) {
  for (int64_t s = 0; s < batch.sequences(); ++s) {
    int32_t recent[cpu::kConvMaxWidth];
    int64_t count = state ? state->tokens(batch.slots[s]) : 0;
    for (int64_t j = 0; j < width; ++j) {
      int64_t p = count - (width - 1) + j;
      recent[j] = p >= 0 && p < count ? int32_t(cpu::kConvState - state->row(batch.slots[s], p)) : cpu::kConvZero;
    }
    for (int64_t n = batch.begin(s); n < batch.begin(s + 1); ++n) {
      int32_t* row = taps + n * width;
      if (is_padding(batch, n)) {
        std::fill(row, row + width, cpu::kConvZero);
        row[width - 1] = cpu::kConvPadding;
        continue;
      }
      recent[width - 1] = int32_t(n);
      std::copy(recent, recent + width, row);
      std::copy(recent + 1, recent + width, recent);
    }
  }
}

// The new tokens' inputs go to their rows of the state; only after every output has been made, for they overwrite older ones.
void remember(const Batch& batch, const Var& x, ConvState& state) {
  std::vector<int32_t> moves;  // row of the state, row of x
  for (int64_t s = 0; s < batch.sequences(); ++s) {
    int64_t slot = batch.slots[s], n = 0, real = 0;
    for (int64_t i = batch.begin(s); i < batch.begin(s + 1); ++i) real += !is_padding(batch, i);
    int64_t count = state.tokens(slot);
    for (int64_t i = batch.begin(s); i < batch.begin(s + 1); ++i) {
      if (is_padding(batch, i)) continue;
      if (real - n <= state.history()) moves.push_back(int32_t(state.row(slot, count + n))), moves.push_back(int32_t(i));
      ++n;
    }
    state.advance(slot, real);
  }
  const int64_t d = x.cols(), n = int64_t(moves.size() / 2);
  if (x.value().device() == Device::cpu)
    parallel_for(n, [&](int64_t i) {
      std::memcpy(state.rows().f32() + moves[size_t(2 * i)] * d, x.f32() + moves[size_t(2 * i + 1)] * d, size_t(d) * sizeof(float));
    });
  if constexpr (gpu::kBuilt) {
    if (x.value().device() != Device::cuda) return;
    Scratch scratch(*x.context().arena);
    Tensor there = scratch.lend(DType::i32, {2 * n});
    write(there, moves.data());
    gpu::check(cuda::conv_remember(x.f32(), state.rows().f32(), d, there.i32(), n, gpu::stream()));
  }
}

void check_batch(const Var& x, const Batch& batch, const ConvState* state, int64_t width) {
  K3_CHECK(batch.tokens() == x.rows(), "[conv] the batch has {} tokens but x has {} rows", batch.tokens(), x.rows());
  K3_CHECK(batch.padding.empty() || int64_t(batch.padding.size()) == x.rows(), "[conv] padding marks {} rows but x has {}", batch.padding.size(),
           x.rows());
  K3_CHECK(!batch.step || state, "[conv] a decode step on the device needs a state");
  if (!state) return;
  K3_CHECK(!x.context().tape, "[conv] a state has no gradient: training passes none");
  K3_CHECK(state->channels() == x.cols() && state->width() == width, "[conv] the state is of {} channels and width {}, x and w of {} and {}",
           state->channels(), state->width(), x.cols(), width);
  if (batch.step) return;
  K3_CHECK(int64_t(batch.slots.size()) == batch.sequences(), "[conv] {} sequences but {} slots", batch.sequences(), batch.slots.size());
  std::vector<uint8_t> taken(size_t(state->slots()));
  for (int32_t slot : batch.slots) {
    K3_CHECK(slot >= 0 && slot < state->slots(), "[conv] slot {} of a state with {}", slot, state->slots());
    K3_CHECK(!taken[slot]++, "[conv] two sequences of the batch have slot {}", slot);
  }
}

struct Size {
  int64_t rows, channels, width;
};
Size size_of(const Var& x, const Param& w, const Batch& batch, const ConvState* state) {
  const int64_t channels = x.cols(), width = w.value.dim(w.value.rank() - 1);
  K3_CHECK(w.value.rank() >= 2 && w.value.dtype() == DType::f32 && w.value.size() == channels * width,
           "[conv] x has {} columns but {} is {} {}; it must be F32 (channels x width)", channels, w.name, name_of(w.value.dtype()),
           to_string(w.value.shape()));
  K3_CHECK(width >= 1 && width <= cpu::kConvMaxWidth, "[conv] {} has width {}, must be 1 to {}", w.name, width, cpu::kConvMaxWidth);
  check_batch(x, batch, state, width);
  return {x.rows(), channels, width};
}

struct Work {
  double flops, bytes, held;
  Work(const Size& s, const Batch& batch, const ConvState* state) {
    const double n = double(s.rows * s.channels), weights = 4.0 * double(s.channels * s.width);
    flops = (2.0 * double(s.width) + 5) * n, bytes = 8 * n + weights;
    held = weights + (state ? 4 * double(batch.sequences() * (s.width - 1) * s.channels) : 0);
  }
  Cost forward(double n, bool state) const { return {.flops = flops, .bytes = bytes + (state ? 4 * n : 0), .held = held}; }
  Cost backward(double n) const { return {.flops = 3 * flops, .bytes = 2 * bytes + 4 * n}; }
};

// One size, one set of launches for all.
std::vector<Var> on_gpu([[maybe_unused]] const std::vector<Var>& xs, [[maybe_unused]] const std::vector<Param*>& ws,
                        [[maybe_unused]] const Batch& batch, [[maybe_unused]] ConvState* state, [[maybe_unused]] const Size& size) {
  std::vector<Var> ys;
  if constexpr (gpu::kBuilt) {
    Context& c = xs[0].context();
    const auto [rows, channels, width] = size;
    for (size_t i = 0; i < xs.size(); ++i) ys.emplace_back(c, DType::f32, Shape{rows, channels});
    const size_t mark = c.arena->mark();
    std::vector<int32_t> taps(size_t(rows * width)), readers;
    find_taps(batch, state, width, taps.data());
    cuda::Convs all{};
    all.count = int(xs.size());
    const int32_t* there = listed(c.device, *c.arena, taps);
    for (size_t i = 0; i < xs.size(); ++i) {
      cpu::ConvArgs& a = all.of[i];
      a.rows = rows, a.channels = channels, a.width = width, a.x = xs[i].f32(), a.w = ws[i]->value.f32(), a.y = ys[i].f32();
      a.taps = there, a.state = state ? state->rows().f32() : nullptr;
    }
    gpu::check(cuda::conv_silu_forward(all, gpu::stream()));
    const Work work(size, batch, state);
    const double n = double(rows * channels);
    for (size_t i = 0; i < xs.size(); ++i) c.cost("conv_silu", work.forward(n, state != nullptr));
    if (state) remember(batch, xs[0], *state);
    if (!c.tape) return c.arena->rewind(mark), ys;  // the backward alone needs the taps again
    readers.assign(taps.size(), -1);
    for (size_t i = 0; i < taps.size(); ++i)
      if (taps[i] >= 0) readers[size_t(taps[i] * width) + i % size_t(width)] = int32_t(i / size_t(width));
    const int32_t* readers_there = listed(c.device, *c.arena, readers);
    c.tape->push([=, &c] {
      if (std::none_of(ys.begin(), ys.end(), [](const Var& y) { return y.has_grad(); })) return;
      cuda::Convs b = all;
      bool weights = false;
      for (size_t i = 0; i < xs.size(); ++i) {
        b.of[i].dy = ys[i].grad().f32(), b.of[i].dx = xs[i].grad(b.fresh[i]).f32();
        b.of[i].dw = ws[i]->grad.empty() ? nullptr : ws[i]->grad.f32(), weights |= b.of[i].dw != nullptr;
        c.cost("conv_silu", work.backward(n));
      }
      const int64_t count = int64_t(xs.size());
      Scratch scratch(*c.arena);
      float* partial = weights ? scratch.lend(DType::f32, {count, cuda::conv_chunks(rows), channels, width}).f32() : nullptr;
      float* slopes = scratch.lend(DType::f32, {count, rows, channels}).f32();
      gpu::check(cuda::conv_silu_backward(b, slopes, readers_there, partial, gpu::stream()));
    });
  }
  return ys;
}

}  // namespace

std::vector<Var> conv_silu(const std::vector<Var>& xs, const std::vector<Param*>& ws, const Batch& batch, const std::vector<ConvState*>& states) {
  std::vector<Var> ys;
  bool together = xs[0].context().device == Device::cuda && xs.size() <= cuda::kMostConvs;
  for (size_t i = 0; i < xs.size(); ++i)
    together = together && !states[i] && xs[i].value().shape() == xs[0].value().shape() && ws[i]->value.shape() == ws[0]->value.shape();
  if (!together) {
    for (size_t i = 0; i < xs.size(); ++i) ys.push_back(conv_silu(xs[i], *ws[i], batch, states[i]));
    return ys;
  }
  for (size_t i = 0; i < xs.size(); ++i) size_of(xs[i], *ws[i], batch, nullptr);
  return on_gpu(xs, ws, batch, nullptr, size_of(xs[0], *ws[0], batch, nullptr));
}

Var conv_silu(Var x, Param& w, const Batch& batch, ConvState* state) {
  Context& c = x.context();
  const Size size = size_of(x, w, batch, state);
  const auto [rows, channels, width] = size;
  if (batch.step) {
    Var y(c, DType::f32, {rows, channels});
    if constexpr (gpu::kBuilt)
      gpu::check(cuda::conv_silu_step({*batch.step, rows, channels, width, state->history(), x.f32(), w.value.f32(), state->rows().f32(), y.f32()},
                                      gpu::stream()));
    return y;
  }
  if (c.device == Device::cuda) return on_gpu({x}, {&w}, batch, state, size)[0];
  Var y(c, DType::f32, {rows, channels});
  size_t mark = c.arena->mark();
  Tensor taps = c.arena->lend(DType::i32, {rows, width});
  cpu::ConvArgs a{};
  a.rows = rows, a.channels = channels, a.width = width, a.x = x.f32(), a.w = w.value.f32(), a.y = y.f32();
  a.taps = taps.i32(), a.state = state ? state->rows().f32() : nullptr;
  if (c.device == Device::cpu) {
    find_taps(batch, state, width, taps.i32());
    cpu::conv().conv_silu_forward(a);
  }
  if (state) remember(batch, x, *state);
  const Work work(size, batch, state);
  const double n = double(rows * channels);
  c.cost("conv_silu", work.forward(n, state != nullptr));
  if (!c.tape) c.arena->rewind(mark);  // the backward alone needs the taps again
  on_backward(y, [=, &c, &w] {
    cpu::ConvArgs b = a;
    b.dy = y.grad().f32(), b.dx = x.grad().f32(), b.dw = w.grad.empty() ? nullptr : w.grad.f32();
    c.cost("conv_silu", work.backward(n));
    if (c.device == Device::cpu) cpu::conv().conv_silu_backward(b);
  });
  return y;
}

}  // namespace k3

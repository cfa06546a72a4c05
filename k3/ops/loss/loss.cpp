#include "k3/ops/loss/loss.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "k3/core/error.h"
#include "k3/core/listed.h"
#include "k3/core/threads.h"
#include "k3/ops/linear/blas_cuda.h"
#include "k3/ops/linear/linear.h"
#include "k3/ops/linear/product.h"
#include "k3/ops/linear/product_cuda.h"
#include "k3/ops/loss/loss_cuda.h"
#include "k3/ops/loss/loss_float_cuda.h"
#include "k3/ops/loss/loss_kernels.h"
#include "k3/tape/tape.h"

namespace k3 {

namespace {

constexpr int64_t kPieceBytes = 8 << 20;
// Rows whose logits are in memory at once: 8 MB, but not below the 32 rows from which the matrix product is fast. From the vocabulary alone,
// since dhead is summed piece by piece.
int64_t rows_of_piece(int64_t vocabulary) { return std::clamp<int64_t>(kPieceBytes / (4 * std::max<int64_t>(1, vocabulary)), 32, 4096); }
// Rows of a bfloat16 head that are widened at once: whole blocks of the product's order, so that cutting there changes no bit.
int64_t rows_of_slice(int64_t d) { return std::max<int64_t>(1, kPieceBytes / (4 * std::max<int64_t>(1, d)) / kProductBlock) * kProductBlock; }

void widen(const Tensor& from, float* to) {
  const bf16* p = from.as<bf16>();
  parallel_blocks(from.size(), 1 << 16, [&](int64_t a, int64_t b) {
    for (int64_t i = a; i < b; ++i) to[i] = to_float(p[i]);
  });
}

// The rows that count, in order.
std::vector<int64_t> counted_rows(const Tensor& targets, const Param& head) {
  std::vector<int64_t> rows;
  for (int64_t n = 0; n < targets.size(); ++n) {
    int32_t t = targets.i32()[n];
    if (t == kIgnored) continue;
    K3_CHECK(t >= 0 && t < head.value.rows(), "[cross_entropy] the target at position {} is {}, but {} has rows 0 to {} ({} marks an ignored one)", n,
             t, head.name, head.value.rows() - 1, kIgnored);
    rows.push_back(n);
  }
  return rows;
}

// Where the GPU reads which rows count, and behind them their targets: (2, rows.size()). A captured step has as many in every run.
template <class Lender>
const int32_t* fed_rows(const Context& c, Lender& lender, const Tensor& targets, const Param& head, int64_t count) {
  return c.fed<int32_t>(lender, 2 * count, [targets, &head, count](int32_t* to) {
    const std::vector<int64_t> rows = counted_rows(targets, head);
    K3_CHECK(int64_t(rows.size()) == count, "[cross_entropy] {} targets count in a step captured with {}", rows.size(), count);
    for (int64_t i = 0; i < count; ++i) to[i] = int32_t(rows[size_t(i)]), to[count + i] = targets.i32()[rows[size_t(i)]];
  });
}

constexpr int64_t kNarrowPieceBytes = int64_t(2) << 30;

// Training with products in bfloat16: logits in bfloat16 too, which become their own gradient in place; as many rows at once as fit, since each piece
// reads and writes the head and its gradient.
void narrow_on_gpu(const Var& x, Param& head, const Tensor& targets, float weight, Loss& loss) {
  if constexpr (gpu::kBuilt) {
    Context& c = x.context();
    const int64_t d = x.cols(), vocabulary = head.value.rows(), most = std::clamp<int64_t>(kNarrowPieceBytes / (2 * vocabulary), 32, 1 << 20);
    Tensor dx = x.grad();
    Scratch scratch(*c.arena);
    const int32_t* there = fed_rows(c, scratch, targets, head, loss.count);
    const int64_t piece = std::min(most, loss.count);
    Tensor xs = scratch.lend(DType::bf16, {piece, d}), logits = scratch.lend(DType::bf16, {piece, vocabulary});
    Tensor losses = scratch.lend(DType::f32, {piece}), dxs = scratch.lend(DType::f32, {piece, d}), copy;
    const void* w = head.narrow.data();
    if (head.narrow.empty()) {
      copy = scratch.lend(DType::bf16, head.value.shape());
      gpu::check(cuda::narrow(head.value.f32(), copy.data(), head.value.size(), gpu::stream()));
      w = copy.data();
    }
    for (int64_t first = 0; first < loss.count; first += piece) {
      const int64_t m = std::min(piece, loss.count - first);
      const int32_t *row = there + first, *wanted = there + loss.count + first;
      gpu::check(cuda::gather_rows_bf16(x.f32(), row, xs.data(), m, d, gpu::stream()));
      gpu::check(cuda::blas_products({.p = x_wt(nullptr, nullptr, nullptr, m, vocabulary, d),
                                      .a = xs.data(),
                                      .b = w,
                                      .c = logits.data(),
                                      .result = logits.data(),
                                      .bf16_result = true,
                                      .often = true},
                                     gpu::stream()));
      gpu::check(cuda::cross_entropy({logits.data(), wanted, m, int(vocabulary), weight, losses.f32()}, gpu::stream()));
      gpu::check(cuda::scatter_rows(losses.f32(), row, loss.per_token.f32(), m, 1, false, gpu::stream()));
      gpu::check(cuda::blas_product(dy_w(nullptr, nullptr, dxs.f32(), m, vocabulary, d, false), logits.data(), w, gpu::stream(), true));
      if (!head.grad.empty()) {
        const Product p = dyt_x(nullptr, nullptr, head.grad.f32(), m, vocabulary, d, !std::exchange(head.fresh, false));
        gpu::check(cuda::blas_product(p, logits.data(), xs.data(), gpu::stream(), true));
      }
      gpu::check(cuda::scatter_rows(dxs.f32(), row, dx.f32(), m, d, true, gpu::stream()));
    }
  }
}

// What a piece of rows needs.
struct Piece {
  int64_t rows;
  float *x, *logits, *losses, *dx;
};

// The same pieces as on the CPU. A bfloat16 head is widened inside the products.
void on_gpu(const Var& x, const Param& head, const Tensor& targets, float weight, Loss& loss, const Piece& piece) {
  if constexpr (gpu::kBuilt) {
    Context& c = x.context();
    const int64_t d = x.cols(), vocabulary = head.value.rows();
    const bool gradient = c.tape != nullptr, wide = head.value.dtype() == DType::f32;
    Tensor dx = gradient ? x.grad() : Tensor(), dhead = gradient ? head.grad : Tensor();
    Scratch scratch(*c.arena);
    const int32_t *there = fed_rows(c, scratch, targets, head, loss.count), *targets_there = there + loss.count;
    // bfloat16 operands where the layers have them (linear.cpp); the head is narrowed once
    const bool narrow = c.bf16_products && d % 8 == 0 && vocabulary % 8 == 0;
    auto narrowed = [&](const float* from, Tensor& room, int64_t n) -> const void* {
      if (room.empty()) room = scratch.lend(DType::bf16, {n});
      gpu::check(cuda::narrow(from, room.data(), n, gpu::stream()));
      return room.data();
    };
    Tensor head_room, x_room, logits_room;
    if (narrow) x_room = scratch.lend(DType::bf16, {piece.rows * d}), logits_room = scratch.lend(DType::bf16, {piece.rows * vocabulary});
    const void* narrow_head = !narrow ? nullptr : wide ? narrowed(head.value.f32(), head_room, vocabulary * d) : head.value.data();
    auto product_with_head = [&](const Product& p, const void* a) {
      gpu::check(narrow ? cuda::blas_product(p, a, narrow_head, gpu::stream())
                 : wide ? cuda::product(p, gpu::stream())
                        : cuda::product_bf16(p, head.value.data(), gpu::stream()));
    };
    const float* w = wide ? head.value.f32() : nullptr;
    for (int64_t first = 0; first < loss.count; first += piece.rows) {
      const int64_t m = std::min(piece.rows, loss.count - first);
      const int32_t* row = there + first;
      gpu::check(cuda::gather_rows(x.f32(), row, piece.x, m, d, gpu::stream()));
      const void* xs = narrow ? narrowed(piece.x, x_room, m * d) : nullptr;
      product_with_head(x_wt(piece.x, w, piece.logits, m, vocabulary, d), xs);
      gpu::check(cuda::cross_entropy({m, vocabulary, piece.logits, targets_there + first, piece.losses, gradient, weight}, gpu::stream()));
      gpu::check(cuda::scatter_rows(piece.losses, row, loss.per_token.f32(), m, 1, false, gpu::stream()));
      if (!gradient) continue;
      const void* dl = narrow ? narrowed(piece.logits, logits_room, m * vocabulary) : nullptr;
      product_with_head(dy_w(piece.logits, w, piece.dx, m, vocabulary, d, false), dl);
      if (!dhead.empty()) {
        const Product p = dyt_x(piece.logits, piece.x, dhead.f32(), m, vocabulary, d);
        gpu::check(narrow ? cuda::blas_product(p, dl, xs, gpu::stream()) : cuda::product(p, gpu::stream()));
      }
      gpu::check(cuda::scatter_rows(piece.dx, row, dx.f32(), m, d, true, gpu::stream()));
    }
  }
}

}  // namespace

Loss cross_entropy(Var x, Param& head, const Tensor& targets, float weight) {
  Context& c = x.context();
  int64_t d = x.cols(), vocabulary = head.value.rows();
  bool wide = head.value.dtype() == DType::f32, data = c.device != Device::null;
  K3_CHECK(head.value.cols() == d, "[cross_entropy] x has {} columns but {} ({}) takes {}", d, head.name, to_string(head.value.shape()),
           head.value.cols());
  K3_CHECK(wide || head.value.dtype() == DType::bf16, "[cross_entropy] {} must be F32 or BF16, not {}", head.name, name_of(head.value.dtype()));
  K3_CHECK(targets.dtype() == DType::i32 && targets.size() == x.rows(), "[cross_entropy] x has {} rows but there are {} targets of {}; needs I32",
           x.rows(), targets.size(), name_of(targets.dtype()));
  K3_CHECK(!data || targets.device() == Device::cpu, "[cross_entropy] targets must be in the memory of the CPU, to be checked there");
  Loss loss;
  loss.per_token = c.arena->lend_zeroed(DType::f32, {x.rows()});
  std::vector<int64_t> rows;
  if (data) rows = counted_rows(targets, head);
  loss.count = data ? int64_t(rows.size()) : x.rows();
  bool gradient = c.tape != nullptr;
  Tensor dx = gradient ? x.grad() : Tensor(), dhead = gradient ? head.grad : Tensor();

  int64_t piece = std::min(rows_of_piece(vocabulary), x.rows()), slice = wide ? vocabulary : std::min(rows_of_slice(d), vocabulary);
  Scratch scratch(*c.arena);
  Tensor xs = scratch.lend(DType::f32, {piece, d}), ls = scratch.lend(DType::f32, {piece, vocabulary});
  Tensor ts = scratch.lend(DType::i32, {piece}), losses = scratch.lend(DType::f32, {piece});
  Tensor dxs = gradient ? scratch.lend(DType::f32, {piece, d}) : Tensor();
  Tensor widened = wide ? Tensor() : scratch.lend(DType::f32, {slice, d});

  double n = double(loss.count), size = double(vocabulary) * double(d), pieces = double((loss.count + piece - 1) / std::max<int64_t>(1, piece));
  c.cost("cross_entropy", {.flops = (gradient ? 6 : 2) * n * size,
                           .bytes = pieces * (gradient ? 2 : 1) * double(head.value.bytes()) + (dhead.empty() ? 0 : 8 * pieces * size) +
                                    4 * n * (double(d) * (gradient ? 4 : 1) + double(vocabulary) * (gradient ? 6 : 3))});
  if (!data) return loss;
  if (c.device == Device::cuda) {
    if (gradient && c.bf16_products && wide && d % 8 == 0 && vocabulary % 8 == 0)
      narrow_on_gpu(x, head, targets, weight, loss);
    else
      on_gpu(x, head, targets, weight, loss, {piece, xs.f32(), ls.f32(), losses.f32(), gradient ? dxs.f32() : nullptr});
    if (c.later) {
      loss.sum = NAN;
    } else {
      const HostCopy all(loss.per_token);
      for (int64_t n : rows) loss.sum += double(all.f32()[n]);
    }
    return loss;
  }

  // f(first, rows, weights) for each slice of the head
  auto each_slice = [&](auto f) {
    for (int64_t a = 0; a < vocabulary; a += slice) {
      Tensor part = head.value.row_range(a, std::min(a + slice, vocabulary));
      if (!wide) widen(part, widened.f32());
      f(a, part.rows(), wide ? part.f32() : widened.f32());
    }
  };
  for (int64_t first = 0; first < loss.count; first += piece) {
    int64_t m = std::min(piece, loss.count - first);
    const int64_t* row = rows.data() + first;
    parallel_for(m, [&](int64_t i) {
      std::memcpy(xs.f32() + i * d, x.f32() + row[i] * d, size_t(d) * sizeof(float));
      ts.i32()[i] = targets.i32()[row[i]];
    });
    each_slice([&](int64_t a, int64_t v, const float* w) { product({m, v, d, xs.f32(), d, false, w, d, true, ls.f32() + a, vocabulary, false}); });
    cpu::loss().cross_entropy({m, vocabulary, ls.f32(), ts.i32(), losses.f32(), gradient, weight});
    for (int64_t i = 0; i < m; ++i) loss.per_token.f32()[row[i]] = losses.f32()[i], loss.sum += double(losses.f32()[i]);
    if (!gradient) continue;
    each_slice([&](int64_t a, int64_t v, const float* w) {
      const float* dl = ls.f32() + a;
      std::vector<Product> both = {{m, d, v, dl, vocabulary, false, w, d, false, dxs.f32(), d, a > 0}};
      if (!dhead.empty()) both.push_back({v, d, m, dl, vocabulary, true, xs.f32(), d, false, dhead.f32() + a * d, d, true});
      products(both);
    });
    parallel_for(m, [&](int64_t i) {
      float* to = dx.f32() + row[i] * d;
      for (int64_t j = 0; j < d; ++j) to[j] += dxs.f32()[i * d + j];
    });
  }
  return loss;
}

Tensor logits(Var x, Param& head) {
  return with_tape(x.context(), nullptr, [&] { return linear(x, head).value(); });
}

}  // namespace k3

// Newton-Schulz and Muon: whole blocks through product.h, a wave of blocks at a time so that small ones fill the threads too.
//
// With m the smaller and n the larger side of a block, a step X <- (aI + bS + cS^2) X, S = X X^T, costs 4 m^2 n + 2 m^3 FLOPs. All the
// polynomials commute, so for long blocks (n >= 2m, a head's) the five are multiplied together first, as m x m matrices, and X is read twice
// in all: Z = aI + bA + cA^2,  Q <- Z Q,  A <- Z A Z,  then X <- Q X. Q has entries up to a^5 = 485, so this form needs float32 or better.
#include <algorithm>
#include <cmath>

#include "k3/core/error.h"
#include "k3/core/listed.h"
#include "k3/core/threads.h"
#include "k3/ops/linear/product.h"
#include "k3/ops/linear/products_cuda.h"
#include "k3/ops/update/update.h"
#include "k3/ops/update/update_float_cuda.h"
#include "k3/ops/update/update_kernels.h"

namespace k3 {

namespace {

constexpr int kSteps = 5;
constexpr float kA = 3.4445f, kB = -4.7750f, kC = 2.0315f;
constexpr int64_t kWave = 1 << 24;      // floats of scratch that one wave may take; a larger block is a wave of its own
constexpr int64_t kSmall = 1 << 23;     // multiply-adds of one product below which a block is small
constexpr int64_t kMirror = 64;         // rows of a symmetric matrix that one call mirrors
constexpr int64_t kElements = 1 << 14;  // elements that one call of parallel_for takes

struct Block {
  int64_t rows, cols;
  float *x, *y;          // (rows, cols): the matrix, and room for its successor
  float *s, *z, *q, *t;  // (m, m)
  bool tall() const { return rows > cols; }
  int64_t m() const { return std::min(rows, cols); }
  int64_t n() const { return std::max(rows, cols); }
  int64_t size() const { return rows * cols; }
  int64_t square() const { return m() * m(); }
  bool is_long() const { return n() >= 2 * m(); }
  static int64_t scratch(int64_t rows, int64_t cols) { return rows * cols + 4 * std::min(rows, cols) * std::min(rows, cols); }
};

constexpr int64_t strip_of(int64_t m) { return std::max<int64_t>(64, (m / 8 + 31) / 32 * 32); }  // rows of a symmetric product at a time

double flops(int64_t m, int64_t n) {
  double triangle = 0;  // (m, m) elements that are computed
  for (int64_t at = 0; at < m; at += strip_of(m)) triangle += double(std::min(strip_of(m), m - at)) * double(std::min(at + strip_of(m), m));
  double gram = 2 * triangle * double(n), square = 2 * triangle * double(m), apply = 2 * double(m * m) * double(n);
  return n >= 2 * m ? gram + apply + (4 * kSteps - 3) * square : kSteps * (gram + square + apply);
}

// f(i, first, last) for elements first..last-1 of block i of `size(i)` elements, over all threads
template <class Size, class F>
void over_elements(size_t blocks, Size size, F f) {
  struct Part {
    size_t block;
    int64_t first, last;
  };
  std::vector<Part> parts;
  for (size_t i = 0; i < blocks; ++i)
    for (int64_t at = 0; at < size(i); at += kElements) parts.push_back({i, at, std::min(at + kElements, size(i))});
  parallel_for(int64_t(parts.size()), [&](int64_t i) { f(parts[size_t(i)].block, parts[size_t(i)].first, parts[size_t(i)].last); });
}

// ---- on the GPU: each pass is one launch over all blocks ----

// The products of a list; with `lower`, each result is symmetric and only its lower triangle is wanted. Where training multiplies in bfloat16,
// large ones go to the tensor units with operands as sums of two, which the long form's factors of 485 need: 1e-3 in the result, a tenth of what
// plain bfloat16 iterations leave.
void products_on_gpu(Context& c, const std::vector<Product>& products, bool lower) {
  if constexpr (gpu::kBuilt) {
    for (bool wide : {false, true}) {
      const bool split = wide && c.bf16_products;
      std::vector<cuda::ListedProduct> list;
      std::vector<int32_t> begins{0};
      for (const Product& p : products) {
        if ((p.m >= cuda::kProductWideTile && p.n >= cuda::kProductWideTile) != wide) continue;
        list.push_back({p, false, lower});
        begins.push_back(begins.back() + int32_t(cuda::product_tiles(p.m, p.n, wide)));
      }
      Scratch scratch(*c.arena);
      gpu::check(cuda::products(
          {listed(c.device, scratch, list), listed(c.device, scratch, begins), int(list.size()), begins.back(), wide, split, split}, gpu::stream()));
    }
  }
}
// f(cuda list of matrices, their number)
template <class Matrix, class F>
void over_matrices(Context& c, const std::vector<Block*>& blocks, Matrix matrix, F f) {
  std::vector<cuda::SquareMatrix> list;
  for (const Block* b : blocks) list.push_back(matrix(*b));
  Scratch scratch(*c.arena);
  gpu::check(f(listed(c.device, scratch, list), int64_t(list.size())));
}
void divide_by_norms_on_gpu(Context& c, const std::vector<Block*>& blocks) {
  if constexpr (gpu::kBuilt) {
    std::vector<cuda::Listed> list;
    for (const Block* b : blocks) list.push_back({b->x, b->size()});
    const int64_t n = int64_t(list.size());
    Scratch scratch(*c.arena);
    double* partial = scratch.lend(DType::f64, {n, cuda::kSumParts}).as<double>();
    double* sums = scratch.lend(DType::f64, {n}).as<double>();
    const cuda::Listed* at = listed(c.device, scratch, list);
    gpu::check(cuda::sums_of_squares(at, n, partial, sums, gpu::stream()));
    gpu::check(cuda::divide_by_norms(at, n, sums, 1e-7, gpu::stream()));
  }
}

// All (m, m) matrices here are symmetric: polynomials in X X^T. Only the lower triangle is computed, in strips of rows that get longer, and
// then mirrored; so rounding can't make them unsymmetric either.
void lower_strips(std::vector<Product>& list, const Product& p) {
  const int64_t strip = strip_of(p.m);
  for (int64_t at = 0; at < p.m; at += strip) {
    Product q = p;
    q.m = std::min(strip, p.m - at), q.n = at + q.m;
    q.a += p.a_transposed ? at : at * p.lda, q.c += at * p.ldc;
    list.push_back(q);
  }
}
// f(block) is a product whose result is symmetric
template <class F>
void symmetric_products(Context& c, const std::vector<Block*>& blocks, F f) {
  std::vector<Product> list;
  if constexpr (gpu::kBuilt) {
    if (c.device == Device::cuda) {
      for (const Block* b : blocks) list.push_back(f(*b));
      products_on_gpu(c, list, true);
      over_matrices(
          c, blocks,
          [&](const Block& b) {
            return cuda::SquareMatrix{nullptr, f(b).c, b.m()};
          },
          [](auto* at, int64_t n) { return cuda::mirror(at, n, gpu::stream()); });
      return;
    }
  }
  for (const Block* b : blocks) lower_strips(list, f(*b));
  products(list);
  struct Tile {
    float* c;
    int64_t m, at;
  };
  std::vector<Tile> tiles;
  for (const Block* b : blocks)
    for (int64_t at = 0; at < b->m(); at += kMirror) tiles.push_back({f(*b).c, b->m(), at});
  parallel_for(int64_t(tiles.size()), [&](int64_t i) {
    const auto& [c, m, at] = tiles[size_t(i)];
    cpu::update().mirror(c, m, at, std::min(at + kMirror, m));
  });
}
// X X^T, or X^T X of a tall block: the smaller of the two
Product gram(const Block& b, float* to) { return {b.m(), b.m(), b.n(), b.x, b.cols, b.tall(), b.x, b.cols, !b.tall(), to, b.m(), false}; }
Product times(const Block& b, const float* p, const float* q, float* to) {
  return {b.m(), b.m(), b.m(), p, b.m(), false, q, b.m(), false, to, b.m(), false};
}

// X <- P X, or X P of a tall block
void multiply_x(Context& c, const std::vector<Block*>& blocks, float* Block::*which) {
  std::vector<Product> list;
  for (const Block* b : blocks) {
    const float *x = b->x, *p = b->*which;
    list.push_back({b->rows, b->cols, b->m(), b->tall() ? x : p, b->m(), false, b->tall() ? p : x, b->cols, false, b->y, b->cols, false});
  }
  if (c.device == Device::cuda)
    products_on_gpu(c, list, false);
  else
    products(list);
  for (Block* b : blocks) std::swap(b->x, b->y);
}

// z = a I + b s + c s^2
void polynomial(Context& c, const std::vector<Block*>& blocks) {
  symmetric_products(c, blocks, [](const Block& b) { return times(b, b.s, b.s, b.z); });
  if constexpr (gpu::kBuilt) {
    if (c.device == Device::cuda) {
      over_matrices(
          c, blocks,
          [](const Block& b) {
            return cuda::SquareMatrix{b.s, b.z, b.m()};
          },
          [](auto* at, int64_t n) { return cuda::combine(at, n, kA, kB, kC, gpu::stream()); });
      return;
    }
  }
  over_elements(
      blocks.size(), [&](size_t i) { return blocks[i]->square(); },
      [&](size_t i, int64_t first, int64_t last) {
        const Block& b = *blocks[i];
        cpu::update().combine(b.s + first, b.z + first, kB, kC, last - first);
        int64_t m = b.m();
        for (int64_t at = (first + m) / (m + 1) * (m + 1); at < last; at += m + 1) b.z[at] += kA;
      });
}

// Each block's x becomes its orthogonalised self; x and y may change places. All blocks take each step together.
void orthogonalise_together(Context& c, const std::vector<Block*>& blocks) {
  std::vector<Block*> longs, others;
  for (Block* b : blocks) (b->is_long() ? longs : others).push_back(b);
  if (c.device == Device::cuda) {
    divide_by_norms_on_gpu(c, blocks);
  } else {
    std::vector<float> factor;
    for (const Block* b : blocks) factor.push_back(float(1 / (std::sqrt(sum_of_squares(Tensor(b->x, DType::f32, {b->size()}))) + 1e-7)));
    over_elements(
        blocks.size(), [&](size_t i) { return blocks[i]->size(); },
        [&](size_t i, int64_t first, int64_t last) { cpu::update().scale(blocks[i]->x + first, factor[i], last - first); });
  }
  if (!others.empty())
    for (int step = 0; step < kSteps; ++step) {
      symmetric_products(c, others, [](const Block& b) { return gram(b, b.s); });
      polynomial(c, others);
      multiply_x(c, others, &Block::z);
    }
  if (longs.empty()) return;
  symmetric_products(c, longs, [](const Block& b) { return gram(b, b.s); });
  for (int step = 0; step < kSteps; ++step) {
    polynomial(c, longs);
    if (step == 0 && c.device == Device::cuda) {
      for (const Block* b : longs) gpu::copy(b->q, b->z, size_t(b->square()) * sizeof(float));
    } else if (step == 0) {
      parallel_for(int64_t(longs.size()), [&](int64_t i) { std::copy_n(longs[size_t(i)]->z, longs[size_t(i)]->square(), longs[size_t(i)]->q); });
    } else {
      symmetric_products(c, longs, [](const Block& b) { return times(b, b.z, b.q, b.t); });
      for (Block* b : longs) std::swap(b->q, b->t);
    }
    if (step == kSteps - 1) break;  // nobody needs the last A
    symmetric_products(c, longs, [](const Block& b) { return times(b, b.z, b.s, b.t); });
    symmetric_products(c, longs, [](const Block& b) { return times(b, b.t, b.z, b.s); });
  }
  multiply_x(c, longs, &Block::q);
}

// A small block stays with one thread, and in its cache; large ones share all threads in every product. The bits are the same.
void orthogonalise(Context& c, std::vector<Block>& wave) {
  std::vector<Block*> small, large;
  for (Block& b : wave) (c.device == Device::cpu && b.m() * b.m() * b.n() < kSmall ? small : large).push_back(&b);
  parallel_for(int64_t(small.size()), [&](int64_t i) { orthogonalise_together(c, {small[size_t(i)]}); });
  if (!large.empty()) orthogonalise_together(c, large);
}

// What a block needs besides x, from `at` on
Block block_at(int64_t rows, int64_t cols, float* x, float*& at) {
  int64_t mm = std::min(rows, cols) * std::min(rows, cols);
  Block b{rows, cols, x, at, at + rows * cols, at + rows * cols + mm, at + rows * cols + 2 * mm, at + rows * cols + 3 * mm};
  at += Block::scratch(rows, cols);
  return b;
}

}  // namespace

void newton_schulz(Context& c, const Tensor& x) {
  K3_CHECK(x.rank() == 3, "[newton_schulz] x must be (blocks, rows, cols), not ({})", to_string(x.shape()));
  const int64_t blocks = x.dim(0), rows = x.dim(1), cols = x.dim(2), each = Block::scratch(rows, cols);
  const int64_t wave = std::max<int64_t>(1, kWave / std::max<int64_t>(1, each));
  for (int64_t at = 0; at < blocks; at += wave) {
    const int64_t count = std::min(wave, blocks - at);
    Scratch scratch(*c.arena);
    float* room = scratch.lend(DType::f32, {count, each}).f32();
    c.cost("newton_schulz", {.flops = double(count) * flops(std::min(rows, cols), std::max(rows, cols)), .bytes = 8.0 * double(count * rows * cols)});
    if (c.device == Device::null) continue;
    std::vector<Block> list;
    for (int64_t i = 0; i < count; ++i) list.push_back(block_at(rows, cols, x.f32() + (at + i) * rows * cols, room));
    orthogonalise(c, list);
    for (int64_t i = 0; i < count; ++i) {
      const Tensor home(x.f32() + (at + i) * rows * cols, DType::f32, {rows * cols}, c.device);
      if (list[size_t(i)].x != home.f32()) copy_values(home, Tensor(list[size_t(i)].x, DType::f32, {rows * cols}, c.device));
    }
  }
}

void muon_step(Context& c, const std::vector<MuonMatrix>& list, const MuonOptions& o) {
  struct Piece {
    int64_t rows, cols;
    float *weight, *grad, *momentum;
  };
  std::vector<Piece> pieces;
  for (const MuonMatrix& p : list) {
    const Shape shape = p.weight.shape();
    K3_CHECK(p.grad.shape() == shape && p.momentum.shape() == shape, "[muon] a weight of {} has a gradient of {} and momentum of {}",
             to_string(shape), to_string(p.grad.shape()), to_string(p.momentum.shape()));
    K3_CHECK(p.blocks >= 1 && p.weight.rows() % p.blocks == 0, "[muon] a weight of {} doesn't divide into {} blocks of rows", to_string(shape),
             p.blocks);
    const int64_t rows = p.weight.rows() / p.blocks, cols = p.weight.cols();
    for (int64_t b = 0; b < p.blocks && p.weight.size() > 0; ++b) {
      auto part = [&](const Tensor& t) { return c.device == Device::null ? nullptr : t.f32() + b * rows * cols; };
      pieces.push_back({rows, cols, part(p.weight), part(p.grad), part(p.momentum)});
    }
  }
  for (size_t at = 0; at < pieces.size();) {
    int64_t room = 0;
    size_t end = at;
    double work = 0, bytes = 0;
    while (end < pieces.size()) {
      const Piece& p = pieces[end];
      int64_t need = p.rows * p.cols + Block::scratch(p.rows, p.cols);
      if (end > at && room + need > kWave) break;
      room += need, ++end;
      work += flops(std::min(p.rows, p.cols), std::max(p.rows, p.cols)), bytes += 24.0 * double(p.rows * p.cols);
    }
    Scratch scratch(*c.arena);
    float* memory = scratch.lend(DType::f32, {room}).f32();
    c.cost("muon", {.flops = work, .bytes = bytes});
    if (c.device != Device::null) {
      std::vector<Block> wave;
      for (size_t i = at; i < end; ++i) {
        float* x = memory;
        memory += pieces[i].rows * pieces[i].cols;
        wave.push_back(block_at(pieces[i].rows, pieces[i].cols, x, memory));
      }
      auto step = [&](size_t i) { return 0.2f * std::sqrt(float(wave[i].n())); };
      if constexpr (gpu::kBuilt) {
        if (c.device == Device::cuda) {
          auto listed_pieces = [&](Scratch& s) {  // Newton-Schulz may move a block's x
            std::vector<cuda::MuonPiece> all;
            for (size_t i = 0; i < wave.size(); ++i) {
              const Piece& p = pieces[at + i];
              all.push_back({p.weight, p.grad, p.momentum, wave[i].x, wave[i].size(), step(i)});
            }
            return listed(c.device, s, all);
          };
          gpu::check(cuda::muon_momentum(listed_pieces(scratch), int64_t(wave.size()), o.momentum, o.grad_scale, o.nesterov, o.gate, gpu::stream()));
          orthogonalise(c, wave);
          gpu::check(cuda::muon_apply(listed_pieces(scratch), int64_t(wave.size()), o.lr, o.weight_decay, o.gate, gpu::stream()));
          at = end;
          continue;
        }
      }
      auto size = [&](size_t i) { return wave[i].size(); };
      over_elements(wave.size(), size, [&](size_t i, int64_t first, int64_t last) {
        const Piece& p = pieces[at + i];
        cpu::update().momentum(p.momentum + first, p.grad + first, wave[i].x + first, o.momentum, o.grad_scale, o.nesterov, last - first);
      });
      orthogonalise(c, wave);
      over_elements(wave.size(), size, [&](size_t i, int64_t first, int64_t last) {
        cpu::update().apply(pieces[at + i].weight + first, wave[i].x + first, o.lr * step(i), o.lr * o.weight_decay, last - first);
      });
    }
    at = end;
  }
}

}  // namespace k3

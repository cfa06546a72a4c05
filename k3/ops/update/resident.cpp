#include "k3/ops/update/resident.h"

#include <algorithm>
#include <cmath>

#include "k3/core/error.h"
#include "k3/core/gpu.h"
#include "k3/ops/linear/blas_cuda.h"
#include "k3/ops/update/resident_cuda.h"

namespace k3 {

namespace {

constexpr int kSteps = 5;
constexpr float kA = 3.4445f, kB = -4.7750f, kC = 2.0315f;

static_assert(kGradPart == cuda::kUpdateBlock);

int64_t eights(int64_t n) { return (n + 7) / 8 * 8; }

}  // namespace

struct ResidentUpdate::Lists {
  const float* const* grads;
  const uint8_t* const* touched;
  const int64_t* sizes;
  const int32_t *norm_begins, *adamw_begins, *tile_begins;
  const int64_t* x_begins;
  const cuda::AdamwTensor* adamw = nullptr;  // with the decay of `decay`
  const cuda::MuonBlock* blocks;
  int64_t norm_blocks = 0, adamw_blocks = 0, tiles = 0, matrices = 0, elements = 0, squares = 0;
  bool padded = false;
  float decay = 0;
  cuda::StepGate* gate;
  std::vector<cuda::LateRows> late;
};

template <class T>
const T* ResidentUpdate::keep(const std::vector<T>& list) {
  Buffer& b = lists_.emplace_back(std::max<size_t>(1, list.size() * sizeof(T)), Device::cuda);
  if (!list.empty()) gpu::upload(b.data(), list.data(), list.size() * sizeof(T));
  return reinterpret_cast<const T*>(b.data());
}

ResidentUpdate::ResidentUpdate(std::vector<Param*> all, std::vector<AdamW> adamw, std::vector<Muon> muon)
    : all_(std::move(all)), adamw_(std::move(adamw)), muon_(std::move(muon)), at_(std::make_shared<Lists>()) {
  Lists& l = *at_;
  std::vector<const float*> grads;
  std::vector<const uint8_t*> touched;
  std::vector<int64_t> sizes;
  std::vector<int32_t> begins{0};
  for (const Param* p : all_) {
    touched.push_back(p->touched.empty() ? nullptr : p->touched.as<uint8_t>());
    grads.push_back(p->grad.f32()), sizes.push_back(p->grad.size());
    begins.push_back(begins.back() + int32_t(cuda::update_blocks(p->grad.size())));
  }
  l.grads = keep(grads), l.touched = keep(touched), l.sizes = keep(sizes), l.norm_begins = keep(begins), l.norm_blocks = begins.back();

  l.gate = reinterpret_cast<cuda::StepGate*>(lists_.emplace_back(sizeof(cuda::StepGate), Device::cuda).data());
  auto is_late = [](const AdamW& a) {
    return !a.param->touched.empty() && a.param->narrow.empty() && a.param->value.rank() == 2 && a.param->value.cols() % 4 == 0;
  };
  auto place = std::stable_partition(adamw_.begin(), adamw_.end(), [&](const AdamW& a) { return !is_late(a); });
  late_.assign(place, adamw_.end()), adamw_.erase(place, adamw_.end());
  for (size_t i = 0; i < late_.size(); ++i) {
    Param& p = *late_[i].param;
    const int64_t rows = p.value.rows();
    cuda::LateRows r{p.value.f32(), late_[i].m.f32(), late_[i].v.f32(), p.grad.f32(), p.touched.as<uint8_t>(), rows, p.value.cols()};
    r.done = reinterpret_cast<int32_t*>(lists_.emplace_back(size_t(rows) * 4, Device::cuda).data());
    r.state = reinterpret_cast<cuda::LateState*>(lists_.emplace_back(sizeof(cuda::LateState), Device::cuda).data());
    r.gate = l.gate;
    l.late.push_back(r);
    p.catch_up = [lists = at_.get(), i]([[maybe_unused]] const int32_t* ids, [[maybe_unused]] int64_t count) {
      if constexpr (gpu::kBuilt) gpu::check(cuda::late_catch_up(lists->late[i], ids, count, gpu::stream()));
    };
  }

  begins = {0};
  for (const AdamW& a : adamw_) begins.push_back(begins.back() + int32_t(cuda::update_blocks(a.m.size())));
  l.adamw_begins = keep(begins), l.adamw_blocks = begins.back();

  // Matrices of one shape next to each other, so that one batched product serves them.
  struct Piece {
    cuda::MuonBlock b;
    int64_t m, n;
  };
  std::vector<Piece> pieces;
  for (const Muon& p : muon_) {
    const int64_t rows = p.param->value.rows() / p.blocks, cols = p.param->value.cols();
    for (int64_t i = 0; i < p.blocks; ++i) {
      const int64_t at = i * rows * cols;
      void* copy = p.param->narrow.empty() ? nullptr : p.param->narrow.as<bf16>() + at;
      const int64_t m = eights(std::min(rows, cols)), n = eights(std::max(rows, cols));
      pieces.push_back({{p.param->value.f32() + at, p.param->grad.f32() + at, p.momentum.f32() + at, copy, 0, int32_t(rows), int32_t(cols),
                         int32_t(n), 0.2f * std::sqrt(float(std::max(rows, cols)))},
                        m,
                        n});
      l.padded |= m * n != rows * cols;
    }
  }
  std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return std::pair(a.m, a.n) < std::pair(b.m, b.n); });
  std::vector<cuda::MuonBlock> blocks;
  std::vector<int64_t> x_begins{0};
  begins = {0};
  for (Piece& p : pieces) {
    if (groups_.empty() || groups_.back().m != p.m || groups_.back().n != p.n) groups_.push_back({p.m, p.n, 0, x_begins.back(), l.squares});
    ++groups_.back().count, l.squares += p.m * p.m;
    p.b.x = x_begins.back();
    blocks.push_back(p.b);
    x_begins.push_back(x_begins.back() + p.m * p.n);
    auto tiles = [](int64_t n) { return (n + cuda::kMuonTile - 1) / cuda::kMuonTile; };
    begins.push_back(begins.back() + int32_t(tiles(p.b.rows) * tiles(p.b.cols)));
  }
  l.blocks = keep(blocks), l.x_begins = keep(x_begins), l.tile_begins = keep(begins);
  l.tiles = begins.back(), l.matrices = int64_t(blocks.size()), l.elements = x_begins.back();
}

ResidentUpdate::~ResidentUpdate() {
  for (const AdamW& a : late_) {
    try {
      a.param->catch_up(nullptr, a.param->value.rows());
    } catch (const Error&) {  // the GPU is lost, and what it held with it
    }
    a.param->catch_up = nullptr;
  }
}

// Five steps leave the result in y. Z = b S + c S S without a I: that comes with X, which is C of the last product.
void ResidentUpdate::orthogonalise([[maybe_unused]] void* xs, [[maybe_unused]] void* ys, [[maybe_unused]] void* squares,
                                   [[maybe_unused]] void* polynomials, [[maybe_unused]] gpu::Branches& side) const {
  if constexpr (gpu::kBuilt) {
    auto run = [&](const Group& g) {
      auto *from = static_cast<bf16*>(xs) + g.at, *to = static_cast<bf16*>(ys) + g.at;
      auto *s = static_cast<bf16*>(squares) + g.square_at, *z = static_cast<bf16*>(polynomials) + g.square_at;
      const int64_t m = g.m, n = g.n;
      for (int i = 0; i < kSteps; ++i) {
        const Product gram{m, m, n, nullptr, n, false, nullptr, n, true, nullptr, m, false};
        const Product square{m, m, m, nullptr, m, false, nullptr, m, false, nullptr, m, false};
        const Product apply{m, n, m, nullptr, m, false, nullptr, n, false, nullptr, n, false};
        gpu::check(cuda::blas_products({gram, from, from, s, s, true, 1, 0, g.count, m * n, m * n, m * m, true}, gpu::stream()));
        gpu::check(cuda::blas_products({square, s, s, s, z, true, kC, kB, g.count, m * m, m * m, m * m, true}, gpu::stream()));
        gpu::check(cuda::blas_products({apply, z, from, from, to, true, 1, kA, g.count, m * m, m * n, m * n, true}, gpu::stream()));
        std::swap(from, to);
      }
    };
    for (size_t i = 0; i < groups_.size(); ++i) side.run(int(i) % gpu::Branches::kMost, [&] { run(groups_[i]); });
  }
}

void ResidentUpdate::step(Context& c, const AdamWOptions& a, const MuonOptions& o, double clip, std::function<void(const GradientNorm&)> done) {
  if constexpr (gpu::kBuilt) {
    Lists& l = *at_;
    Scratch scratch(*c.arena);
    Tensor sums = scratch.lend(DType::f64, {int64_t(all_.size())}), partial = scratch.lend(DType::f64, {l.norm_blocks});
    set(a.lr, o.lr, a.step);
    const float* rates = c.fed<float>(scratch, 4, [this, beta1 = a.beta1, beta2 = a.beta2](float* to) {
      auto correct = [&](float beta) { return float(1 / (1 - std::pow(double(beta), double(step_)))); };
      to[0] = adamw_lr_, to[1] = muon_lr_, to[2] = correct(beta1), to[3] = correct(beta2);
    });
    gpu::check(cuda::gradient_norm({l.grads, l.touched, l.sizes, l.norm_begins, int64_t(all_.size()), l.norm_blocks, partial.as<double>(),
                                    sums.as<double>(), clip, reinterpret_cast<const cuda::StepRates*>(rates), l.gate},
                                   gpu::stream()));
    c.read(sums, [this, done = std::move(done)](const void* p) {
      GradientNorm g;
      double total = 0;
      for (size_t i = 0; i < all_.size(); ++i) {
        const double s = static_cast<const double*>(p)[i];
        if (!std::isfinite(s) && g.bad.empty()) g.bad = all_[i]->name;
        total += s;
      }
      g.norm = std::sqrt(total);
      done(g);
    });
    if (c.later)  // the host need not wait for the updates
      c.later->seal(c.fed<uint64_t>(scratch, 1, [later = c.later](uint64_t* to) { *to = later->next_stamp(); }));
    if (!l.adamw || l.decay != a.weight_decay) {
      std::vector<cuda::AdamwTensor> list;
      for (const AdamW& t : adamw_)
        list.push_back({t.param->value.f32(), t.m.f32(), t.v.f32(), t.param->grad.f32(), t.param->narrow.empty() ? nullptr : t.param->narrow.data(),
                        t.param->touched.empty() ? nullptr : t.param->touched.as<uint8_t>(), t.m.size(), t.decay ? a.weight_decay : 0.f});
      l.adamw = keep(list), l.decay = a.weight_decay;
    }
    for (size_t i = 0; i < late_.size(); ++i) {
      cuda::LateRows& r = l.late[i];
      const float decay = late_[i].decay ? a.weight_decay : 0.f;
      if (r.decay != decay || r.beta1 != a.beta1 || r.beta2 != a.beta2 || r.eps != a.eps)  // what is behind is so by the old ones
        late_[i].param->catch_up(nullptr, r.rows), r.decay = decay, r.beta1 = a.beta1, r.beta2 = a.beta2, r.eps = a.eps;
      gpu::check(cuda::late_update(r, gpu::stream()));
    }
    if (!adamw_.empty())
      gpu::check(cuda::adamw({l.adamw, l.adamw_begins, int64_t(adamw_.size()), l.adamw_blocks, a.beta1, a.beta2, a.eps, l.gate}, gpu::stream()));
    if (muon_.empty()) return;
    if (!c.bf16_products) {
      std::vector<MuonMatrix> list;
      for (const Muon& m : muon_) list.push_back({m.param->value, m.param->grad, m.momentum, m.blocks});
      MuonOptions with_gate = o;
      with_gate.gate = l.gate;
      return muon_step(c, list, with_gate);
    }
    Tensor x = scratch.lend(DType::bf16, {l.elements}), y = scratch.lend(DType::bf16, {l.elements});
    Tensor s = scratch.lend(DType::bf16, {l.squares}), z = scratch.lend(DType::bf16, {l.squares});
    Tensor parts = scratch.lend(DType::f64, {l.tiles}), factors = scratch.lend(DType::f32, {l.matrices});
    if (l.padded) gpu::clear(x.data(), x.bytes());
    cuda::MuonListArgs m{l.blocks,      l.tile_begins, l.matrices, l.tiles,        l.elements, x.data(), parts.as<double>(),
                         factors.f32(), l.x_begins,    o.momentum, o.weight_decay, o.nesterov, l.gate};
    gpu::check(cuda::muon_ahead(m, gpu::stream()));
    {
      gpu::Branches shapes;
      orthogonalise(x.data(), y.data(), s.data(), z.data(), shapes);
    }
    m.x = y.data();
    gpu::check(cuda::muon_apply(m, gpu::stream()));
  }
}

}  // namespace k3

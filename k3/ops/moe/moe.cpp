#include "k3/ops/moe/moe.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "k3/core/error.h"
#include "k3/core/listed.h"
#include "k3/core/threads.h"
#include "k3/ops/activation/activation_kernels.h"
#include "k3/ops/activation/elementwise_cuda.h"
#include "k3/ops/linear/linear.h"
#include "k3/ops/linear/weight_product.h"
#include "k3/ops/moe/experts_narrow_cuda.h"
#include "k3/ops/moe/moe_float_cuda.h"
#include "k3/ops/moe/moe_kernels.h"
#include "k3/ops/moe/widen_cuda.h"
#include "k3/tape/tape.h"

namespace k3 {

namespace {

void check_forced(const Tensor& forced, const Batch& batch, int64_t n, int64_t k, int64_t experts) {
  K3_CHECK(forced.dtype() == DType::i32 && forced.shape() == (Shape{n, k}), "[route] forced choices must be I32 ({} x {}), not {} ({})", n, k,
           name_of(forced.dtype()), to_string(forced.shape()));
  if (forced.device() != Device::cpu) return;
  for (int64_t i = 0; i < n; ++i) {
    if (!batch.padding.empty() && batch.padding[i]) continue;
    const int32_t* row = forced.i32() + i * k;
    for (int64_t a = 0; a < k; ++a) {
      K3_CHECK(0 <= row[a] && row[a] < experts, "[route] forced choice {} of token {} is {}; there are {} experts", a, i, row[a], experts);
      for (int64_t b = 0; b < a; ++b) K3_CHECK(row[a] != row[b], "[route] token {} is forced to expert {} twice", i, row[a]);
    }
  }
}

}  // namespace

Routing route(Var x, Param& gate, Param& bias, const RouteOptions& o, const Batch& batch, const Tensor* forced) {
  Context& c = x.context();
  int64_t n = x.rows(), e = gate.value.rows(), k = o.top_k;
  K3_CHECK(bias.value.size() == e, "[route] {} has {} values but {} has {} experts", bias.name, bias.value.size(), gate.name, e);
  K3_CHECK(o.groups >= 1 && o.groups <= cpu::kMaxGroups && e % o.groups == 0, "[route] {} experts don't divide into {} groups (num_expert_group)", e,
           o.groups);
  K3_CHECK(o.top_groups >= 1 && o.top_groups <= o.groups, "[route] topk_group is {} of {} groups", o.top_groups, o.groups);
  K3_CHECK(k >= 1 && k <= cpu::kMaxTopK && k <= e / o.groups * o.top_groups, "[route] top k is {} of {} experts to choose from (at most {})", k,
           e / o.groups * o.top_groups, cpu::kMaxTopK);
  K3_CHECK(batch.padding.empty() || int64_t(batch.padding.size()) == n, "[route] padding marks {} rows but x has {}", batch.padding.size(), n);
  if (forced) check_forced(*forced, batch, n, k, e);

  struct Exact {  // the choice is made in float32 always: rounded logits would flip near ties
    Context& c;
    bool before = std::exchange(c.bf16_products, false);
    ~Exact() { c.bf16_products = before; }
  };
  Var logits = (Exact{c}, linear(x, gate));
  Routing r;
  r.weights = Var(c, DType::f32, {n, k});
  r.experts = c.arena->lend(DType::i32, {n, k});
  r.scores = c.arena->lend(DType::f32, {n, e});
  r.cutoff = c.arena->lend(DType::f32, {n});
  r.margin = c.arena->lend(DType::f32, {n});
  const uint8_t* padding = nullptr;  // a copy: the backward may run when the Batch is gone
  if (!batch.padding.empty() && c.device == Device::cuda) {
    padding = listed(c.device, *c.arena, batch.padding);
  } else if (!batch.padding.empty()) {
    Tensor copy = c.arena->lend(DType::u8, {n});
    write(copy, batch.padding.data());
    padding = copy.as<uint8_t>();
  }
  cpu::RouteArgs a{};
  a.logits = logits.f32(), a.bias = bias.value.f32(), a.padding = batch.step ? batch.step->padding : padding;
  Tensor choices = forced ? *forced : Tensor();
  if (forced && c.device == Device::cuda && forced->device() == Device::cpu) {
    choices = c.arena->lend(DType::i32, {n, k});
    write(choices, forced->data());
  }
  a.forced = forced ? choices.i32() : nullptr;
  a.rows = n, a.experts = e, a.top_k = k, a.groups = o.groups, a.top_groups = o.top_groups;
  a.softmax = o.softmax, a.renormalize = o.renormalize && k > 1, a.scale = o.scale;
  a.scores = r.scores.f32(), a.chosen = r.experts.i32(), a.weights = r.weights.f32(), a.cutoff = r.cutoff.f32(), a.margin = r.margin.f32();
  if (c.device == Device::cpu) cpu::moe().route_forward(a);
  if constexpr (gpu::kBuilt) {
    if (c.device == Device::cuda) gpu::check(cuda::route_forward(a, gpu::stream()));
  }
  c.cost("route", {.flops = 8.0 * double(n * e), .bytes = 8.0 * double(n * e)});
  on_backward(r.weights, [=, &c, weights = r.weights] {
    cpu::RouteArgs b = a;
    b.dweights = weights.grad().f32(), b.dlogits = logits.grad().f32();
    if (c.device == Device::cpu) cpu::moe().route_backward(b);
    if constexpr (gpu::kBuilt) {
      if (c.device == Device::cuda) gpu::check(cuda::route_backward(b, gpu::stream()));
    }
    c.cost("route", {.flops = 8.0 * double(n * k), .bytes = 8.0 * double(n * (o.softmax ? e : k))});
  });
  return r;
}

namespace {

// Pairs (token, slot) in the order expert, token. Lent for n * k pairs; the rows in use are fewer when there is padding. On a GPU the offsets
// stay there and `pairs` is n * k: kernels look for themselves how many rows there are.
struct Dispatch {
  Tensor pair_of_row, row_of_pair;  // i32
  Tensor offsets;                   // (E + 1) i64: expert e has rows offsets[e] .. offsets[e+1]-1
  int64_t pairs = 0;
  int64_t begin(int64_t e) const { return offsets.as<int64_t>()[e]; }
  int64_t rows(int64_t e) const { return begin(e + 1) - begin(e); }
};

template <class Lender>
Dispatch dispatch_of(Lender& lender, const Tensor& experts, int64_t e) {
  Dispatch d;
  d.pair_of_row = lender.lend(DType::i32, {experts.size()});
  d.row_of_pair = lender.lend(DType::i32, {experts.size()});
  d.offsets = lender.lend_zeroed(DType::i64, {e + 1});
  if (experts.device() != Device::cpu) {
    d.pairs = experts.size();
    if constexpr (gpu::kBuilt) {
      if (experts.device() == Device::cuda) {
        int32_t* counts = lender.lend(DType::i32, {cuda::dispatch_counts(d.pairs, e)}).i32();
        gpu::check(cuda::dispatch_order({experts.i32(), d.pairs, e, counts, d.offsets.as<int64_t>(), d.pair_of_row.i32(), d.row_of_pair.i32()},
                                        gpu::stream()));
      }
    }
    return d;
  }
  const int32_t* chosen = experts.i32();
  int64_t* at = d.offsets.as<int64_t>();
  for (int64_t i = 0; i < experts.size(); ++i)
    if (chosen[i] >= 0) ++at[chosen[i] + 1];
  for (int64_t j = 0; j < e; ++j) at[j + 1] += at[j];
  d.pairs = at[e];
  for (int64_t i = 0; i < experts.size(); ++i) {  // at[j] runs to the end of expert j's rows, which is where j+1's begin
    int32_t row = chosen[i] >= 0 ? int32_t(at[chosen[i]]++) : -1;
    d.row_of_pair.i32()[i] = row;
    if (row >= 0) d.pair_of_row.i32()[row] = int32_t(i);
  }
  for (int64_t j = e; j > 0; --j) at[j] = at[j - 1];
  at[0] = 0;
  return d;
}

void check_weights(const ExpertWeights& w, int64_t experts, int64_t l, bool training) {
  int64_t count = int64_t(w.gate.size());
  K3_CHECK(count == experts && int64_t(w.up.size()) == count && int64_t(w.down.size()) == count,
           "[experts] the router knows {} experts but there are {} w1, {} w3 and {} w2", experts, count, w.up.size(), w.down.size());
  int64_t m = w.gate[0]->value.rows();
  for (int64_t e = 0; e < count; ++e)
    for (const Param* p : {w.gate[e], w.up[e], w.down[e]}) {
      Shape want = p == w.down[e] ? Shape{l, m} : Shape{m, l};
      K3_CHECK(weight_shape(*p) == want, "[experts] {} is {} but must be {}: z has {} columns", p->name, to_string(weight_shape(*p)), to_string(want),
               l);
      const bool is_narrow = weight_of(*p).stored != Stored::f32;
      K3_CHECK(!(is_narrow && training), "[experts] {} is {}; experts are F32 or, in inference, BF16 or MXFP4", p->name, name_of(p->value.dtype()));
    }
}

bool has_codes(const ExpertWeights& w) {
  for (const std::vector<Param*>* list : {&w.gate, &w.up, &w.down})
    for (const Param* p : *list)
      if (is_codes(weight_of(*p).stored)) return true;
  return false;
}

// The products of all experts with one of their matrices, on the GPU.
struct ProductsOnGpu {
  const Dispatch& d;
  int64_t experts;
  const Context& c;
  Scratch& scratch;
  const ExpertWeights& w;

  cuda::GroupedArgs args(cuda::Grouped kind, const std::vector<Param*>& params, bool gradients) const {
    const int which = &params == &w.gate ? 0 : &params == &w.up ? 1 : 2;
    std::vector<void*> at;
    std::vector<uint8_t> narrow;
    const Shape shape = weight_shape(*params[0]);
    const bool codes = !gradients && !params[0]->scale.empty();
    const bf16* wide = codes ? widened(params, which, shape).as<bf16>() : nullptr;
    for (const Param* p : params) {
      at.push_back(gradients ? p->grad.data() : codes ? const_cast<bf16*>(wide + int64_t(at.size()) * shape.size()) : p->value.data());
      narrow.push_back(codes || (!gradients && p->value.dtype() == DType::bf16));
    }
    cuda::GroupedArgs a{};
    a.kind = kind, a.offsets = d.offsets.as<int64_t>(), a.experts = experts, a.most_rows = d.pairs;
    a.weights = (gradients ? w.on_device->gradients : w.on_device->values)[which].of(c.device, at);
    if (!gradients) a.bf16 = w.on_device->narrow[which].of(c.device, narrow);
    a.narrow = c.bf16_products;
    a.out = shape[0], a.in = shape[1];
    a.list = reinterpret_cast<cuda::ListedProduct*>(scratch.lend(DType::u8, {experts * int64_t(sizeof(cuda::ListedProduct))}).data());
    a.tile_begins = scratch.lend(DType::i32, {experts + 1}).i32();
    return a;
  }
  // MXFP4 codes as bfloat16, for as long as the scratch is lent.
  Tensor widened(const std::vector<Param*>& params, int which, Shape shape) const {
    std::vector<const void*> codes, scales;
    for (const Param* p : params) codes.push_back(p->value.data()), scales.push_back(p->scale.data());
    Tensor to = scratch.lend(DType::bf16, {experts, shape[0], shape[1]});
    if constexpr (gpu::kBuilt)
      gpu::check(cuda::widen_experts(
          {w.on_device->codes[which].of(c.device, codes), w.on_device->scales[which].of(c.device, scales), experts, shape[0], shape[1], to.data()},
          gpu::stream()));
    return to;
  }
  void run(const cuda::GroupedArgs& a) const {
    if constexpr (gpu::kBuilt) gpu::check(cuda::grouped_products(a, gpu::stream()));
  }
  void forward(const std::vector<Param*>& w, const Tensor& x, const Tensor& y) const {
    auto a = args(cuda::Grouped::forward, w, false);
    a.x = x.f32(), a.y = y.f32();
    run(a);
  }
  void input(const std::vector<Param*>& w, const Tensor& dy, const Tensor& dx, bool accumulate) const {
    auto a = args(cuda::Grouped::input, w, false);
    a.x = dy.f32(), a.y = dx.f32(), a.accumulate = accumulate;
    run(a);
  }
  void weight_gradient(const std::vector<Param*>& w, const Tensor& dy, const Tensor& x) const {
    auto a = args(cuda::Grouped::weight_gradient, w, true);
    a.x = dy.f32(), a.z = x.f32();
    run(a);
  }
};

// On the GPU where weights are bfloat16, or kept so (Param::narrow), or MXFP4 without a tape: operands of all products are so in memory.
class NarrowExperts {
 public:
  static bool serve(const Context& c, const ExpertWeights& w, int64_t l, int64_t m) {
    if (c.device != Device::cuda || !c.bf16_products || l % 8 || m % 8) return false;
    const bool codes = is_codes(*w.gate[0]);
    for (const std::vector<Param*>* kind : {&w.gate, &w.up, &w.down})
      for (const Param* p : *kind) {
        if (is_codes(*p) != codes) return false;
        if (codes ? c.tape || weight_of(*p).stored != Stored::mxfp4 : narrow(*p).empty() || (c.tape && p->grad.empty())) return false;
      }
    return true;
  }
  template <class Lender>  // the arena when there is a tape
  NarrowExperts(Context& c, Lender& lender, const ExpertWeights& w, const Dispatch& d, int64_t experts, int64_t slots, int64_t l, int64_t m)
      : d_(d), e_(experts), slots_(slots), l_(l), m_(m), codes_(is_codes(*w.gate[0])) {
    std::vector<void*> at;
    for (const std::vector<Param*>* kind : {&w.gate, &w.up, &w.down})
      for (const Param* p : *kind) at.push_back(codes_ ? p->value.data() : narrow(*p).data());
    for (const std::vector<Param*>* kind : {&w.gate, &w.up, &w.down})
      for (const Param* p : *kind)
        if (codes_ || c.tape) at.push_back(codes_ ? p->scale.data() : p->grad.data());
    weights_ = listed(c.device, lender, at);
    tiles_ = lender.lend(DType::i32, {e_ + 1});
    rows_ = lender.lend(DType::bf16, {d.pairs, l});
  }
  // rows (pairs, l): each pair's result;  a, b (pairs, m): W1 z and W3 z
  void forward([[maybe_unused]] Context& c, [[maybe_unused]] const Var& z, [[maybe_unused]] const Activation& f, [[maybe_unused]] const Tensor& a,
               [[maybe_unused]] const Tensor& b, [[maybe_unused]] const Tensor& rows) const {
    if constexpr (gpu::kBuilt) {
      Scratch scratch(*c.arena);
      Tensor h = scratch.lend(DType::bf16, {d_.pairs, m_});
      gpu::check(cuda::expert_tiles(groups(), tiles_.i32(), gpu::stream()));
      gather(z.f32(), z.narrow().empty() ? nullptr : z.narrow().data(), rows_);
      const cuda::ExpertProduct both[2] = {{rows_.data(), nullptr, kind(0), a.f32(), scales(0)},
                                           {rows_.data(), nullptr, kind(1), b.f32(), scales(1)}};
      gpu::check(cuda::expert_forward(groups(), both, 2, m_, l_, gpu::stream()));
      gpu::check(cuda::glu_narrow({f, d_.pair_of_row.i32(), count(), d_.pairs, m_, a.f32(), b.f32(), h.data()}, gpu::stream()));
      const cuda::ExpertProduct down{h.data(), nullptr, kind(2), rows.f32(), scales(2)};
      gpu::check(cuda::expert_forward(groups(), &down, 1, l_, m_, gpu::stream()));
    }
  }
  // dzs (pairs, l)
  void backward([[maybe_unused]] Context& c, [[maybe_unused]] const Tensor& du, [[maybe_unused]] const Activation& f,
                [[maybe_unused]] const Tensor& a, [[maybe_unused]] const Tensor& b, [[maybe_unused]] const Var& p,
                [[maybe_unused]] const Tensor& dzs) const {
    if constexpr (gpu::kBuilt) {
      Scratch scratch(*c.arena);
      Tensor dus = scratch.lend(DType::bf16, {d_.pairs, l_}), e = scratch.lend(DType::f32, {d_.pairs, m_});
      Tensor h = scratch.lend(DType::bf16, {d_.pairs, m_}), da = scratch.lend(DType::bf16, {d_.pairs, m_}),
             db = scratch.lend(DType::bf16, {d_.pairs, m_});
      gather(du.f32(), nullptr, dus);
      const cuda::ExpertProduct down{dus.data(), nullptr, kind(2), e.f32()};
      gpu::check(cuda::expert_input(groups(), &down, 1, l_, m_, gpu::stream()));
      gpu::check(cuda::glu_narrow_backward(
          {f, d_.pair_of_row.i32(), count(), d_.pairs, m_, a.f32(), b.f32(), h.data(), e.f32(), p.f32(), p.grad().f32(), da.data(), db.data()},
          gpu::stream()));
      const cuda::ExpertProduct all[3] = {
          {da.data(), rows_.data(), kind(3), nullptr}, {db.data(), rows_.data(), kind(4), nullptr}, {dus.data(), h.data(), kind(5), nullptr}};
      const cuda::ExpertSizes sizes[3] = {{m_, l_}, {m_, l_}, {l_, m_}};
      gpu::check(cuda::expert_weight_gradients(groups(), all, sizes, 3, gpu::stream()));
      const cuda::ExpertProduct both[2] = {{da.data(), nullptr, kind(0), dzs.f32()}, {db.data(), nullptr, kind(1), nullptr}};
      gpu::check(cuda::expert_input(groups(), both, 2, m_, l_, gpu::stream()));
    }
  }

 private:
  static bool is_codes(const Param& p) { return !p.scale.empty(); }
  static const Tensor& narrow(const Param& p) { return p.value.dtype() == DType::bf16 ? p.value : p.narrow; }
  cuda::ExpertsNarrow groups() const { return {d_.offsets.as<int64_t>(), tiles_.i32(), e_, d_.pairs}; }
  const int64_t* count() const { return d_.offsets.as<int64_t>() + e_; }
  const void* const* kind(int64_t i) const { return weights_ + i * e_; }  // gate, up, down; then their gradients, or scales
  const void* const* scales(int64_t i) const { return codes_ ? kind(3 + i) : nullptr; }
  void gather([[maybe_unused]] const float* from, [[maybe_unused]] const void* from_bf16, [[maybe_unused]] const Tensor& to) const {
    if constexpr (gpu::kBuilt)
      gpu::check(cuda::gather_narrow({d_.pair_of_row.i32(), count(), d_.pairs, slots_, l_, from, from_bf16, to.data()}, gpu::stream()));
  }

  Dispatch d_;
  int64_t e_, slots_, l_, m_;
  void* const* weights_;
  bool codes_;
  Tensor tiles_, rows_;  // rows_: z of each pair, bfloat16
};

}  // namespace

Var experts(Var z, const Routing& routing, const ExpertWeights& w, const Activation& activation) {
  Context& c = z.context();
  const int64_t n = z.rows(), l = z.cols(), k = routing.experts.cols(), e = routing.scores.cols();
  K3_CHECK(routing.experts.rows() == n, "[experts] z has {} rows but {} were routed", n, routing.experts.rows());
  check_weights(w, e, l, c.tape != nullptr);
  const int64_t m = weight_shape(*w.gate[0])[0];
  const bool on_cpu = c.device == Device::cpu;

  Var u(c, DType::f32, {n, l});
  // The backward needs a = W1 z and c = W3 z of every pair; h follows from them, z and du are gathered again.
  Tensor a, b;
  if (c.tape) a = c.arena->lend(DType::f32, {n * k, m}), b = c.arena->lend(DType::f32, {n * k, m});
  Dispatch d;
  if (c.tape) d = dispatch_of(*c.arena, routing.experts, e);
  std::shared_ptr<const NarrowExperts> narrow;
  const bool is_narrow = NarrowExperts::serve(c, w, l, m);
  K3_CHECK(c.device != Device::cuda || is_narrow || !has_codes(w), "[experts] on the GPU experts in MXFP4 need products in bfloat16: give --bf16");
  if (is_narrow && c.tape) narrow = std::make_shared<const NarrowExperts>(c, *c.arena, w, d, e, k, l, m);

  double weight_bytes = 0;
  for (int64_t j = 0; j < std::min(e, n * k); ++j)
    for (const Param* p : {w.gate[j], w.up[j], w.down[j]}) weight_bytes += stored_bytes(*p);
  double flops = 6.0 * double(n * k) * double(l) * double(m), moved = 4.0 * double(n * k) * double(4 * l + 6 * m);
  {
    Scratch scratch(*c.arena);
    if (!c.tape) a = scratch.lend(DType::f32, {n * k, m}), b = scratch.lend(DType::f32, {n * k, m}), d = dispatch_of(scratch, routing.experts, e);
    if (is_narrow && !c.tape) narrow = std::make_shared<const NarrowExperts>(c, scratch, w, d, e, k, l, m);
    Tensor rows = scratch.lend(DType::f32, {n * k, l}), h = c.tape ? scratch.lend(DType::f32, {n * k, m}) : a;  // h may take a's place
    Tensor room = has_codes(w) ? scratch.lend(DType::u8, {room_bytes(n * k, std::max(l, m))}) : Tensor();
    if (on_cpu) {
      cpu::DispatchArgs move{d.pair_of_row.i32(), d.row_of_pair.i32(), n, k, d.pairs, l, z.f32(), nullptr, rows.f32()};
      cpu::moe().gather(move);
      std::vector<int32_t> used;
      for (int64_t j = 0; j < e; ++j)
        if (d.rows(j)) used.push_back(int32_t(j));
      std::vector<WeightProduct> list;
      auto run = [&](std::span<const int32_t> some) {
        struct Rows {
          int64_t first, last;
        };
        std::vector<Rows> pieces;  // of 16 rows at most
        list.clear();
        for (int32_t j : some) {
          for (Param* p : {w.gate[size_t(j)], w.up[size_t(j)], w.down[size_t(j)]}) check_scales(*p);
          list.push_back({d.rows(j), rows.f32() + d.begin(j) * l, weight_of(*w.gate[size_t(j)]), a.f32() + d.begin(j) * m});
          list.push_back({d.rows(j), rows.f32() + d.begin(j) * l, weight_of(*w.up[size_t(j)]), b.f32() + d.begin(j) * m});
          for (int64_t at = d.begin(j), end = d.begin(j + 1); at < end;) {
            if (pieces.empty() || pieces.back().last != at || at - pieces.back().first == 16) pieces.push_back({at, at});
            at = pieces.back().last = std::min(end, pieces.back().first + 16);
          }
        }
        weight_products(list, room.data());
        parallel_for(int64_t(pieces.size()), [&](int64_t i) {
          const auto [first, last] = pieces[size_t(i)];
          cpu::GluArgs g{activation, (last - first) * m, a.f32() + first * m, b.f32() + first * m, h.f32() + first * m, nullptr, nullptr, nullptr};
          cpu::activation().glu_forward(g);
        });
        list.clear();
        for (int32_t j : some) list.push_back({d.rows(j), h.f32() + d.begin(j) * m, weight_of(*w.down[size_t(j)]), rows.f32() + d.begin(j) * l});
        weight_products(list, room.data());
      };
      if (w.source) {
        w.source->want(used);
        for (std::span<const int32_t> some; !(some = w.source->take()).empty();) run(some);
      } else {
        run(used);
      }
      move.from = rows.f32(), move.weights = routing.weights.f32(), move.to = u.f32();
      cpu::moe().combine(move);
    }
    if constexpr (gpu::kBuilt) {
      if (c.device == Device::cuda) {
        const ProductsOnGpu products{d, e, c, scratch, w};
        cpu::DispatchArgs move{d.pair_of_row.i32(), d.row_of_pair.i32(), n, k, d.pairs, l, z.f32(), nullptr, rows.f32()};
        if (narrow) {
          narrow->forward(c, z, activation, a, b, rows);
        } else {
          gpu::check(cuda::gather(move, d.offsets.as<int64_t>() + e, gpu::stream()));
          products.forward(w.gate, rows, a);
          products.forward(w.up, rows, b);
          gpu::check(cuda::glu_forward({activation, n * k * m, a.f32(), b.f32(), h.f32(), nullptr, nullptr, nullptr}, gpu::stream()));
          products.forward(w.down, h, rows);
        }
        move.from = rows.f32(), move.weights = routing.weights.f32(), move.to = u.f32();
        gpu::check(cuda::combine(move, false, gpu::stream()));
      }
    }
  }
  double held = weight_bytes;  // what is known only where there is data: how many experts the tokens share
  if (on_cpu) {
    held = 0;
    for (int64_t j = 0; j < e; ++j)
      if (d.rows(j))
        for (const Param* p : {w.gate[size_t(j)], w.up[size_t(j)], w.down[size_t(j)]}) held += stored_bytes(*p);
  }
  c.cost("experts", {.flops = flops, .bytes = weight_bytes + moved, .held = held});

  on_backward(u, [=, &c, p = routing.weights] {
    Tensor du = u.grad(), dz = z.grad(), dp = p.grad();
    Scratch scratch(*c.arena);
    if constexpr (gpu::kBuilt) {
      if (narrow) {
        c.cost("experts", {.flops = 2 * flops, .bytes = 3 * weight_bytes + 2 * moved});
        Tensor dzs = scratch.lend(DType::f32, {n * k, l});
        narrow->backward(c, du, activation, a, b, p, dzs);
        gpu::check(cuda::combine({d.pair_of_row.i32(), d.row_of_pair.i32(), n, k, d.pairs, l, dzs.f32(), nullptr, dz.f32()}, true, gpu::stream()));
        return;
      }
    }
    Tensor zs = scratch.lend(DType::f32, {n * k, l}), dus = scratch.lend(DType::f32, {n * k, l}), dzs = scratch.lend(DType::f32, {n * k, l});
    Tensor h = scratch.lend(DType::f32, {n * k, m}), dh = scratch.lend(DType::f32, {n * k, m});
    Tensor da = scratch.lend(DType::f32, {n * k, m}), db = scratch.lend(DType::f32, {n * k, m});
    c.cost("experts", {.flops = 2 * flops, .bytes = 3 * weight_bytes + 2 * moved});
    if constexpr (gpu::kBuilt) {
      if (c.device == Device::cuda) {
        const ProductsOnGpu products{d, e, c, scratch, w};
        const int64_t* rows = d.offsets.as<int64_t>() + e;
        cpu::DispatchArgs move{d.pair_of_row.i32(), d.row_of_pair.i32(), n, k, d.pairs, l, z.f32(), nullptr, zs.f32()};
        gpu::check(cuda::gather(move, rows, gpu::stream()));
        move.from = du.f32(), move.to = dus.f32();
        gpu::check(cuda::gather(move, rows, gpu::stream()));
        products.input(w.down, dus, dh, false);  // e = W2^T du
        const cpu::GluArgs g{activation, n * k * m, a.f32(), b.f32(), h.f32(), dh.f32(), da.f32(), db.f32()};
        gpu::check(cuda::glu_forward(g, gpu::stream()));
        gpu::check(cuda::weigh_pairs({d.pair_of_row.i32(), p.f32(), 0, d.pairs, m, dh.f32(), h.f32(), dp.f32()}, rows, gpu::stream()));
        gpu::clear(da.data(), da.bytes());
        gpu::clear(db.data(), db.bytes());
        gpu::check(cuda::glu_backward(g, gpu::stream()));
        products.weight_gradient(w.down, dus, h);
        products.weight_gradient(w.gate, da, zs);
        products.weight_gradient(w.up, db, zs);
        products.input(w.gate, da, dzs, false);
        products.input(w.up, db, dzs, true);
        move.from = dzs.f32(), move.to = dz.f32();
        gpu::check(cuda::combine(move, true, gpu::stream()));
      }
    }
    if (!on_cpu) return;
    cpu::DispatchArgs move{d.pair_of_row.i32(), d.row_of_pair.i32(), n, k, d.pairs, l, z.f32(), nullptr, zs.f32()};
    cpu::moe().gather(move);
    move.from = du.f32(), move.to = dus.f32();
    cpu::moe().gather(move);

    auto rows_of = [&](const Tensor& t, int64_t j) { return t.f32() + d.begin(j) * t.cols(); };
    std::vector<Product> list;  // e = W2^T du
    for (int64_t j = 0; j < e; ++j) list.push_back(dy_w(rows_of(dus, j), w.down[j]->value.f32(), rows_of(dh, j), d.rows(j), l, m, false));
    products(list);
    parallel_blocks(d.pairs, 16, [&](int64_t first, int64_t last) {
      int64_t at = first * m, size = (last - first) * m;
      cpu::GluArgs g{activation, size, a.f32() + at, b.f32() + at, h.f32() + at, dh.f32() + at, da.f32() + at, db.f32() + at};
      cpu::activation().glu_forward(g);
      cpu::moe().weigh_pairs({d.pair_of_row.i32(), p.f32(), first, last, m, dh.f32(), h.f32(), dp.f32()});
      std::memset(g.dgate, 0, size_t(size) * sizeof(float));
      std::memset(g.dup, 0, size_t(size) * sizeof(float));
      cpu::activation().glu_backward(g);
    });
    // dW2 += p du h^T, dW1 += da z^T, dW3 += dc z^T;  dz = W1^T da, then + W3^T dc
    list.clear();
    auto weight_gradient = [&](Param* param, const Tensor& dy, const Tensor& x, int64_t j) {
      if (!param->grad.empty() && d.rows(j)) list.push_back(dyt_x(rows_of(dy, j), rows_of(x, j), param->grad.f32(), d.rows(j), dy.cols(), x.cols()));
    };
    for (int64_t j = 0; j < e; ++j) {
      weight_gradient(w.down[j], dus, h, j);
      weight_gradient(w.gate[j], da, zs, j);
      list.push_back(dy_w(rows_of(da, j), w.gate[j]->value.f32(), rows_of(dzs, j), d.rows(j), m, l, false));
    }
    products(list);
    list.clear();
    for (int64_t j = 0; j < e; ++j) {
      weight_gradient(w.up[j], db, zs, j);
      list.push_back(dy_w(rows_of(db, j), w.up[j]->value.f32(), rows_of(dzs, j), d.rows(j), m, l, true));
    }
    products(list);
    move.from = dzs.f32(), move.to = dz.f32();
    cpu::moe().combine_add(move);
  });
  return u;
}

}  // namespace k3

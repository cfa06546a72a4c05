#include "k3/ops/delta_rule/gated_delta_rule.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "k3/core/error.h"
#include "k3/core/listed.h"
#include "k3/ops/activation/activation.h"
#include "k3/ops/decay/decay.h"
#include "k3/ops/delta_rule/delta_layer_cuda.h"
#include "k3/ops/delta_rule/delta_rule_cuda.h"
#include "k3/ops/delta_rule/delta_rule_kernels.h"
#include "k3/ops/norm/norm.h"
#include "k3/tape/tape.h"

namespace k3 {

static_assert(kChunkedTokens == cuda::kDeltaChunk);

Var log_decay(Var z, const DecayGate& gate, int64_t heads) {
  if (z.empty()) return {};
  return gate.lower_bound ? bounded_decay(z, *gate.A_log, *gate.dt_bias, heads, *gate.lower_bound)
                          : softplus_decay(z, *gate.A_log, *gate.dt_bias, heads);
}

namespace {

bool chunks_serve(const Context& c, const Var& z, const DecayGate& gate, const DeltaShape& shape, const Batch& batch) {
  constexpr int64_t kMost = 65535;  // blocks along a grid's second side
  if (!gpu::kBuilt || c.device != Device::cuda || !c.bf16_products || batch.step || batch.tokens() == 0) return false;
  if (shape.key_dim != cuda::kDeltaHead || shape.value_dim != cuda::kDeltaHead || z.empty() || z.cols() != shape.heads * cuda::kDeltaHead)
    return false;
  if (gate.lower_bound && *gate.lower_bound < -5) return false;
  const bool padded = std::find_if(batch.padding.begin(), batch.padding.end(), [](uint8_t p) { return p != 0; }) != batch.padding.end();
  return !padded && batch.sequences() <= kMost && batch.tokens() / cuda::kDeltaChunk + batch.sequences() <= kMost;
}

// One call of the chunk kernels; in training it lives on in the backward.
struct Chunked {
  Var q, k, v, z, b;
  DecayGate gate;
  DeltaShape shape;
  std::vector<int32_t> begins, chunks{0};
  cuda::DeltaChunkArgs a{};  // all but the lists

  Chunked(const Var& q, const Var& k, const Var& v, const Var& z, const Var& b, const DecayGate& gate, const DeltaShape& shape, const Batch& batch)
      : q(q), k(k), v(v), z(z), b(b), gate(gate), shape(shape), begins(batch.cu_seqlens.begin(), batch.cu_seqlens.end()) {
    for (int64_t s = 0; s < batch.sequences(); ++s)
      chunks.push_back(chunks.back() + int32_t((batch.length(s) + cuda::kDeltaChunk - 1) / cuda::kDeltaChunk));
    const int64_t H = shape.heads, width = H * cuda::kDeltaHead;
    a.q_stride = a.k_stride = a.v_stride = a.x_stride = a.o_stride = width, a.b_stride = H;
    a.gate = {gate.lower_bound.has_value(), gate.lower_bound.value_or(0), gate.A_log->value.f32(), gate.dt_bias->value.f32()};
    a.scale = shape.scale, a.sequences = int(batch.sequences()), a.heads = int(H), a.tokens = batch.tokens();
  }
  int64_t size() const { return a.tokens * a.q_stride; }

  // The inputs in bfloat16, from `lender` where they are not there yet.
  template <class Lender>
  void narrow_inputs(Lender& lender) {
    cuda::DeltaNarrow n{};
    int i = 0;
    for (auto [x, to] : {std::pair{&q, &a.q}, {&k, &a.k}, {&v, &a.v}, {&z, &a.x}, {&b, &a.b}}) {
      if (x->narrow().empty()) n.from[i] = x->f32(), n.to[i] = lender.lend(DType::bf16, x->value().shape()).data(), n.size[i] = x->size();
      *to = x->narrow().empty() ? n.to[i] : x->narrow().data();
      ++i;
    }
    if constexpr (gpu::kBuilt) gpu::check(cuda::delta_narrow(n, gpu::stream()));
  }
  void forward(Context& c, Scratch& s, const std::vector<int32_t>* slots, void* o) {
    cuda::DeltaChunkArgs now = a;
    if (const int64_t bytes = cuda::delta_ahead_bytes(a.heads, a.sequences)) now.ahead = s.lend(DType::u8, {bytes}).data();
    now.o = o, now.begins = listed(c.device, s, begins), now.slots = slots ? listed(c.device, s, *slots) : nullptr;
    if (a.snapshots) now.chunk_begins = listed(c.device, s, chunks);
    if constexpr (gpu::kBuilt) gpu::check(cuda::delta_chunk_forward(now, gpu::stream()));
  }
  void backward(Context& c, const Var& o) const {
    Scratch s(*c.arena);
    auto bf16s = [&](int64_t n) { return s.lend(DType::bf16, {n}).data(); };
    cuda::DeltaBackwardArgs w{};
    w.forward = a, w.forward.begins = listed(c.device, s, begins), w.forward.chunk_begins = listed(c.device, s, chunks), w.chunks = chunks.back();
    if (const int64_t bytes = cuda::delta_ahead_bytes(a.heads, a.sequences)) w.forward.ahead = s.lend(DType::u8, {bytes}).data();
    void* d_o = bf16s(size());
    w.d_o = d_o, w.dq = bf16s(size()), w.dk = bf16s(size()), w.dv = bf16s(size()), w.dx = bf16s(size()), w.db = bf16s(b.size());
    w.d_snapshots = bf16s(w.chunks * shape.heads * cuda::kDeltaHead * cuda::kDeltaHead);
    w.partial = s.lend(DType::f32, {cuda::delta_backward_partial(w.chunks, a.heads)}).f32();
    auto gradient = [&](const Param& p) { return p.grad.empty() ? s.lend_zeroed(DType::f32, {p.value.size()}).f32() : p.grad.f32(); };
    w.dA_log = gradient(*gate.A_log), w.ddt_bias = gradient(*gate.dt_bias);
    cuda::DeltaWiden back{};
    int i = 0;
    for (auto [x, from] : {std::pair{&q, w.dq}, {&k, w.dk}, {&v, w.dv}, {&z, w.dx}, {&b, w.db}}) {
      bool fresh = false;
      back.to[i] = x->grad(fresh).f32(), back.from[i] = from, back.size[i] = x->size(), back.add[i] = !fresh;
      ++i;
    }
    if constexpr (gpu::kBuilt) {
      gpu::check(cuda::delta_narrow({{o.grad().f32()}, {d_o}, {size()}}, gpu::stream()));
      gpu::check(cuda::delta_chunk_backward(w, gpu::stream()));
      gpu::check(cuda::delta_widen(back, gpu::stream()));
    }
  }
};

void check_inputs(const Var& q, const Var& k, const Var& v, const Var& z, const Var& b, const DecayGate& gate, const DeltaShape& s, int64_t N) {
  auto check = [&](const char* name, int64_t rows, int64_t cols, int64_t want) {
    K3_CHECK(rows == N && cols == want, "[delta_rule] {} is {} x {} but {} tokens of {} heads take {} x {}", name, rows, cols, N, s.heads, N, want);
  };
  check("q", q.rows(), q.cols(), s.heads * s.key_dim), check("k", k.rows(), k.cols(), s.heads * s.key_dim);
  check("v", v.rows(), v.cols(), s.heads * s.value_dim), check("b", b.rows(), b.cols(), s.heads), check("z", z.rows(), z.cols(), s.heads * s.key_dim);
  K3_CHECK(gate.A_log->value.size() >= s.heads && gate.dt_bias->value.size() == z.cols(),
           "[delta_rule] {} heads of {} but {} has {} values and {} {}", s.heads, s.key_dim, gate.A_log->name, gate.A_log->value.size(),
           gate.dt_bias->name, gate.dt_bias->value.size());
}

}  // namespace

Var gated_delta_rule(Var q, Var k, Var v, Var z, Var b, const DecayGate& gate, const DeltaShape& shape, const Batch& batch, DeltaState* state) {
  Context& c = q.context();
  auto in_turn = [&](const Batch& tokens) {
    Var beta = sigmoid(b);
    Var g = log_decay(z, gate, shape.heads);
    if (!g.empty() && !gate.record_as.empty()) c.record(gate.record_as, g.value());
    return delta_rule(l2_norm(q, shape.key_dim), l2_norm(k, shape.key_dim), v, g, beta, shape, tokens, state);
  };
  if (!chunks_serve(c, z, gate, shape, batch)) return in_turn(batch);
  const int64_t N = batch.tokens(), H = shape.heads, S = batch.sequences();
  check_inputs(q, k, v, z, b, gate, shape, N);

  // With a state the few tokens of a sequence go one by one, whatever the other sequences bring: those of the others do not exist in that call.
  std::vector<int32_t> slots;
  Batch few = batch;
  bool some_few = false;
  if (state) {
    K3_CHECK(!c.tape, "[delta_rule] a state under a tape: gradients end where a sequence begins, so train on whole sequences without a state");
    state->check(shape, batch);
    few.padding.assign(size_t(N), 0);
    for (int64_t s = 0; s < S; ++s) {
      const bool chunked = batch.length(s) >= kChunkedTokens;
      slots.push_back(chunked ? batch.slots[s] : -1), some_few |= !chunked && batch.length(s) > 0;
      if (chunked) std::fill(few.padding.begin() + batch.begin(s), few.padding.begin() + batch.begin(s + 1), uint8_t(1));
    }
    if (std::count(slots.begin(), slots.end(), -1) == S) return in_turn(batch);
  }
  Var o = some_few ? in_turn(few) : Var(c, DType::f32, {N, H * shape.value_dim});
  if (c.on_record && !some_few && !c.recomputing && !gate.record_as.empty()) {
    Scratch scratch(*c.arena);
    c.record(gate.record_as, with_tape(c, nullptr, [&] { return log_decay(z, gate, shape.heads); }).value());
  }
  auto call = std::make_shared<Chunked>(q, k, v, z, b, gate, shape, batch);
  if (c.tape) {
    call->narrow_inputs(*c.arena);
    call->a.snapshots = c.arena->lend(DType::bf16, {call->chunks.back(), H, cuda::kDeltaHead, cuda::kDeltaHead}).data();
    call->a.u = c.arena->lend(DType::bf16, {N, H * cuda::kDeltaHead}).data();
  }
  if (Scratch scratch(*c.arena); true) {
    if (!c.tape) call->narrow_inputs(scratch);
    if (state) {
      std::vector<int32_t> open, closed;
      for (int32_t slot : batch.slots) open.push_back(int32_t(state->open(slot))), closed.push_back(state->closed(slot));
      call->a.state_in = call->a.state_out = state->memories();
      call->a.slot_stride = state->bytes_per_slot() / int64_t(sizeof(float)), call->a.head_stride = call->a.slot_stride / H;
      if constexpr (gpu::kBuilt)
        gpu::check(cuda::delta_close({state->memories(), call->a.slot_stride, call->a.head_stride, H, cuda::kDeltaHead, cuda::kDeltaHead, S,
                                      listed(c.device, scratch, slots), listed(c.device, scratch, open), listed(c.device, scratch, closed)},
                                     gpu::stream()));
    }
    void* narrow = scratch.lend(DType::bf16, o.value().shape()).data();
    call->forward(c, scratch, state ? &slots : nullptr, narrow);
    for (int64_t s = 0; s < S;) {  // results of neighbouring sequences together
      int64_t end = s;
      while (end < S && (!state || slots[size_t(end)] >= 0)) ++end;
      const int64_t from = batch.begin(s) * o.cols(), size = (batch.begin(end) - batch.begin(s)) * o.cols();
      if constexpr (gpu::kBuilt)
        if (size) gpu::check(cuda::delta_widen({{static_cast<bf16*>(narrow) + from}, {o.f32() + from}, {size}, {}}, gpu::stream()));
      s = end + 1;
    }
  }
  for (int64_t s = 0; s < int64_t(slots.size()); ++s)
    if (slots[size_t(s)] >= 0) state->closed_with(slots[size_t(s)], batch.length(s));

  const double tokens = double(N) * double(H), KV = double(shape.key_dim * shape.value_dim), width = double(shape.key_dim + shape.value_dim);
  const double C = double(cuda::kDeltaChunk), memories = state ? double(H) * double(S) * KV : 0;
  c.cost("delta_rule", {.flops = tokens * (6 * KV + 5 * C * width), .bytes = 2 * tokens * (2.5 * width + 1) + 8 * memories, .held = 4 * memories});
  on_backward(o, [=, &c] {
    call->backward(c, o);
    c.cost("delta_rule", {.flops = tokens * (13.5 * KV + 10 * C * width), .bytes = 2 * tokens * (6 * width + 3) + 4 * tokens / C * KV});
  });
  return o;
}

}  // namespace k3

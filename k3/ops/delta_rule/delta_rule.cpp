#include "k3/ops/delta_rule/delta_rule.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "k3/core/error.h"
#include "k3/core/listed.h"
#include "k3/ops/delta_rule/delta_parallel_cuda.h"
#include "k3/ops/delta_rule/delta_rule_float_cuda.h"
#include "k3/ops/delta_rule/delta_rule_kernels.h"
#include "k3/ops/delta_rule/delta_step_lists_cuda.h"
#include "k3/tape/tape.h"

namespace k3 {

namespace {

constexpr char kLayout[] = "delta_rule: chunk 16, memory panels of 32, key, decay, write; f32";

// The tokens that exist, sequence by sequence.
struct Rows {
  std::vector<int32_t> first{0}, tokens, kept{0}, chunks{0};  // tokens: empty when all exist
  int64_t longest = 0;
  Rows(const Batch& batch) {
    bool some = std::find_if(batch.padding.begin(), batch.padding.end(), [](uint8_t p) { return p != 0; }) != batch.padding.end();
    for (int64_t s = 0; s < batch.sequences(); ++s) {
      if (some)
        for (int64_t i = batch.begin(s); i < batch.cu_seqlens[s + 1]; ++i)
          if (!batch.padding[i]) tokens.push_back(int32_t(i));
      first.push_back(int32_t(some ? int64_t(tokens.size()) : batch.cu_seqlens[s + 1]));
      kept.push_back(kept.back() + int32_t(cpu::delta_kept(length(s))));
      chunks.push_back(chunks.back() + int32_t((length(s) + cuda::kParallelChunk - 1) / cuda::kParallelChunk));
      longest = std::max(longest, length(s));
    }
    all_exist = !some;
  }
  bool all_exist = true;
  int64_t length(int64_t s) const { return first[s + 1] - first[s]; }
};

}  // namespace

DeltaState::DeltaState(const DeltaShape& shape, int64_t slots, Device device)
    : shape_(shape), memory_(size_t(slots) * size_t(bytes_per_slot(shape)), device), tokens_(size_t(slots), 0), open_(size_t(slots), 0) {}

int64_t DeltaState::bytes_per_slot(const DeltaShape& s) { return s.heads * cpu::delta_head_floats(s.key_dim, s.value_dim) * int64_t(sizeof(float)); }
Tensor DeltaState::whole(int64_t slot) const { return memory_.view(DType::f32, {bytes_per_slot() / 4}, size_t(slot * bytes_per_slot())); }
float* DeltaState::slot(int64_t i) const { return memory_.data() ? reinterpret_cast<float*>(memory_.data() + i * bytes_per_slot()) : nullptr; }

// The floats of a slot that mean something, as (offset, count): the memory if a chunk was closed, and the open rows.
template <class F>
void DeltaState::parts(int64_t tokens, int64_t open, F f) const {
  int64_t K = shape_.key_dim, V = shape_.value_dim, k = cpu::delta_k(K), v = cpu::delta_v(V), memory = cpu::delta_memory_floats(K, V);
  for (int64_t h = 0; h < shape_.heads; ++h) {
    int64_t at = h * cpu::delta_head_floats(K, V);
    if (tokens > open) f(at, memory);
    for (auto [offset, width] : {std::pair{memory, k}, {memory + cpu::kDeltaChunk * k, k}, {memory + 2 * cpu::kDeltaChunk * k, v}})
      f(at + offset, open * width);
  }
}

void DeltaState::copy(int64_t to, int64_t from) {
  if (to != from && memory_.device() == Device::cpu)
    parts(tokens_[from], open_[from], [&](int64_t at, int64_t n) { std::copy(slot(from) + at, slot(from) + at + n, slot(to) + at); });
  if (to != from && memory_.device() == Device::cuda) copy_values(whole(to), whole(from));
  tokens_[to] = tokens_[from], open_[to] = open_[from];
}

void DeltaState::count(int64_t slot) {
  ++tokens_[slot];
  open_[slot] = open_[slot] == cpu::kDeltaChunk ? 1 : open_[slot] + 1;
}

bool DeltaState::drop(int64_t slot, int64_t n) {
  if (n < 0 || n > open_[slot]) return false;
  tokens_[slot] -= n, open_[slot] -= n;
  return true;
}

void DeltaState::dense(int64_t slot, float* s) const {
  int64_t H = shape_.heads, K = shape_.key_dim, V = shape_.value_dim, k = cpu::delta_k(K), open = open_[slot];
  std::vector<float> memory(size_t(cpu::delta_memory_floats(K, V))), scratch(size_t(17 * k));
  const HostCopy all(whole(slot));
  for (int64_t h = 0; h < H; ++h) {
    const float* head = all.f32() + h * cpu::delta_head_floats(K, V);
    cpu::delta().memory_now(head, K, V, open, tokens_[slot] > open, memory.data(), scratch.data());
    for (int64_t i = 0; i < K; ++i)
      for (int64_t j = 0; j < V; ++j)
        s[(h * K + i) * V + j] = memory[j / cpu::kDeltaPanel * cpu::kDeltaPanel * k + i * cpu::kDeltaPanel + j % cpu::kDeltaPanel];
  }
}

void DeltaState::save(int64_t slot, Blob& to) const {
  to.put("delta_rule.layout", kLayout, sizeof kLayout);
  for (auto [name, value] : {std::pair{"delta_rule.heads", shape_.heads},
                             {"delta_rule.key_dim", shape_.key_dim},
                             {"delta_rule.value_dim", shape_.value_dim},
                             {"delta_rule.tokens", tokens_[slot]},
                             {"delta_rule.open", open_[slot]}})
    to.put_value(name, value);
  std::vector<float> used;
  used.reserve(1);  // an empty state too has an address
  const HostCopy all(whole(slot));
  parts(tokens_[slot], open_[slot], [&](int64_t at, int64_t n) { used.insert(used.end(), all.f32() + at, all.f32() + at + n); });
  to.put("delta_rule.state", used.data(), used.size() * sizeof(float));
}

void DeltaState::load(int64_t slot, Blob& from) {
  char layout[sizeof kLayout];
  from.get("delta_rule.layout", layout, sizeof layout);
  K3_CHECK(std::memcmp(layout, kLayout, sizeof layout) == 0, "[delta_rule] the saved state has another layout than \"{}\"", kLayout);
  int64_t heads = from.get_value<int64_t>("delta_rule.heads"), K = from.get_value<int64_t>("delta_rule.key_dim"),
          V = from.get_value<int64_t>("delta_rule.value_dim");
  K3_CHECK(heads == shape_.heads && K == shape_.key_dim && V == shape_.value_dim,
           "[delta_rule] the saved state is of {} heads of {} x {} (keys x values), this model's of {} of {} x {}", heads, K, V, shape_.heads,
           shape_.key_dim, shape_.value_dim);
  int64_t tokens = from.get_value<int64_t>("delta_rule.tokens"), open = from.get_value<int64_t>("delta_rule.open");
  K3_CHECK(open >= 0 && open <= cpu::kDeltaChunk && tokens >= open,
           "[delta_rule] the saved state is damaged: {} tokens, {} of them in the open chunk", tokens, open);
  int64_t size = 0;
  parts(tokens, open, [&](int64_t, int64_t n) { size += n; });
  std::vector<float> used(size_t(size) + 1);
  from.get("delta_rule.state", used.data(), size_t(size) * sizeof(float));
  const float* next = used.data();
  parts(tokens, open, [&](int64_t at, int64_t n) {
    write(Tensor(this->slot(slot) + at, DType::f32, {n}, memory_.device()), next);
    next += n;
  });
  tokens_[slot] = tokens, open_[slot] = open;
}

void DeltaState::check(const DeltaShape& shape, const Batch& batch) const {
  K3_CHECK(shape_.heads == shape.heads && shape_.key_dim == shape.key_dim && shape_.value_dim == shape.value_dim,
           "[delta_rule] the state is of {} heads of {} x {} (keys x values), the call of {} of {} x {}", shape_.heads, shape_.key_dim,
           shape_.value_dim, shape.heads, shape.key_dim, shape.value_dim);
  K3_CHECK(int64_t(batch.slots.size()) == batch.sequences(), "[delta_rule] {} slots named for {} sequences", batch.slots.size(), batch.sequences());
  std::vector<bool> taken(size_t(slots()), false);
  for (int32_t slot : batch.slots) {
    K3_CHECK(slot >= 0 && slot < slots(), "[delta_rule] slot {} of {}", slot, slots());
    K3_CHECK(!taken[slot], "[delta_rule] slot {} is named twice", slot);
    taken[slot] = true;
  }
}

// A decode step: the same kernels, with lists that the device makes.
Var DeltaState::step(Var q, Var k, Var v, Var g, Var beta, int64_t columns, const DeviceStep& step) {
  Context& c = q.context();
  const int64_t N = q.rows(), H = shape_.heads, K = shape_.key_dim, V = shape_.value_dim;
  Var o(c, DType::f32, {N, H * V});
  if constexpr (gpu::kBuilt) {
    Scratch s(*c.arena);
    cuda::DeltaStepLists lists{step, N, slot(0), bytes_per_slot() / int64_t(sizeof(float))};
    lists.first = s.lend(DType::i32, {N + 1}).i32(), lists.rows = s.lend(DType::i32, {N}).i32();
    lists.slots = static_cast<float**>(s.lend(DType::i64, {N}).data());
    lists.read = s.lend(DType::i64, {N}).as<int64_t>(), lists.open = s.lend(DType::i64, {N}).as<int64_t>();
    gpu::check(cuda::delta_step_lists(lists, gpu::stream()));
    cpu::DeltaArgs a{};
    a.heads = H, a.key_dim = K, a.value_dim = V, a.scale = shape_.scale, a.gate_columns = columns;
    a.q = q.f32(), a.k = k.f32(), a.v = v.f32(), a.g = columns ? g.f32() : nullptr, a.beta = beta.f32();
    a.sequences = N, a.first = lists.first, a.rows = lists.rows, a.slots = lists.slots, a.read = lists.read, a.open = lists.open, a.out = o.f32();
    gpu::check(cuda::delta_float_forward(a, gpu::stream()));
  }
  return o;
}

Var delta_rule(Var q, Var k, Var v, Var g, Var beta, const DeltaShape& shape, const Batch& batch, DeltaState* state) {
  Context& c = q.context();
  const int64_t N = batch.tokens(), H = shape.heads, K = shape.key_dim, V = shape.value_dim, S = batch.sequences();
  auto check = [&](const char* name, const Var& x, int64_t cols) {
    K3_CHECK(x.rows() == N && x.cols() == cols, "[delta_rule] {} is {} but {} tokens of {} heads of {} x {} (keys x values) take {} x {}", name,
             to_string(x.value().shape()), N, H, K, V, N, cols);
  };
  K3_CHECK(H > 0 && K > 0 && V > 0, "[delta_rule] {} heads of {} x {} (keys x values): none may be 0", H, K, V);
  check("q", q, H * K), check("k", k, H * K), check("v", v, H * V), check("beta", beta, H);
  int64_t columns = g.empty() ? 0 : K > 1 && g.cols() == H ? 1 : K;
  if (columns) check("g", g, H * columns);
  K3_CHECK(batch.padding.empty() || int64_t(batch.padding.size()) == N, "[delta_rule] padding has {} rows but the batch {}", batch.padding.size(), N);

  if (batch.step) {
    K3_CHECK(state && state->shape_.heads == H && state->shape_.key_dim == K && state->shape_.value_dim == V,
             "[delta_rule] a decode step on the device needs a state of {} heads of {} x {}", H, K, V);
    return state->step(q, k, v, g, beta, columns, *batch.step);
  }
  auto rows = std::make_shared<const Rows>(batch);
  cpu::DeltaArgs a{};
  a.heads = H, a.key_dim = K, a.value_dim = V, a.scale = shape.scale, a.gate_columns = columns;
  a.q = q.f32(), a.k = k.f32(), a.v = v.f32(), a.g = columns ? g.f32() : nullptr, a.beta = beta.f32();
  a.sequences = S;

  std::vector<float*> slots;
  std::vector<int64_t> read, open;
  if (state) {
    K3_CHECK(!c.tape, "[delta_rule] a state under a tape: gradients end where a sequence begins, so train on whole sequences without a state");
    state->check(shape, batch);
    for (int32_t slot : batch.slots) {
      slots.push_back(state->slot(slot)), open.push_back(state->open_[slot]);
      // to kernels: whether there is a memory, and whole chunks before the open one, which need not begin at a multiple of 16 (gated_delta_rule.h)
      read.push_back(state->open_[slot] + (state->closed(slot) ? cpu::kDeltaChunk : 0));
    }
  }

  Var o(c, DType::f32, {N, H * V});
  a.out = o.f32();
  const bool parallel = gpu::kBuilt && c.device == Device::cuda && c.bf16_products && !state && cuda::delta_parallel_serves(K, V);
  cuda::DeltaParallel p{a, nullptr, rows->chunks[S], nullptr, nullptr, nullptr, false};
  const int64_t size = cuda::delta_parallel_size(K, V), kept_floats = rows->chunks[S] * H * cuda::delta_parallel_memory(size),
                work_floats = rows->chunks[S] * H * cuda::delta_parallel_work(size);
  if (parallel && c.tape) {
    p.memories = c.arena->lend(DType::f32, {kept_floats}).f32();
  } else if (c.tape) {
    a.kept = c.arena->lend(DType::f32, {rows->kept[S], H, cpu::delta_memory_floats(K, V)}).f32();
    a.errors = c.arena->lend(DType::f32, {N, H * V}).f32();
  }
  // The lists, where the kernels read them, and room to work in, which the GPU does not need.
  auto lend = [&c, rows, parallel, tasks = cpu::delta_tasks(S * H)](cpu::DeltaArgs& a, Scratch& s, int64_t floats) {
    a.first = listed(c.device, s, rows->first), a.rows = rows->all_exist ? nullptr : listed(c.device, s, rows->tokens);
    if ((c.tape || a.d_out) && !parallel) a.kept_first = listed(c.device, s, rows->kept);
    if (c.device != Device::cuda) a.scratch = s.lend(DType::f32, {tasks, floats}).f32();
  };
  if (Scratch s(*c.arena); true) {
    lend(a, s, cpu::delta_forward_scratch(K, V));
    if (state) a.slots = listed(c.device, s, slots), a.read = listed(c.device, s, read), a.open = listed(c.device, s, open);
    if (c.device == Device::cpu) {
      if (!rows->all_exist)
        for (int64_t i = 0; i < N; ++i)
          if (batch.padding[i]) std::memset(a.out + i * H * V, 0, size_t(H * V) * sizeof(float));
      cpu::delta().forward(a);
    }
    if constexpr (gpu::kBuilt) {
      if (c.device == Device::cuda) {
        if (!rows->all_exist) gpu::clear(a.out, o.value().bytes());
        if (parallel) {
          cuda::DeltaParallel f = p;
          f.a = a, f.chunk_first = listed(c.device, s, rows->chunks), f.work = s.lend(DType::f32, {work_floats}).f32();
          if (!c.tape) f.memories = s.lend(DType::f32, {kept_floats}).f32();
          gpu::check(cuda::delta_parallel_forward(f, gpu::stream()));
        } else {
          gpu::check(cuda::delta_float_forward(a, gpu::stream()));
        }
      }
    }
  }

  // Once a token: q, k, v, g, beta, o. Once a sequence: the memory, read; written when the call closes chunks.
  const double C = double(cpu::kDeltaChunk), tokens = double(rows->first[S]) * double(H), KV = double(K) * double(V);
  double memories = 0, memories_read = 0;
  for (int64_t s = 0; s < S; ++s) {
    double n = double(rows->length(s));
    if (state && n > 0) memories += double(H) * (1 + std::min(1.0, n / C)), memories_read += double(H);
    if (state) {
      int32_t slot = batch.slots[s];
      state->tokens_[slot] += rows->length(s);
      state->open_[slot] += rows->length(s);
      if (state->open_[slot] > cpu::kDeltaChunk) state->open_[slot] = (state->open_[slot] - 1) % cpu::kDeltaChunk + 1;
    }
  }
  c.cost("delta_rule", {.flops = tokens * (6 * KV + 5 * C * double(K + V)),
                        .bytes = 4 * (tokens * double(2 * K + columns + 2 * V + 1) + memories * KV),
                        .held = 4 * memories_read * KV});

  on_backward(o, [=, &c] {
    cpu::DeltaArgs b = a;
    b.d_out = o.grad().f32();
    b.dq = q.grad().f32(), b.dk = k.grad().f32(), b.dv = v.grad().f32(), b.dbeta = beta.grad().f32();
    if (columns) b.dg = g.grad().f32();
    Scratch s(*c.arena);
    lend(b, s, cpu::delta_backward_scratch(K, V));
    if (c.device == Device::cpu) cpu::delta().backward(b);
    if constexpr (gpu::kBuilt) {
      if (c.device == Device::cuda && parallel) {
        cuda::DeltaParallel w = p;
        w.a = b, w.chunk_first = listed(c.device, s, rows->chunks), w.work = s.lend(DType::f32, {work_floats}).f32();
        w.d_memories = s.lend(DType::f32, {kept_floats}).f32();
        gpu::check(cuda::delta_parallel_backward(w, gpu::stream()));
      } else if (c.device == Device::cuda) {
        cuda::DeltaFloatBackward w{b, rows->first[S], rows->longest};
        w.du = s.lend(DType::f32, {N, H * V}).f32();
        w.d_kept = s.lend(DType::f32, {rows->kept[S], H, cpu::delta_memory_floats(K, V)}).f32();
        if (columns == 1) w.dg = s.lend(DType::f32, {N, H * K}).f32();
        gpu::check(cuda::delta_float_backward(w, gpu::stream()));
      }
    }
    c.cost("delta_rule", {.flops = tokens * (13.5 * KV + 10 * C * double(K + V)),
                          .bytes = 4 * (tokens * double(6 * K + 3 * columns + 5 * V + 3) + double(rows->kept[S]) * double(H) * KV)});
  });
  return o;
}

}  // namespace k3

#include "k3/ops/attention/expanded.h"

#include <algorithm>
#include <cstring>

#include "k3/core/error.h"
#include "k3/core/listed.h"
#include "k3/ops/attention/attention_float_cuda.h"
#include "k3/ops/attention/attention_narrow_cuda.h"
#include "k3/ops/attention/attention_step_cuda.h"
#include "k3/ops/attention/gather_cuda.h"
#include "k3/ops/attention/prefill.h"
#include "k3/ops/linear/blas_cuda.h"
#include "k3/tape/tape.h"

namespace k3 {

using cpu::kKeyTile;

std::vector<cpu::QueryTile> query_tiles(const std::vector<cpu::AttentionSequence>& sequences, int64_t group) {
  std::vector<cpu::QueryTile> tiles;
  for (int64_t s = 0; s < int64_t(sequences.size()); ++s)
    for (int64_t row = 0; row < sequences[s].queries * group; row += cpu::kQueryTile) tiles.push_back({s, row});
  auto keys = [&](const cpu::QueryTile& t) { return sequences[t.sequence].first + t.first_row / group; };
  std::stable_sort(tiles.begin(), tiles.end(), [&](auto& a, auto& b) { return keys(a) > keys(b); });
  return tiles;
}

AttentionPlan::AttentionPlan(const Batch& batch, int64_t group, TokenCache* cache) {
  int64_t tiles = 0;
  for (int64_t s = 0; s < batch.sequences(); ++s) {
    cpu::AttentionSequence q{int64_t(rows.size()), 0, 0, tiles};
    for (int64_t i = batch.begin(s); i < batch.begin(s + 1); ++i)
      if (batch.padding.empty() || !batch.padding[i]) rows.push_back(int32_t(i));
    q.queries = int64_t(rows.size()) - q.rows_at;
    longest = std::max(longest, q.queries);
    if (cache) {
      q.first = cache->tokens(batch.slots[s]);
      cache->extend(batch.slots[s], q.queries);
    }
    int64_t count = (q.first + q.queries + kKeyTile - 1) / kKeyTile;
    if (cache)
      for (int64_t i = 0; i < count; ++i) blocks.push_back(cache->block(batch.slots[s], i));
    tiles += count;
    pairs += double(q.queries) * (double(q.first) + double(q.queries + 1) / 2);
    sequences.push_back(q);
  }
  if (!cache) blocks.resize(size_t(tiles));
  query_tiles = k3::query_tiles(sequences, group);
}

void AttentionPlan::lend_blocks(Scratch& scratch, const cpu::KeyTiles& tiles) {
  Tensor all = scratch.lend(DType::f32, {int64_t(blocks.size()), tiles.floats()});
  if (all.has_data())
    for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = all.f32() + int64_t(i) * tiles.floats();
}

void AttentionPlan::fill(cpu::AttentionArgs& a, Device device, Scratch& scratch) const {
  a.rows = listed(device, scratch, rows), a.blocks = listed(device, scratch, blocks);
  a.sequences = listed(device, scratch, sequences), a.sequence_count = int64_t(sequences.size());
  a.query_tiles = listed(device, scratch, query_tiles), a.query_tile_count = int64_t(query_tiles.size());
}

void clear_padding(const Tensor& y, const Batch& batch) {
  for (int64_t i = 0; i < int64_t(batch.padding.size()); ++i) {
    if (!batch.padding[i]) continue;
    const Tensor row = y.row_range(i, i + 1);
    if (y.device() == Device::cpu) std::memset(row.data(), 0, row.bytes());
    if (y.device() == Device::cuda) gpu::clear(row.data(), row.bytes());
  }
}

void check_attention_call(const char* name, const Context& c, int64_t tokens, int64_t heads, int64_t key_dim, int64_t value_dim, const Batch& batch,
                          const TokenCache* cache, const Tensor* max_logit) {
  K3_CHECK(batch.tokens() == tokens, "[{}] q has {} rows but the batch has {} tokens", name, tokens, batch.tokens());
  K3_CHECK(batch.padding.empty() || int64_t(batch.padding.size()) == tokens, "[{}] padding has {} entries for {} tokens", name, batch.padding.size(),
           tokens);
  K3_CHECK(key_dim > 0 && value_dim > 0 && std::max(key_dim, value_dim) <= cpu::kMaxHeadDim,
           "[{}] heads of {} key and {} value channels; both must be 1 to {}", name, key_dim, value_dim, cpu::kMaxHeadDim);
  K3_CHECK(!max_logit || (max_logit->dtype() == DType::f32 && max_logit->size() == heads), "[{}] max_logit must be {} float32 values", name, heads);
  K3_CHECK(!batch.step || cache, "[{}] a decode step on the device needs a cache", name);
  if (!cache) return;
  K3_CHECK(!c.tape, "[{}] a cache can't be used with a tape: its tokens have no gradients; train on whole sequences", name);
  if (batch.step) return;
  K3_CHECK(int64_t(batch.slots.size()) == batch.sequences(), "[{}] a cache needs a slot for each of {} sequences; the batch names {}", name,
           batch.sequences(), batch.slots.size());
  auto slots = batch.slots;
  std::sort(slots.begin(), slots.end());
  auto twice = std::adjacent_find(slots.begin(), slots.end());
  K3_CHECK(twice == slots.end(), "[{}] two sequences of the batch have slot {}", name, *twice);
}

// The arguments of the tensor units' kernels: bfloat16 copies of all that is multiplied.
static cuda::AttentionNarrowArgs narrowed(const Expanded& e, const cpu::AttentionArgs& a, int64_t longest, bool dense, Scratch& scratch) {
  auto copy = [&](const float* from, int64_t n) {
    Tensor t = scratch.lend(DType::bf16, {n});
    if constexpr (gpu::kBuilt) gpu::check(cuda::narrow(from, t.data(), n, gpu::stream()));
    return t.as<bf16>();
  };
  cuda::AttentionNarrowArgs p{a, copy(e.q.f32(), e.q.size()), nullptr, nullptr, nullptr, nullptr, longest, dense};
  const bf16 *keys = copy(e.keys.f32(), e.keys.size()), *values = e.values.f32() == e.keys.f32() ? keys : copy(e.values.f32(), e.values.size());
  p.keys = keys, p.values = values + e.values_at;
  if (!e.shared.empty()) p.shared = copy(e.shared.f32(), e.shared.size());
  if (a.dy) p.dy = copy(a.dy, a.tokens * a.tiles.kv_heads * a.group * a.tiles.value);
  return p;
}

static cpu::AttentionArgs arguments_of(const Expanded& e, const Var& y) {
  cpu::AttentionArgs a{};
  a.tiles = e.tiles, a.tokens = e.q.rows(), a.group = e.group, a.scale = e.scale;
  a.q = e.q.f32(), a.y = y.f32();
  a.keys = e.keys.f32(), a.key_stride = e.keys.cols(), a.key_head_stride = e.key_head_stride;
  a.values = e.values.f32() + e.values_at, a.value_stride = e.values.cols(), a.value_head_stride = e.value_head_stride;
  if (!e.shared.empty()) a.shared = e.shared.f32(), a.shared_stride = e.shared.cols();
  return a;
}

// A decode step: the same kernels, with lists that the device makes and the cache's table of blocks.
static void expanded_step(const Expanded& e, const Var& y, [[maybe_unused]] const DeviceStep& step, [[maybe_unused]] TokenCache& cache) {
  Context& c = y.context();
  const int64_t rows = e.q.rows(), tiles = (e.group + cpu::kQueryTile - 1) / cpu::kQueryTile;
  Scratch scratch(*c.arena);
  cpu::AttentionArgs a = arguments_of(e, y);
  a.m = scratch.lend(DType::f32, {rows, e.tiles.kv_heads * e.group}).f32(), a.l = scratch.lend(DType::f32, {rows, e.tiles.kv_heads * e.group}).f32();
  auto lent = [&](int64_t n, size_t bytes) { return scratch.lend(DType::u8, {n * int64_t(bytes)}).data(); };
  auto* list = static_cast<int32_t*>(lent(rows, sizeof(int32_t)));
  auto* sequences = static_cast<cpu::AttentionSequence*>(lent(rows, sizeof(cpu::AttentionSequence)));
  auto* items = static_cast<cpu::QueryTile*>(lent(rows * tiles, sizeof(cpu::QueryTile)));
  a.rows = list, a.sequences = sequences, a.sequence_count = rows, a.query_tiles = items, a.query_tile_count = rows * tiles;
  if constexpr (gpu::kBuilt) {
    a.blocks = cache.table();
    gpu::check(cuda::attention_step_lists({step, rows, tiles, TokenCache::kTableBlocks, list, sequences, items}, gpu::stream()));
    gpu::check(cuda::attention_append(a, 1, gpu::stream()));
    gpu::check(cuda::attention_forward(a, 1, 0, INT64_MAX, gpu::stream()));
  }
}

// The sequences with many queries, from a cache's tiles; the query tiles of the others stay in `a`.
static void prefill_from_tiles(Context& c, const AttentionPlan& plan, cpu::AttentionArgs& a, Scratch& scratch) {
  std::vector<cpu::QueryTile> others;
  for (const cpu::QueryTile& t : plan.query_tiles)
    if (plan.sequences[size_t(t.sequence)].queries < kPrefillQueries) others.push_back(t);
  for (const cpu::AttentionSequence& s : plan.sequences) {
    if (s.queries < kPrefillQueries) continue;
    prefill_sequence(c, a, s, plan.rows[size_t(s.rows_at)], [&](int64_t first, int64_t heads, void* kv, void* shared) {
      if constexpr (gpu::kBuilt)
        gpu::check(cuda::gather_tiles({a.tiles, a.blocks + s.blocks_at, s.first + s.queries, first, heads, kv, shared}, gpu::stream()));
    });
  }
  a.query_tiles = listed(c.device, scratch, others), a.query_tile_count = int64_t(others.size());
}

void expanded_attention(const Expanded& e, const Var& y, const Batch& batch, TokenCache* cache, Tensor* max_logit) {
  if (batch.step) return expanded_step(e, y, *batch.step, *cache);
  Context& c = y.context();
  const int64_t tokens = e.q.rows(), heads = e.tiles.kv_heads * e.group;
  AttentionPlan plan(batch, e.group, cache);
  Tensor lse = c.tape ? c.arena->lend(DType::f32, {tokens, heads}) : Tensor();

  cpu::AttentionArgs a = arguments_of(e, y);
  bool narrow = false, dense = int64_t(plan.rows.size()) == tokens;
  const bool warpgroups = prefill_serves(c, e.tiles, e.group, batch) && a.key_stride == a.value_stride && a.key_head_stride == a.value_head_stride;
  if constexpr (gpu::kBuilt) narrow = c.device == Device::cuda && c.bf16_products && !cache && cuda::attention_narrow_serves(a);
  {
    Scratch scratch(*c.arena);
    a.m = scratch.lend(DType::f32, {tokens, heads}).f32();
    a.l = c.tape ? lse.f32() : scratch.lend(DType::f32, {tokens, heads}).f32();
    if (!cache && !narrow) plan.lend_blocks(scratch, e.tiles);
    plan.fill(a, c.device, scratch);
    if (c.device == Device::cpu) {
      cpu::attention().append(a);
      cpu::attention().forward(a, 0, INT64_MAX);
      if (max_logit) cpu::attention().max_logit(a, max_logit->f32());
    }
    if constexpr (gpu::kBuilt) {
      if (c.device == Device::cuda) {
        if (narrow) {
          const cuda::AttentionNarrowArgs p = narrowed(e, a, plan.longest, dense, scratch);
          if (warpgroups)
            prefill(p, batch, scratch);
          else
            gpu::check(cuda::attention_narrow_forward(p, gpu::stream()));
        } else {
          gpu::check(cuda::attention_append(a, plan.longest, gpu::stream()));
          if (warpgroups) prefill_from_tiles(c, plan, a, scratch);
          gpu::check(cuda::attention_forward(a, plan.longest, 0, INT64_MAX, gpu::stream()));
        }
        if (max_logit) gpu::check(cuda::attention_max_logit(a, int64_t(plan.rows.size()), max_logit->f32(), gpu::stream()));
      }
    }
    clear_padding(y.value(), batch);
  }
  const double key_dim = double(e.tiles.own + e.tiles.shared), value_dim = double(e.tiles.value);
  const double flops = 2 * plan.pairs * double(heads) * (key_dim + value_dim);
  const double bytes = 4.0 * (double(e.q.size() + y.size()) + double(plan.blocks.size()) * double(e.tiles.floats()));
  double held = 0;  // the rows that the cache held before
  for (const auto& s : plan.sequences)
    if (cache && s.queries > 0) held += 4.0 * double(s.first) * double(e.tiles.floats()) / double(cpu::kKeyTile);
  c.cost(e.name, {.flops = flops, .bytes = bytes, .held = held});

  on_backward(y, [=, &c] {
    cpu::AttentionArgs b = a;
    AttentionPlan plan(batch, e.group, nullptr);
    b.dy = y.grad().f32(), b.dq = e.q.grad().f32();
    b.dkeys = e.keys.grad().f32(), b.dvalues = e.values.grad().f32() + e.values_at;
    if (!e.shared.empty()) b.dshared_sum = e.shared.grad().f32();
    Scratch scratch(*c.arena);
    b.d = scratch.lend(DType::f32, {tokens, heads}).f32();
    if (!e.shared.empty()) b.dshared = scratch.lend_zeroed(DType::f32, {e.tiles.kv_heads, tokens, e.tiles.shared}).f32();
    plan.fill(b, c.device, scratch);
    if (c.device == Device::cpu) cpu::attention().backward(b);
    if constexpr (gpu::kBuilt) {
      if (c.device == Device::cuda && narrow) {
        const cuda::AttentionNarrowArgs p = narrowed(e, b, plan.longest, dense, scratch);
        if (warpgroups)
          prefill_backward(p, batch, scratch);
        else
          gpu::check(cuda::attention_narrow_backward(p, gpu::stream()));
      } else if (c.device == Device::cuda) {
        gpu::check(cuda::attention_backward(b, plan.longest, gpu::stream()));
      }
    }
    c.cost(e.name, {.flops = 2 * plan.pairs * double(heads) * (3 * key_dim + 2 * value_dim), .bytes = 2 * bytes});
  });
}

}  // namespace k3

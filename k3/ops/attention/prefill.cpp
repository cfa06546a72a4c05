#include "k3/ops/attention/prefill.h"

#include <algorithm>

#include "k3/core/listed.h"
#include "k3/ops/attention/attention_cuda.h"
#include "k3/ops/attention/attention_float_cuda.h"
#include "k3/ops/linear/blas_cuda.h"

namespace k3 {

namespace {

cuda::PrefillWidths widths_of(const cpu::KeyTiles& t) { return {int(t.own), int(t.shared), int(t.value)}; }
std::vector<int32_t> begins_of(const Batch& batch) { return {batch.cu_seqlens.begin(), batch.cu_seqlens.end()}; }

}  // namespace

bool prefill_serves(const Context& c, const cpu::KeyTiles& t, int64_t group, const Batch& batch) {
  if (!gpu::kBuilt || c.device != Device::cuda || !c.bf16_products || batch.step) return false;
  if (group != 1 || !(widths_of(t) == cuda::kPrefillWide || widths_of(t) == cuda::kPrefillSmall)) return false;
  const bool padded = std::find_if(batch.padding.begin(), batch.padding.end(), [](uint8_t p) { return p != 0; }) != batch.padding.end();
  return !padded && t.kv_heads <= 65535 && batch.sequences() <= 65535;
}

void prefill(const cuda::AttentionNarrowArgs& w, const Batch& batch, Scratch& scratch) {
  const cpu::AttentionArgs& a = w.a;
  cuda::PrefillArgs p{};
  p.q = w.q, p.k = w.keys, p.v = w.values, p.shared = w.shared, p.scale = a.scale, p.raw = a.y, p.lse = a.l, p.largest = a.m;
  p.heads = int(a.tiles.kv_heads), p.widths = widths_of(a.tiles), p.q_stride = p.heads * p.widths.key(), p.kv_stride = a.key_stride,
  p.kv_head_stride = a.key_head_stride;
  p.shared_stride = a.shared_stride, p.sequences = int(batch.sequences()), p.q_rows = p.k_rows = batch.tokens(), p.longest_q = int(w.longest);
  p.q_begins = p.k_begins = listed(Device::cuda, scratch, begins_of(batch));
  if constexpr (gpu::kBuilt) gpu::check(cuda::prefill_forward(p, gpu::stream()));
}

void prefill_backward(const cuda::AttentionNarrowArgs& w, const Batch& batch, Scratch& scratch) {
  const cpu::AttentionArgs& a = w.a;
  cuda::PrefillBackwardArgs p{};
  p.q = w.q, p.k = w.keys, p.v = w.values, p.shared = w.shared, p.dy = w.dy, p.scale = a.scale;
  p.heads = int(a.tiles.kv_heads), p.widths = widths_of(a.tiles), p.q_stride = p.heads * p.widths.key(), p.kv_stride = a.key_stride,
  p.kv_head_stride = a.key_head_stride;
  p.shared_stride = a.shared_stride, p.sequences = int(batch.sequences()), p.rows = batch.tokens(), p.longest = int(w.longest);
  p.begins = listed(Device::cuda, scratch, begins_of(batch));
  p.lse = a.l, p.d = a.d, p.dq = a.dq, p.dk = a.dkeys, p.dv = a.dvalues, p.dshared = a.dshared;
  if constexpr (gpu::kBuilt) {
    gpu::check(cuda::attention_row_products(a, gpu::stream()));
    gpu::check(cuda::prefill_backward(p, gpu::stream()));
    gpu::check(cuda::attention_sum_shared(a, gpu::stream()));
  }
}

void prefill_sequence(Context& c, const cpu::AttentionArgs& a, const cpu::AttentionSequence& s, int64_t row, const PrefillKeys& keys) {
  const cuda::PrefillWidths w = widths_of(a.tiles);
  const int64_t heads = a.tiles.kv_heads, n = s.queries, all = s.first + n;
  const int64_t most = std::max<int64_t>(1, prefill_room / (2 * all * (w.own + w.value)));
  Scratch scratch(*c.arena);
  bf16* q = scratch.lend(DType::bf16, {n, heads * w.key()}).as<bf16>();
  void* shared = scratch.lend(DType::bf16, {all, w.shared}).data();
  cuda::PrefillArgs p{};
  p.q_begins = listed(c.device, scratch, std::vector<int32_t>{0, int32_t(n)}),
  p.k_begins = listed(c.device, scratch, std::vector<int32_t>{0, int32_t(all)});
  p.shared = shared, p.scale = a.scale, p.widths = w, p.q_stride = heads * w.key(), p.kv_head_stride = w.own + w.value, p.shared_stride = w.shared;
  p.sequences = 1, p.longest_q = int(n), p.q_rows = n, p.k_rows = all, p.row_heads = int(heads);
  if constexpr (gpu::kBuilt) gpu::check(cuda::narrow(a.q + row * heads * w.key(), q, n * heads * w.key(), gpu::stream()));
  for (int64_t first = 0; first < heads; first += most) {
    Scratch room(*c.arena);
    p.heads = int(std::min(most, heads - first)), p.kv_stride = p.heads * p.kv_head_stride;
    bf16* kv = room.lend(DType::bf16, {all, p.kv_stride}).as<bf16>();
    keys(first, p.heads, kv, first ? nullptr : shared);
    p.q = q + first * w.key(), p.k = kv, p.v = kv + w.own;
    p.raw = a.y + (row * heads + first) * w.value, p.lse = a.l + row * heads + first, p.largest = a.m + row * heads + first;
    if constexpr (gpu::kBuilt) gpu::check(cuda::prefill_forward(p, gpu::stream()));
  }
}

}  // namespace k3

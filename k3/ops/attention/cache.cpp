#include "k3/ops/attention/cache.h"

#include <cstring>

#include "k3/core/error.h"
#include "k3/core/gpu.h"
#include "k3/ops/attention/attention_kernels.h"

namespace k3 {

static_assert(TokenCache::kBlockTokens == cpu::kKeyTile);

TokenCache::TokenCache(std::string name, int64_t slots, int64_t floats_per_token, Device device)
    : name_(std::move(name)), floats_per_token_(floats_per_token), device_(device), slots_(size_t(slots)) {}

const TokenCache::Slot& TokenCache::at(int64_t slot) const {
  K3_CHECK(slot >= 0 && slot < slots(), "[attention] slot {} of a cache with {} slots", slot, slots());
  return slots_[size_t(slot)];
}

std::shared_ptr<Buffer> TokenCache::new_block() const { return std::make_shared<Buffer>(size_t(kBlockTokens) * bytes_per_token(), device_); }

void TokenCache::copy(int64_t to, int64_t from) {
  Slot& target = at(to);
  target = at(from);
  tell(to, 0);
}

void TokenCache::truncate(int64_t slot, int64_t n) {
  Slot& s = at(slot);
  K3_CHECK(n >= 0 && n <= s.tokens, "[attention] slot {} has {} tokens; {} can't be dropped", slot, s.tokens, n);
  s.tokens -= n;
  s.blocks.resize(size_t((s.tokens + kBlockTokens - 1) / kBlockTokens));
}

void TokenCache::extend(int64_t slot, int64_t n) {
  Slot& s = at(slot);
  size_t same = s.blocks.size();
  if (n > 0 && s.tokens % kBlockTokens && s.blocks.back().use_count() > 1) {
    auto own = new_block();
    copy_values(own->view(DType::u8, {int64_t(own->bytes())}), s.blocks.back()->view(DType::u8, {int64_t(own->bytes())}));
    s.blocks.back() = std::move(own);
    --same;
  }
  while (int64_t(s.blocks.size()) * kBlockTokens < s.tokens + n) s.blocks.push_back(new_block());
  s.tokens += n;
  tell(slot, same);
}

float* const* TokenCache::table() {
  if (!table_.data()) {
    table_ = Buffer(size_t(slots() * kTableBlocks) * sizeof(float*), device_);
    for (int64_t i = 0; i < slots(); ++i) tell(i, 0);
  }
  return reinterpret_cast<float* const*>(table_.data());
}

// The table on the device learns of the slot's blocks from number `from` on.
void TokenCache::tell(int64_t slot, size_t from) {
  const Slot& s = at(slot);
  if (!table_.data() || from >= s.blocks.size()) return;
  K3_CHECK(int64_t(s.blocks.size()) <= kTableBlocks, "[attention] slot {} has {} tokens; decode on a GPU serves up to {}", slot, s.tokens,
           kTableBlocks * kBlockTokens);
  std::vector<float*> blocks;
  for (size_t i = from; i < s.blocks.size(); ++i) blocks.push_back(reinterpret_cast<float*>(s.blocks[i]->data()));
  gpu::upload(table_.data() + (size_t(slot * kTableBlocks) + from) * sizeof(float*), blocks.data(), blocks.size() * sizeof(float*));
}

void TokenCache::save(int64_t slot, Blob& to) const {
  const Slot& s = at(slot);
  to.put_value(name_.c_str(), s.tokens);
  for (const auto& b : s.blocks) to.put("block", HostCopy(b->view(DType::u8, {int64_t(b->bytes())})).tensor().data(), b->bytes());
}

void TokenCache::load(int64_t slot, Blob& from) {
  Slot s;
  s.tokens = from.get_value<int64_t>(name_.c_str());
  K3_CHECK(s.tokens >= 0 && s.tokens < int64_t(1) << 40, "[attention] a saved {} says {} tokens: the bytes are damaged", name_, s.tokens);
  for (int64_t i = 0; i * kBlockTokens < s.tokens; ++i) {
    s.blocks.push_back(new_block());
    std::vector<char> bytes(s.blocks.back()->bytes());
    from.get("block", bytes.data(), bytes.size());
    write(s.blocks.back()->view(DType::u8, {int64_t(bytes.size())}), bytes.data());
  }
  at(slot) = std::move(s);
  tell(slot, 0);
}

KvCache::KvCache(int64_t slots, const AttentionShape& s, Device device)
    : TokenCache(fmt::format("key-value cache of {} heads of {} / {}", s.kv_heads, s.key_dim, s.value_dim), slots,
                 s.kv_heads * (s.key_dim + s.value_dim), device) {}

LatentCache::LatentCache(int64_t slots, const MlaShape& s, bool keep_expanded, Device device)
    : TokenCache(keep_expanded ? fmt::format("expanded cache of {} heads of {}+{} / {}", s.heads, s.nope, s.rope, s.value)
                               : fmt::format("latent cache of rank {}+{}", s.rank, s.rope),
                 slots, keep_expanded ? s.rope + s.heads * (s.nope + s.value) : s.rank + s.rope, device),
      keep_expanded_(keep_expanded) {}

}  // namespace k3

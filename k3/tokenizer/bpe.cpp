#include "k3/tokenizer/bpe.h"

#include <bit>
#include <cstring>
#include <queue>

#include "k3/core/error.h"

namespace k3 {
namespace {

constexpr uint64_t kMix = 0x9E3779B97F4A7C15;
constexpr size_t kShort = 96;  // bytes; above it, the scan for the lowest pair costs more than a heap

uint64_t mix(uint64_t x) {
  x *= kMix;
  return x ^ x >> 32;
}

uint64_t hash_bytes(std::string_view s) {
  uint64_t h = s.size();
  for (; s.size() >= 8; s.remove_prefix(8)) {
    uint64_t w;
    std::memcpy(&w, s.data(), 8);
    h = mix(h ^ w);
  }
  uint64_t w = 0;
  if (!s.empty()) std::memcpy(&w, s.data(), s.size());
  return mix(h ^ w) * kMix >> 16;
}

uint64_t pair_of(int32_t left, int32_t right) { return uint64_t(uint32_t(left)) << 32 | uint32_t(right); }
uint64_t hash_pair(uint64_t pair) { return mix(pair) * kMix >> 16; }

}  // namespace

Bpe::Bpe(const std::vector<std::string>& tokens) {
  size_t total = 0;
  for (const std::string& t : tokens) total += t.size();
  text_.reserve(total);
  begin_.reserve(tokens.size() + 1);
  find_.assign(std::bit_ceil(2 * tokens.size() + 1), -1);
  const size_t mask = find_.size() - 1;
  for (const std::string& t : tokens) {
    const int32_t rank = size();
    K3_CHECK(!t.empty(), "[tokenizer] rank {} has no bytes", rank);
    K3_CHECK(find(t) < 0, "[tokenizer] ranks {} and {} have the same bytes", find(t), rank);
    text_ += t;
    begin_.push_back(uint32_t(text_.size()));
    size_t at = hash_bytes(t) & mask;
    while (find_[at] >= 0) at = (at + 1) & mask;
    find_[at] = rank;
  }
  for (int b = 0; b < 256; ++b) {
    const char byte = char(b);
    byte_[b] = find({&byte, 1});
    K3_CHECK(byte_[b] >= 0, "[tokenizer] the single byte {:#04x} is not a token; all 256 must be", b);
  }
  std::vector<Join> joins;
  for (int32_t rank = 0; rank < size(); ++rank) {
    const std::string_view whole = bytes(rank);
    for (size_t cut = 1; cut < whole.size(); ++cut) {
      const int32_t left = find(whole.substr(0, cut));
      const int32_t right = left < 0 ? -1 : find(whole.substr(cut));
      if (right >= 0) joins.push_back({pair_of(left, right), rank});
    }
  }
  join_.resize(std::bit_ceil(2 * joins.size() + 1));
  for (const Join& j : joins) {
    size_t at = hash_pair(j.pair) & (join_.size() - 1);
    while (join_[at].rank >= 0) at = (at + 1) & (join_.size() - 1);
    join_[at] = j;
  }
}

int32_t Bpe::find(std::string_view wanted) const {
  for (size_t at = hash_bytes(wanted) & (find_.size() - 1);; at = (at + 1) & (find_.size() - 1))
    if (find_[at] < 0 || bytes(find_[at]) == wanted) return find_[at];
}

int32_t Bpe::join(int32_t left, int32_t right) const {
  const uint64_t pair = pair_of(left, right);
  for (size_t at = hash_pair(pair) & (join_.size() - 1);; at = (at + 1) & (join_.size() - 1))
    if (join_[at].rank < 0 || join_[at].pair == pair) return join_[at].rank;
}

void Bpe::encode(std::string_view piece, std::vector<int32_t>& ids) const {
  if (piece.empty()) return;
  if (const int32_t whole = find(piece); whole >= 0)
    ids.push_back(whole);
  else if (piece.size() <= kShort)
    encode_short(piece, ids);
  else
    encode_long(piece, ids);
}

void Bpe::encode_short(std::string_view piece, std::vector<int32_t>& ids) const {
  int32_t part[kShort];
  uint32_t pair[kShort];  // rank of part[i] and part[i+1] joined; no pair is the largest number
  int n = int(piece.size());
  for (int i = 0; i < n; ++i) part[i] = byte_[uint8_t(piece[i])];
  for (int i = 0; i + 1 < n; ++i) pair[i] = uint32_t(join(part[i], part[i + 1]));
  while (n > 1) {
    int best = 0;
    for (int i = 1; i + 1 < n; ++i)
      if (pair[i] < pair[best]) best = i;
    if (pair[best] == ~uint32_t(0)) break;
    part[best] = int32_t(pair[best]);
    --n;
    for (int i = best + 1; i < n; ++i) part[i] = part[i + 1];
    for (int i = best + 1; i + 1 < n; ++i) pair[i] = pair[i + 1];
    if (best + 1 < n) pair[best] = uint32_t(join(part[best], part[best + 1]));
    if (best > 0) pair[best - 1] = uint32_t(join(part[best - 1], part[best]));
  }
  ids.insert(ids.end(), part, part + n);
}

void Bpe::encode_long(std::string_view piece, std::vector<int32_t>& ids) const {
  struct Part {
    int32_t id, pair, before, after;  // pair: rank of this part and the next joined, or -1
  };
  const int32_t n = int32_t(piece.size());
  std::vector<Part> part(n);
  for (int32_t i = 0; i < n; ++i) part[i] = {byte_[uint8_t(piece[i])], -1, i - 1, i + 1 < n ? i + 1 : -1};
  std::vector<uint64_t> heap;  // rank, then place: the lowest rank, and on ties the leftmost, is the smallest number
  heap.reserve(n);
  for (int32_t i = 0; i + 1 < n; ++i)
    if ((part[i].pair = join(part[i].id, part[i + 1].id)) >= 0) heap.push_back(pair_of(part[i].pair, i));
  std::priority_queue queue(std::greater<uint64_t>(), std::move(heap));
  auto renew = [&](int32_t i) {
    part[i].pair = part[i].after < 0 ? -1 : join(part[i].id, part[part[i].after].id);
    if (part[i].pair >= 0) queue.push(pair_of(part[i].pair, i));
  };
  while (!queue.empty()) {
    const int32_t rank = int32_t(queue.top() >> 32), i = int32_t(queue.top());
    queue.pop();
    if (part[i].pair != rank) continue;  // joined otherwise in the meantime
    const int32_t gone = part[i].after, after = part[gone].after;
    part[gone].pair = -1;
    part[i].id = rank;
    part[i].after = after;
    if (after >= 0) part[after].before = i;
    renew(i);
    if (part[i].before >= 0) renew(part[i].before);
  }
  for (int32_t i = 0; i >= 0; i = part[i].after) ids.push_back(part[i].id);
}

}  // namespace k3

#include "k3/train/sampler.h"

#include <algorithm>
#include <cassert>

#include "k3/core/error.h"
#include "k3/core/rng.h"
#include "k3/ops/loss/loss.h"

namespace k3 {

Split split_documents(const TokenFile& file, double held_out) {
  Split split;
  for (int64_t d = 0; d < file.documents(); ++d) {
    auto ids = file.document(d);
    const double u = Rng{checksum(ids.data(), ids.size_bytes()), 0}.uniform(0);
    (u < held_out ? split.held_out : split.train).push_back(d);
  }
  return split;
}

void TokenBatch::add(const TokenFile& file, const Piece& p) {
  auto document = file.document(p.document);
  for (int64_t i = p.from; i < p.from + p.length; ++i) {
    const bool last = i + 1 == int64_t(document.size());
    ids.push_back(document[size_t(i)]);
    targets.push_back(last ? kIgnored : document[size_t(i) + 1]);
    counted += !last;
  }
  batch.cu_seqlens.push_back(batch.cu_seqlens.back() + p.length);
  pieces.push_back(p);
}

NextTokens::NextTokens(const TokenBatch& b) : batch(b.batch) {
  const size_t n = size_t(b.batch.tokens());
  ids.assign(n, 0), targets.assign(n, kIgnored), batch.padding.assign(n, 0);
  if (b.targets.empty()) return;
  for (int64_t s = 0; s < b.batch.sequences(); ++s) {
    const size_t end = size_t(b.batch.begin(s) + b.batch.length(s));
    for (size_t t = size_t(b.batch.begin(s)); t < end; ++t) {
      const int32_t next = b.targets[t];
      batch.padding[t] = next < 0;
      if (next < 0) continue;
      ids[t] = next;
      if (t + 1 < end) targets[t] = b.targets[t + 1];
      counted += targets[t] >= 0;
    }
  }
}

Sampler::Sampler(const TokenFile& file, std::vector<int64_t> documents, uint64_t seed, int64_t sequence_length)
    : file_(file), documents_(std::move(documents)), seed_(seed), row_(sequence_length) {
  for (int64_t d : documents_) epoch_tokens_ += file.length(d);
  K3_CHECK(epoch_tokens_ > 0, "[data] there are no documents to learn from");
}

void Sampler::open_epoch(int64_t epoch) {
  if (epoch == epoch_) return;
  epoch_ = epoch;
  // Sorting by random keys: every order is equally likely, and a document's key depends on its place in the file only.
  const Rng rng{seed_, 0x0dde5 + uint64_t(epoch)};
  std::vector<std::pair<uint64_t, int64_t>> keys;
  for (int64_t d : documents_) {
    auto b = rng.bits(uint64_t(d));
    keys.emplace_back(uint64_t(b[0]) << 32 | b[1], d);
  }
  std::sort(keys.begin(), keys.end());
  order_.clear(), begin_.assign(1, 0);
  for (const auto& [key, d] : keys) order_.push_back(d), begin_.push_back(begin_.back() + file_.length(d));
}

TokenBatch Sampler::tokens(int64_t first, int64_t count) {
  assert(first % row_ == 0 && count % row_ == 0);
  TokenBatch out;
  for (int64_t at = first; at < first + count;) {
    open_epoch(at / epoch_tokens_);
    const int64_t in_epoch = at % epoch_tokens_;
    const size_t i = size_t(std::upper_bound(begin_.begin(), begin_.end(), in_epoch) - begin_.begin()) - 1;
    const int64_t length = std::min(begin_[i + 1] - in_epoch, row_ - at % row_);
    out.add(file_, {order_[i], in_epoch - begin_[i], length});
    at += length;
  }
  return out;
}

}  // namespace k3

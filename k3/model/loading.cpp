#include "k3/model/loading.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "k3/core/error.h"
#include "k3/core/threads.h"

namespace k3 {

namespace {
constexpr uint64_t kPage = 4096;
}  // namespace

bool is_routed_expert(std::string_view name) { return name.find(".experts.") != name.npos; }

void read_in(const std::vector<Tensor>& mapped, const std::function<void(uint64_t, uint64_t)>& progress) {
  constexpr uint64_t kPiece = 32 << 20;
  struct Piece {
    char* at;
    uint64_t bytes;
  };
  std::vector<Piece> pieces;
  uint64_t total = 0, done = 0;
  for (const Tensor& t : mapped) {
    const uintptr_t first = reinterpret_cast<uintptr_t>(t.data()), begin = first / kPage * kPage, end = first + t.bytes();
    for (uintptr_t at = begin; at < end; at += kPiece) pieces.push_back({reinterpret_cast<char*>(at), std::min<uint64_t>(kPiece, end - at)});
    total += end - begin;
  }
  const int64_t at_once = 16, n = int64_t(pieces.size());
  for (int64_t i = 0; i < n; i += at_once) {
    const int64_t count = std::min(at_once, n - i);
    parallel_for(count, [&](int64_t j) {
      const Piece& p = pieces[size_t(i + j)];
#ifdef MADV_POPULATE_READ
      if (madvise(p.at, p.bytes, MADV_POPULATE_READ) == 0) return;
#endif
      for (uint64_t k = 0; k < p.bytes; k += kPage) static_cast<void>(*const_cast<volatile char*>(p.at + k));  // an older kernel
    });
    for (int64_t j = 0; j < count; ++j) done += pieces[size_t(i + j)].bytes;
    if (progress) progress(done, total);
  }
}

void check_all_scales(Model& model, const Snapshot& snapshot, const std::vector<StoredParam>& found) {
  std::vector<std::pair<Param*, const StoredParam*>> list;
  size_t next = 0;
  for (Param& p : model.params().all()) {
    const StoredParam& at = found[next++];
    if (at.scale && p.scale.has_data() && p.scale.dtype() == DType::u8 && !p.scales_checked) list.emplace_back(&p, &at);
  }
  std::vector<int64_t> bad(list.size(), -1);
  parallel_for(int64_t(list.size()), [&](int64_t i) {
    const Tensor& t = list[size_t(i)].first->scale;
    if (const void* found_at = std::memchr(t.data(), 255, t.bytes()))
      bad[size_t(i)] = static_cast<const char*>(found_at) - static_cast<const char*>(t.data());
  });
  for (size_t i = 0; i < list.size(); ++i) {
    const StoredTensor& t = *list[i].second->scale;
    K3_CHECK(bad[i] < 0, "[checkpoint] {} in {} holds 255 (not a number) at {}; the file is damaged, download it again", t.name, snapshot.file_of(t),
             bad[i]);
    list[i].first->scales_checked = true;
  }
}

void give_back(const Tensor& t) {
  const uintptr_t first = reinterpret_cast<uintptr_t>(t.data()), begin = (first + kPage - 1) / kPage * kPage,
                  end = (first + t.bytes()) / kPage * kPage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

}  // namespace k3

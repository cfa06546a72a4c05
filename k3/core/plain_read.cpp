#include "k3/core/plain_read.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "k3/core/threads.h"

namespace k3 {

namespace {
constexpr int64_t kPiece = 1 << 20;
}

PlainRead::PlainRead(uint64_t bytes) : memory_(size_t(std::max<uint64_t>(bytes >> 20, 1)) << 20) {
  parallel_blocks(int64_t(memory_.bytes()), kPiece,
                  [&](int64_t a, int64_t b) { std::memset(memory_.data() + a, int(a >> 20 & 127), size_t(b - a)); });
}

double PlainRead::rate() {
  const char* p = memory_.data();
  std::vector<uint64_t> sums(memory_.bytes() / size_t(kPiece));
  const auto start = std::chrono::steady_clock::now();
  parallel_blocks(int64_t(memory_.bytes()), kPiece, [&](int64_t a, int64_t b) {
    typedef uint64_t Words __attribute__((vector_size(64), aligned(8), may_alias));  // as wide as the compiler makes them: nothing but loads
    Words s[4] = {};
    for (int64_t i = a; i < b; i += 256)
      for (int j = 0; j < 4; ++j) s[j] += *reinterpret_cast<const Words*>(p + i + 64 * j);
    uint64_t all = 0;
    for (int j = 0; j < 4; ++j)
      for (int l = 0; l < 8; ++l) all += s[j][l];
    sums[size_t(a / kPiece)] = all;
  });
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  for (uint64_t s : sums) sum_ += s;
  return double(memory_.bytes()) / seconds;
}

}  // namespace k3

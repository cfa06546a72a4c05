#include "k3/tokenizer/learn.h"

#include <algorithm>
#include <queue>
#include <unordered_map>

#include "k3/core/error.h"
#include "k3/core/file.h"
#include "k3/tokenizer/pieces.h"

namespace k3 {
namespace {

struct Hash {
  using is_transparent = void;
  size_t operator()(std::string_view s) const { return std::hash<std::string_view>()(s); }
  size_t operator()(uint64_t pair) const { return size_t((pair * 0x9E3779B97F4A7C15) >> 16); }
};
using Counts = std::unordered_map<std::string, int64_t, Hash, std::equal_to<>>;

// The distinct pieces lie one after the other as linked parts, and every pair knows where it may occur, so a merge costs as much as the pair
// has places. The parts are always what the encoder would make of the pieces. It knows a pair by its joined bytes, the learner by its two
// ids; that is the same: the merges inside a stretch of text that two parts cover are those of that text alone, so its split is unique.
class Learner {
 public:
  explicit Learner(const Counts& pieces) {
    for (int b = 0; b < 256; ++b) tokens.emplace_back(1, char(b));
    size_t bytes = 0;
    for (const auto& [piece, count] : pieces) bytes += piece.size();
    K3_CHECK(bytes < size_t(1) << 31, "[learn] {} bytes of distinct pieces; 2 GiB is the most: learn from a sample", bytes);
    parts_.reserve(bytes);
    for (const auto& [piece, count] : pieces) {
      const int32_t begin = int32_t(parts_.size()), end = begin + int32_t(piece.size());
      for (int32_t i = begin; i < end; ++i)
        parts_.push_back({uint8_t(piece[i - begin]), i > begin ? i - 1 : -1, i + 1 < end ? i + 1 : -1, -1, int32_t(weights_.size())});
      weights_.push_back(count);
      for (int32_t i = begin; i + 1 < end; ++i) add(i);
    }
    offer();
  }

  bool merge() {  // the most frequent pair becomes a token
    while (!queue_.empty()) {
      const auto [count, best] = queue_.top();
      queue_.pop();
      if (pairs_[best].count != count) {
        // it has lost places since it was offered, or was offered again with more
        if (pairs_[best].count > 1 && pairs_[best].count < count) queue_.push({pairs_[best].count, best});
        continue;
      }
      const int32_t rank = int32_t(tokens.size());
      tokens.push_back(pairs_[best].bytes);
      std::vector<int32_t> where = std::move(pairs_[best].where);
      std::sort(where.begin(), where.end());  // leftmost first
      for (const int32_t at : where)
        if (parts_[at].pair == best) join(at, rank);
      offer();
      return true;
    }
    return false;
  }

  std::vector<std::string> tokens;

 private:
  struct Part {
    int32_t id, before, after;
    int32_t pair;  // with the part after it; -1: none
    int32_t piece;
  };
  struct Pair {
    std::string bytes;
    int64_t count = 0;
    bool offered = false;
    std::vector<int32_t> where;  // places it has or had
  };
  struct Offer {
    int64_t count;
    int32_t pair;
  };

  int32_t pair_of(int32_t left, int32_t right) {
    const auto [found, fresh] = pair_of_.try_emplace(uint64_t(left) << 32 | uint32_t(right), int32_t(pairs_.size()));
    if (fresh) pairs_.push_back({.bytes = tokens[left] + tokens[right]});
    return found->second;
  }
  void add(int32_t at) {
    Part& part = parts_[at];
    part.pair = part.after < 0 ? -1 : pair_of(part.id, parts_[part.after].id);
    if (part.pair < 0) return;
    Pair& pair = pairs_[part.pair];
    pair.count += weights_[part.piece];
    pair.where.push_back(at);
    if (!pair.offered) changed_.push_back(part.pair), pair.offered = true;
  }
  void remove(int32_t at) {
    if (at < 0 || parts_[at].pair < 0) return;
    pairs_[parts_[at].pair].count -= weights_[parts_[at].piece];
    parts_[at].pair = -1;
  }
  void join(int32_t at, int32_t rank) {
    Part& part = parts_[at];
    const int32_t gone = part.after;
    remove(at), remove(gone), remove(part.before);
    part.id = rank;
    part.after = parts_[gone].after;
    if (part.after >= 0) parts_[part.after].before = at;
    add(at);
    if (part.before >= 0) add(part.before);
  }
  void offer() {
    for (const int32_t p : changed_) {
      pairs_[p].offered = false;
      if (pairs_[p].count > 1) queue_.push({pairs_[p].count, p});
    }
    changed_.clear();
  }

  std::vector<Part> parts_;
  std::vector<int64_t> weights_;  // by piece: how often the text has it
  std::vector<Pair> pairs_;
  std::unordered_map<uint64_t, int32_t, Hash> pair_of_;  // by ids
  std::vector<int32_t> changed_;
  struct Later {
    const std::vector<Pair>* pairs;
    bool operator()(const Offer& a, const Offer& b) const {
      return a.count != b.count ? a.count < b.count : (*pairs)[a.pair].bytes > (*pairs)[b.pair].bytes;
    }
  };
  std::priority_queue<Offer, std::vector<Offer>, Later> queue_{Later{&pairs_}};
};

}  // namespace

Tokenizer learn(int32_t ranks, const std::function<void(const AddText&)>& documents) {
  K3_CHECK(ranks >= 256, "[learn] ranks is {}; the 256 single bytes come first", ranks);
  Counts pieces;
  documents([&](std::string_view text) {
    for (Pieces p(text); p.next();) {
      const auto found = pieces.find(p.piece());
      ++(found != pieces.end() ? found : pieces.emplace(p.piece(), 0).first)->second;
    }
  });
  Learner learner(pieces);
  while (int32_t(learner.tokens.size()) < ranks && learner.merge()) {}
  return Tokenizer(learner.tokens);
}

Tokenizer learn_files(int32_t ranks, const std::vector<std::string>& paths) {
  return learn(ranks, [&](const AddText& add) {
    for (const std::string& path : paths) add(MappedFile(path).text());
  });
}

}  // namespace k3

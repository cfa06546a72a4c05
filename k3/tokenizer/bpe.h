#pragma once
// Byte pair encoding with ranks: the table of byte strings, and how a piece of text becomes ids (model.md 7.2, step 3).
//
// A piece that is in the table is one id. Otherwise it starts as single bytes, and the neighbouring pair whose bytes together have the
// lowest rank is joined, leftmost first on ties, until no joined pair is in the table. Ranks are ids. Every part is itself in the table,
// so a pair of ids stands for its bytes: `join` holds every way to split a token in two tokens (a merge list holds one and is lossy).
// Long pieces keep their pairs in a heap: n log n.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace k3 {

class Bpe {
 public:
  explicit Bpe(const std::vector<std::string>& tokens);  // tokens[rank]; all 256 single bytes must be among them, none twice, none empty

  int32_t size() const { return int32_t(begin_.size()) - 1; }
  std::string_view bytes(int32_t rank) const { return std::string_view(text_).substr(begin_[rank], begin_[rank + 1] - begin_[rank]); }
  int32_t find(std::string_view bytes) const;                            // rank, or -1
  int32_t join(int32_t left, int32_t right) const;                       // rank of both together, or -1
  void encode(std::string_view piece, std::vector<int32_t>& ids) const;  // appends

 private:
  struct Join {
    uint64_t pair = ~uint64_t(0);
    int32_t rank = -1;
  };
  void encode_short(std::string_view piece, std::vector<int32_t>& ids) const;
  void encode_long(std::string_view piece, std::vector<int32_t>& ids) const;

  std::string text_;                   // the bytes of all tokens, one after the other
  std::vector<uint32_t> begin_ = {0};  // (size + 1) where each begins in text_
  std::vector<int32_t> find_;          // open addressing by bytes
  std::vector<Join> join_;             // open addressing by pair
  int32_t byte_[256] = {};             // rank of each single byte
};

}  // namespace k3

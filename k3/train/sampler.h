#pragma once
// Which tokens a step sees: a pure function of (documents, seed, step). Nothing is remembered, so a run resumes anywhere.
//
// In each epoch the training documents stand in an order drawn from (seed, epoch), one after the other; epochs follow each other without a
// gap. Step t is tokens t B .. (t+1) B - 1 of that stream, in rows of `sequence_length`. State and attention begin anew at each document
// and at each row, so no sequence is longer than a row and none crosses a border. A token's target is the next one of its document; the
// last one, [EOS], has none. There is no padding.
#include <cstdint>
#include <span>
#include <vector>

#include "k3/core/batch.h"
#include "k3/train/token_file.h"

namespace k3 {

// Held out is what the content of a document says: copies of it stay together, and other documents don't matter.
struct Split {
  std::vector<int64_t> train, held_out;  // documents, in file order
};
Split split_documents(const TokenFile& file, double held_out);

struct TokenBatch {
  std::vector<int32_t> ids, targets;  // (N) each; kIgnored: no target
  Batch batch;
  int64_t counted = 0;  // targets that count
  // One piece of a document to each sequence of `batch`.
  struct Piece {
    int64_t document, from, length;
  };
  std::vector<Piece> pieces;
  void add(const TokenFile& file, const Piece& piece);
};

// What multi-token prediction sees of a batch: row t reads the next token, x_t+1, and is asked for x_t+2. Both must lie in t's piece; a row
// without a next token is padding.
struct NextTokens {
  std::vector<int32_t> ids, targets;  // (N) each
  Batch batch;
  int64_t counted = 0;
  explicit NextTokens(const TokenBatch& b);  // of a batch without tokens: shapes only
};

class Sampler {
 public:
  Sampler(const TokenFile& file, std::vector<int64_t> documents, uint64_t seed, int64_t sequence_length);
  // Tokens first .. first + count - 1 of the stream; both multiples of sequence_length.
  TokenBatch tokens(int64_t first, int64_t count);
  int64_t epoch_tokens() const { return epoch_tokens_; }

 private:
  void open_epoch(int64_t epoch);
  const TokenFile& file_;
  std::vector<int64_t> documents_;
  uint64_t seed_;
  int64_t row_, epoch_tokens_ = 0;
  // Of the epoch looked at last; only to save time.
  int64_t epoch_ = -1;
  std::vector<int64_t> order_, begin_;  // documents in order, and where each begins in the epoch
};

}  // namespace k3

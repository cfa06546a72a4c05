#pragma once
// TokenFile: all documents as ids in one mapped file, written once and reused while nothing changed.
//
//   32 bytes   "K3TOKENS", version u32, bytes of an id u32 (4), vocabulary u64, tokenizer hash u64
//   ids        i32 each, all documents one after the other; a document ends with [EOS]
//   borders    u64 (documents + 1)
//   origin     JSON: separator, sources with size, time and checksum
//   48 bytes   tokens u64, documents u64, bytes of origin u64, checksum of the content u64 (header, ids, borders), of the file u64, "K3TOKEND"
//
// The last line comes last, so a file that was cut has none. Errors: cut, damaged, another width, vocabulary or tokenizer, and an id
// outside the vocabulary, each with what and where.
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "k3/core/file.h"
#include "k3/tokenizer/tokenizer.h"
#include "k3/train/corpus.h"

namespace k3 {

class TokenFile {
 public:
  explicit TokenFile(const std::string& path);  // opens and checks all of it
  std::span<const int32_t> ids() const { return {ids_, size_t(tokens_)}; }
  int64_t tokens() const { return tokens_; }
  int64_t documents() const { return int64_t(borders_.size()) - 1; }
  std::span<const int32_t> document(int64_t d) const { return ids().subspan(size_t(borders_[size_t(d)]), size_t(length(d))); }
  int64_t length(int64_t d) const { return borders_[size_t(d) + 1] - borders_[size_t(d)]; }
  uint64_t checksum() const { return checksum_; }  // of ids, borders and tokenizer, not of where they came from
  const std::vector<Source>& sources() const { return sources_; }
  const std::string& separator() const { return separator_; }
  const std::string& path() const { return path_; }
  void check_tokenizer(const Tokenizer& tokenizer) const;

 private:
  std::string path_;
  MappedFile file_;
  const int32_t* ids_ = nullptr;
  int64_t tokens_ = 0;
  std::vector<int64_t> borders_;
  uint64_t vocabulary_ = 0, tokenizer_hash_ = 0, checksum_ = 0;
  std::string separator_;
  std::vector<Source> sources_;
};

// Appears complete or not at all.
class TokenWriter {
 public:
  TokenWriter(const std::string& path, uint64_t vocabulary, uint64_t tokenizer_hash);
  void add(std::span<const int32_t> ids);  // more of the current document
  void end_document();
  void commit(const std::vector<Source>& sources, const std::string& separator);

 private:
  void put(const void* data, size_t bytes);
  AtomicFile file_;
  std::vector<int32_t> pending_;
  std::vector<int64_t> borders_ = {0};
  int64_t tokens_ = 0;
  uint64_t checksum_ = 0;
};

using BytesDone = std::function<void(uint64_t done, uint64_t of)>;

// Tokenises `sources` into the file at `path`. The bits depend on the sources' content, the separator and the tokenizer alone.
void write_token_file(const std::string& path, std::vector<Source> sources, const std::string& separator, const Tokenizer& tokenizer,
                      const BytesDone& progress = {});

// Opens the file at `path` if it was made from these very sources (size and time), separator and tokenizer; otherwise writes it anew.
struct Prepared {
  TokenFile file;
  bool reused;
};
Prepared prepare_token_file(const std::string& path, const std::vector<Source>& sources, const std::string& separator, const Tokenizer& tokenizer,
                            const BytesDone& progress = {});

// What is different between the sources of a token file and those given now, in words; empty when nothing is. Where only the time differs,
// the content is read and decides.
std::string difference(const TokenFile& file, const std::vector<Source>& now);

}  // namespace k3

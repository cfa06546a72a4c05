#include "k3/train/token_file.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "k3/core/error.h"

namespace k3 {

using nlohmann::json;

namespace {

constexpr char kBegin[8] = {'K', '3', 'T', 'O', 'K', 'E', 'N', 'S'}, kEnd[8] = {'K', '3', 'T', 'O', 'K', 'E', 'N', 'D'};
constexpr size_t kBlock = size_t(1) << 20;  // ids; the checksum is chained over blocks of this many

struct Header {
  char magic[8];
  uint32_t version, id_bytes;
  uint64_t vocabulary, tokenizer_hash;
};
struct Footer {
  uint64_t tokens, documents, origin_bytes, content_checksum, file_checksum;
  char magic[8];
};
static_assert(sizeof(Header) == 32 && sizeof(Footer) == 48);

}  // namespace

TokenFile::TokenFile(const std::string& path) : path_(path), file_(path) {
  const char* p = file_.data();
  const size_t size = file_.size();
  Header h;
  Footer f;
  K3_CHECK(size >= sizeof h + sizeof f, "[data] {} has {} bytes and is no token file; remove it and run again", path, size);
  std::memcpy(&h, p, sizeof h);
  std::memcpy(&f, p + size - sizeof f, sizeof f);
  K3_CHECK(std::memcmp(h.magic, kBegin, 8) == 0 && h.version == 1, "[data] {} is no token file of this version; remove it and run again", path);
  K3_CHECK(h.id_bytes == 4, "[data] {} stores ids of {} bytes, but ids have 4 (16 bits cannot hold a vocabulary of 163840); remove it and run again",
           path, h.id_bytes);
  K3_CHECK(std::memcmp(f.magic, kEnd, 8) == 0, "[data] {} is cut: its last bytes are missing; remove it and run again", path);
  const uint64_t room = size - sizeof h - sizeof f;
  K3_CHECK(f.tokens <= room / 4 && f.documents <= room / 8 && f.origin_bytes <= room && f.tokens * 4 + (f.documents + 1) * 8 + f.origin_bytes == room,
           "[data] {} must have {} tokens in {} documents but its {} bytes don't fit that; it is damaged, remove it and run again", path, f.tokens,
           f.documents, size);
  ids_ = reinterpret_cast<const int32_t*>(p + sizeof h);
  tokens_ = int64_t(f.tokens);
  vocabulary_ = h.vocabulary, tokenizer_hash_ = h.tokenizer_hash, checksum_ = f.content_checksum;
  uint64_t sum = k3::checksum(&h, sizeof h);
  for (size_t at = 0; at < f.tokens; at += kBlock) sum = k3::checksum(ids_ + at, std::min<size_t>(kBlock, f.tokens - at) * 4, sum);
  const char* q = p + sizeof h + f.tokens * 4;
  borders_.resize(f.documents + 1);
  std::memcpy(borders_.data(), q, borders_.size() * 8);
  sum = k3::checksum(borders_.data(), borders_.size() * 8, sum);
  q += borders_.size() * 8;
  K3_CHECK(sum == f.content_checksum && k3::checksum(q, f.origin_bytes, sum) == f.file_checksum,
           "[data] {} is damaged: its checksum is not that of its content; remove it and run again", path);
  for (int64_t i = 0; i < tokens_; ++i)
    K3_CHECK(ids_[i] >= 0 && uint64_t(ids_[i]) < h.vocabulary,
             "[data] {}: token {} is id {}, but the vocabulary has {}; remove the file and run again", path, i, ids_[i], h.vocabulary);
  bool rising = borders_.front() == 0 && borders_.back() == tokens_;
  for (size_t d = 1; d < borders_.size(); ++d) rising &= borders_[d] > borders_[d - 1];
  K3_CHECK(rising, "[data] {}: the document borders do not rise from 0 to {}; remove the file and run again", path, tokens_);
  json origin = json::parse(q, q + f.origin_bytes, nullptr, false);
  K3_CHECK(origin.is_object(), "[data] {} does not say what it was made from; remove it and run again", path);
  separator_ = origin.value("separator", "");
  for (const json& s : origin["sources"])
    sources_.push_back({s["path"].get<std::string>(), s["bytes"].get<uint64_t>(), s["modified"].get<int64_t>(), s["checksum"].get<uint64_t>()});
}

void TokenFile::check_tokenizer(const Tokenizer& tokenizer) const {
  K3_CHECK(vocabulary_ == uint64_t(tokenizer.vocabulary()),
           "[data] {} was made with a vocabulary of {} but this tokenizer has {}; give the matching one", path_, vocabulary_, tokenizer.vocabulary());
  K3_CHECK(tokenizer_hash_ == tokenizer.hash(),
           "[data] {} was made with another tokenizer of the same size; give the matching one, or remove the file", path_);
}

TokenWriter::TokenWriter(const std::string& path, uint64_t vocabulary, uint64_t tokenizer_hash) : file_(path) {
  Header h{{}, 1, 4, vocabulary, tokenizer_hash};
  std::memcpy(h.magic, kBegin, 8);
  checksum_ = checksum(&h, sizeof h);
  file_.write(&h, sizeof h);
}

void TokenWriter::put(const void* data, size_t bytes) {
  checksum_ = checksum(data, bytes, checksum_);
  file_.write(data, bytes);
}

void TokenWriter::add(std::span<const int32_t> ids) {
  while (!ids.empty()) {
    size_t n = std::min(ids.size(), kBlock - pending_.size());
    pending_.insert(pending_.end(), ids.begin(), ids.begin() + std::ptrdiff_t(n));
    tokens_ += int64_t(n);
    ids = ids.subspan(n);
    if (pending_.size() == kBlock) put(pending_.data(), kBlock * 4), pending_.clear();
  }
}

void TokenWriter::end_document() {
  if (tokens_ > borders_.back()) borders_.push_back(tokens_);
}

void TokenWriter::commit(const std::vector<Source>& sources, const std::string& separator) {
  if (!pending_.empty()) put(pending_.data(), pending_.size() * 4);
  put(borders_.data(), borders_.size() * 8);
  json list = json::array();
  for (const Source& s : sources) list.push_back({{"path", s.path}, {"bytes", s.bytes}, {"modified", s.modified}, {"checksum", s.checksum}});
  std::string origin = json{{"separator", separator}, {"sources", list}}.dump(-1, ' ', true, json::error_handler_t::replace);
  Footer f{uint64_t(tokens_), borders_.size() - 1, origin.size(), checksum_, 0, {}};
  put(origin.data(), origin.size());
  f.file_checksum = checksum_;
  std::memcpy(f.magic, kEnd, 8);
  file_.write(&f, sizeof f);
  file_.commit();
}

void write_token_file(const std::string& path, std::vector<Source> sources, const std::string& separator, const Tokenizer& tokenizer,
                      const BytesDone& progress) {
  TokenWriter out(path, uint64_t(tokenizer.vocabulary()), tokenizer.hash());
  uint64_t total = 0;
  for (const Source& s : sources) total += s.bytes;
  std::vector<int32_t> ids;
  DocumentSink sink;
  sink.text = [&](std::string_view part) {
    ids.clear();
    tokenizer.encode(part, ids);
    out.add(ids);
  };
  sink.end = [&] {
    int32_t eos = tokenizer.eos();
    out.add({&eos, 1});
    out.end_document();
  };
  if (progress) sink.progress = [&](uint64_t done) { progress(done, total); };
  read_documents(sources, separator, sink);
  out.commit(sources, separator);
}

Prepared prepare_token_file(const std::string& path, const std::vector<Source>& sources, const std::string& separator, const Tokenizer& tokenizer,
                            const BytesDone& progress) {
  if (std::filesystem::exists(path)) {
    try {
      TokenFile file(path);
      file.check_tokenizer(tokenizer);
      bool same = file.separator() == separator && file.sources().size() == sources.size();
      for (size_t i = 0; same && i < sources.size(); ++i) {
        const Source &a = file.sources()[i], &b = sources[i];
        same = a.path == b.path && a.bytes == b.bytes && a.modified == b.modified;
      }
      if (same) return {std::move(file), true};
    } catch (const Error&) {
      // damaged, or of another tokenizer: the sources are here, so it is made anew
    }
  }
  write_token_file(path, sources, separator, tokenizer, progress);
  return {TokenFile(path), false};
}

std::string difference(const TokenFile& file, const std::vector<Source>& now) {
  std::map<std::string, const Source*> before, after;
  for (const Source& s : file.sources()) before[s.path] = &s;
  for (const Source& s : now) after[s.path] = &s;
  for (const auto& [path, s] : before) {
    auto it = after.find(path);
    if (it == after.end()) return path + " is no longer among the data";
    const Source& t = *it->second;
    if (s->bytes != t.bytes) return fmt::format("{} had {} bytes and now has {}", path, s->bytes, t.bytes);
    if (s->modified != t.modified && s->checksum != checksum_of_file(path)) return path + " has other content than before";
  }
  for (const auto& [path, s] : after)
    if (!before.count(path)) return path + " is new";
  for (size_t i = 0; i < now.size(); ++i)
    if (now.size() != file.sources().size() || now[i].path != file.sources()[i].path) return "the files come in another order";
  return "";
}

}  // namespace k3

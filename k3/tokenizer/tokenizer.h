#pragma once
// Tokenizer: text to ids and back, as the published tiktoken.model defines it (model.md 7.1-7.3).
//
//   Tokenizer t = Tokenizer::load(model_folder);      // or Tokenizer::bytes(), or learn() in learn.h
//   std::vector<int32_t> ids = t.encode("Hi");        // never a special token, whatever the text says; no BOS or EOS is added
//   std::string text = t.decode(ids);                 // decode(encode(text)) == text for any bytes
//
// Ids: ranks 0..n-1 of the table, then 256 specials n..n+255. A special that tokenizer_config.json doesn't name is
// <|reserved_token_ID|>. All methods are const and safe to call from many threads.
// Errors: damaged files (with the line), an id outside 0..vocabulary()-1.
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "k3/tokenizer/bpe.h"

namespace k3 {

class Tokenizer {
 public:
  static constexpr int32_t kSpecials = 256;

  // tokens[rank] = bytes. The specials are named as in K3: [BOS], [EOS], <|end_of_msg|>, <|open|>, <|close|>, <|sep|>, ...
  explicit Tokenizer(const std::vector<std::string>& tokens);
  static Tokenizer bytes();                          // 256 single bytes: id = byte; then the specials; vocabulary 512
  static Tokenizer load(const std::string& folder);  // tiktoken.model, tokenizer_config.json
  void save(const std::string& folder) const;        // the same two files; what load read is written back unchanged

  std::vector<int32_t> encode(std::string_view text) const;
  void encode(std::string_view text, std::vector<int32_t>& ids) const;     // appends
  std::vector<int32_t> encode_with_specials(std::string_view text) const;  // trusted text only: names of specials become their ids
  std::string decode(std::span<const int32_t> ids, bool show_specials = false) const;

  int32_t vocabulary() const { return bpe_.size() + kSpecials; }
  int32_t ranks() const { return bpe_.size(); }
  bool is_special(int32_t id) const { return id >= ranks() && id < vocabulary(); }
  std::string_view token_bytes(int32_t id) const;  // empty for a special
  std::string_view name(int32_t id) const;         // of a special
  std::string label(int32_t id) const;             // printable: the name of a special, or the bytes with everything odd escaped
  std::optional<int32_t> special(std::string_view name) const;
  int32_t bos() const { return named("bos_token", bos_); }  // an Error when tokenizer_config.json names none
  int32_t eos() const { return named("eos_token", eos_); }
  bool has_eos() const { return eos_ >= 0; }
  int32_t pad() const { return named("pad_token", pad_); }
  uint64_t hash() const { return hash_; }  // of all tokens and names: stands in data files, so that ids meet the right tokenizer
  const Bpe& bpe() const { return bpe_; }

 private:
  Tokenizer(const std::vector<std::string>& tokens, std::string config);
  int32_t named(const char* key, int32_t id) const;

  Bpe bpe_;
  std::vector<std::string> names_;  // (256)
  std::map<std::string, int32_t, std::less<>> special_;
  int32_t bos_ = -1, eos_ = -1, pad_ = -1;
  uint64_t hash_ = 0;
  std::string config_;  // tokenizer_config.json, word for word
};

}  // namespace k3

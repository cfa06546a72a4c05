#include "k3/tokenizer/tokenizer.h"

#include "k3/core/error.h"
#include "k3/tokenizer/pieces.h"
#include "k3/tokenizer/unicode.h"

namespace k3 {
namespace {

std::vector<std::string> single_bytes() {
  std::vector<std::string> tokens;
  for (int b = 0; b < 256; ++b) tokens.emplace_back(1, char(b));
  return tokens;
}

}  // namespace

Tokenizer Tokenizer::bytes() { return Tokenizer(single_bytes()); }

std::vector<int32_t> Tokenizer::encode(std::string_view text) const {
  std::vector<int32_t> ids;
  ids.reserve(text.size() / 4 + 1);
  encode(text, ids);
  return ids;
}

void Tokenizer::encode(std::string_view text, std::vector<int32_t>& ids) const {
  for (Pieces p(text); p.next();) bpe_.encode(p.piece(), ids);
}

std::vector<int32_t> Tokenizer::encode_with_specials(std::string_view text) const {
  std::vector<int32_t> ids;
  size_t from = 0;  // ordinary text since the last special
  for (size_t at = 0; at < text.size();) {
    const std::pair<const std::string, int32_t>* found = nullptr;  // the longest name that matches here
    for (auto it = special_.upper_bound(text.substr(at)); !found && it != special_.begin() && (--it)->first[0] == text[at];)
      if (text.substr(at).starts_with(it->first)) found = &*it;
    if (!found) {
      ++at;
      continue;
    }
    encode(text.substr(from, at - from), ids);
    ids.push_back(found->second);
    from = at += found->first.size();
  }
  encode(text.substr(from), ids);
  return ids;
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool show_specials) const {
  std::string text;
  for (const int32_t id : ids) {
    text += token_bytes(id);
    if (show_specials && is_special(id)) text += name(id);
  }
  return text;
}

std::string_view Tokenizer::token_bytes(int32_t id) const {
  K3_CHECK(id >= 0 && id < vocabulary(), "[tokenizer] there is no token {}: ids are 0 to {}", id, vocabulary() - 1);
  return id < ranks() ? bpe_.bytes(id) : std::string_view();
}

std::string_view Tokenizer::name(int32_t id) const {
  K3_CHECK(is_special(id), "[tokenizer] {} is no special token: those are {} to {}", id, ranks(), vocabulary() - 1);
  return names_[id - ranks()];
}

std::string Tokenizer::label(int32_t id) const {
  const std::string_view bytes = token_bytes(id);
  if (is_special(id)) return names_[id - ranks()];
  std::string out;
  for (size_t at = 0; at < bytes.size();) {
    const Char c = char_at(bytes, at);
    const bool plain = c.bits && c.code >= 0x20 && (c.code < 0x7F || c.code > 0xA0) && (c.code == ' ' || !(c.bits & unicode::kSpace));
    if (c.code == '\n')
      out += "\\n";
    else if (c.code == '\t')
      out += "\\t";
    else if (c.code == '\r')
      out += "\\r";
    else if (c.code == '\\')
      out += "\\\\";
    else if (plain)
      out += bytes.substr(at, c.length);
    else
      for (int i = 0; i < c.length; ++i) out += fmt::format("\\x{:02x}", uint8_t(bytes[at + i]));
    at += c.length;
  }
  return out;
}

std::optional<int32_t> Tokenizer::special(std::string_view name) const {
  const auto it = special_.find(name);
  return it == special_.end() ? std::nullopt : std::optional(it->second);
}

int32_t Tokenizer::named(const char* key, int32_t id) const {
  K3_CHECK(id >= 0, "[tokenizer] tokenizer_config.json names no {}", key);
  return id;
}

}  // namespace k3

// The two files of a tokenizer: tiktoken.model (lines of base64, space, rank) and tokenizer_config.json (names of the specials).
#include <algorithm>
#include <charconv>
#include <filesystem>

#include <nlohmann/json.hpp>

#include "k3/core/error.h"
#include "k3/core/file.h"
#include "k3/tokenizer/tokenizer.h"

namespace k3 {
namespace {

using Json = nlohmann::ordered_json;
constexpr char kAlphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

std::string to_base64(std::string_view bytes) {
  std::string out;
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t v = 0;
    for (size_t j = 0; j < 3; ++j) v = v << 8 | (i + j < bytes.size() ? uint8_t(bytes[i + j]) : 0);
    for (size_t j = 0; j < 4; ++j) out += i + j > bytes.size() ? '=' : kAlphabet[v >> (18 - 6 * j) & 63];
  }
  return out;
}

bool from_base64(std::string_view text, std::string& bytes) {
  bytes.clear();
  if (text.empty() || text.size() % 4) return false;
  const size_t pads = text.ends_with("==") ? 2 : text.ends_with("=") ? 1 : 0;
  for (size_t i = 0; i < text.size(); i += 4) {
    uint32_t v = 0;
    for (size_t j = i; j < i + 4; ++j) {
      const char* digit = j + pads >= text.size() ? kAlphabet : std::char_traits<char>::find(kAlphabet, 64, text[j]);
      if (!digit) return false;
      v = v << 6 | uint32_t(digit - kAlphabet);
    }
    for (int j = 16; j >= 0; j -= 8) bytes += char(v >> j);
  }
  bytes.resize(bytes.size() - pads);
  return to_base64(bytes) == text;  // one spelling only
}

std::vector<std::string> parse_ranks(std::string_view text, const std::string& name) {
  std::vector<std::string> tokens;
  std::vector<int> line_of;  // by rank; 0: not seen
  std::string bytes;
  for (int line = 1; !text.empty(); ++line) {
    const std::string_view row = text.substr(0, text.find('\n'));
    const bool cut = row.size() == text.size();  // no newline at its end
    text.remove_prefix(std::min(text.size(), row.size() + 1));
    if (row.empty() && text.empty()) break;
    const size_t space = row.find(' ');
    int32_t rank = -1;
    const char* end = row.data() + row.size();
    const bool number = space != row.npos && std::from_chars(row.data() + space + 1, end, rank).ptr == end && rank >= 0 && space + 1 < row.size();
    const bool parsed = number && from_base64(row.substr(0, space), bytes);
    K3_CHECK(!cut || (parsed && (size_t(rank) >= line_of.size() || !line_of[rank])),
             "[tokenizer] {}:{}: the file ends inside this line, \"{}\"; it was cut off, copy it again", name, line, row.substr(0, 60));
    K3_CHECK(parsed, "[tokenizer] {}:{}: expected base64, a space and a rank, found \"{}\"", name, line, row.substr(0, 60));
    K3_CHECK(rank < 1 << 24, "[tokenizer] {}:{}: rank {} is too large", name, line, rank);
    if (size_t(rank) >= tokens.size()) tokens.resize(rank + 1), line_of.resize(rank + 1);
    K3_CHECK(!line_of[rank], "[tokenizer] {}:{}: rank {} was given before, in line {}", name, line, rank, line_of[rank]);
    tokens[rank] = bytes;
    line_of[rank] = line;
  }
  K3_CHECK(!tokens.empty(), "[tokenizer] {} is empty", name);
  for (size_t rank = 0; rank < tokens.size(); ++rank)
    K3_CHECK(line_of[rank], "[tokenizer] {}: no line has rank {}, but line {} has rank {}; ranks must leave no gap", name, rank, line_of.back(),
             tokens.size() - 1);
  std::map<std::string_view, size_t> seen;
  for (size_t rank = 0; rank < tokens.size(); ++rank) {
    const auto [it, fresh] = seen.emplace(tokens[rank], rank);
    K3_CHECK(fresh, "[tokenizer] {}:{}: the same bytes as in line {}", name, line_of[rank], line_of[it->second]);
  }
  for (int b = 0; b < 256; ++b)
    K3_CHECK(seen.contains(std::string(1, char(b))), "[tokenizer] {}: the single byte {:#04x} ({}) has no line; all 256 must", name, b,
             to_base64(std::string(1, char(b))));
  return tokens;
}

// K3's own names and places, counted from the first special.
std::string config_as_k3(int32_t ranks) {
  static constexpr std::pair<int, const char*> kNames[] = {{0, "[BOS]"},
                                                           {1, "[EOS]"},
                                                           {2, "<|end_of_msg|>"},
                                                           {3, "<|open|>"},
                                                           {4, "<|close|>"},
                                                           {5, "<|sep|>"},
                                                           {6, "[start_header_id]"},
                                                           {7, "[end_header_id]"},
                                                           {9, "[EOT]"},
                                                           {18, "<|media_begin|>"},
                                                           {19, "<|media_content|>"},
                                                           {20, "<|media_end|>"},
                                                           {21, "<|media_pad|>"},
                                                           {65, "<osagent_mode>"},
                                                           {254, "[UNK]"},
                                                           {255, "[PAD]"}};
  Json added = Json::object();
  for (const auto& [place, name] : kNames)
    added[std::to_string(ranks + place)] = {{"content", name}, {"lstrip", false},      {"normalized", false},
                                            {"rstrip", false}, {"single_word", false}, {"special", place < 3 || place > 5}};
  const Json config = {
      {"added_tokens_decoder", added}, {"bos_token", "[BOS]"}, {"eos_token", "[EOS]"}, {"pad_token", "[PAD]"}, {"unk_token", "[UNK]"}};
  return config.dump(2) + "\n";
}

}  // namespace

Tokenizer::Tokenizer(const std::vector<std::string>& tokens) : Tokenizer(tokens, config_as_k3(int32_t(tokens.size()))) {}

Tokenizer::Tokenizer(const std::vector<std::string>& tokens, std::string config) : bpe_(tokens), config_(std::move(config)) {
  const Json json = Json::parse(config_, nullptr, false);
  K3_CHECK(json.is_object(), "[tokenizer] tokenizer_config.json is not a JSON object");
  names_.resize(kSpecials);
  const auto added = json.find("added_tokens_decoder");
  K3_CHECK(added == json.end() || added->is_object(), "[tokenizer] tokenizer_config.json: added_tokens_decoder must be an object");
  if (added != json.end())
    for (const auto& [key, token] : added->items()) {
      int32_t id = -1;
      const bool number = std::from_chars(key.data(), key.data() + key.size(), id).ptr == key.data() + key.size();
      K3_CHECK(number && is_special(id), "[tokenizer] tokenizer_config.json: added_tokens_decoder has id {}; specials are {} to {}", key, ranks(),
               vocabulary() - 1);
      const bool named = token.is_object() && token.contains("content") && token["content"].is_string() && token["content"] != "";
      K3_CHECK(named, "[tokenizer] tokenizer_config.json: id {} needs a content, a string that is not empty", key);
      names_[id - ranks()] = token["content"];
    }
  for (int32_t id = ranks(); id < vocabulary(); ++id) {
    std::string& name = names_[id - ranks()];
    if (name.empty()) name = fmt::format("<|reserved_token_{}|>", id);
    const auto [it, fresh] = special_.emplace(name, id);
    K3_CHECK(fresh, "[tokenizer] tokenizer_config.json names both {} and {} {}", it->second, id, name);
  }
  for (auto [key, id] : {std::pair{"bos_token", &bos_}, {"eos_token", &eos_}, {"pad_token", &pad_}}) {
    const auto token = json.find(key);
    if (token == json.end() || token->is_null()) continue;
    const Json& name = token->is_object() && token->contains("content") ? (*token)["content"] : *token;
    K3_CHECK(name.is_string() && special(name.get<std::string>()), "[tokenizer] tokenizer_config.json: {} is {}, which names no special", key,
             name.dump());
    *id = *special(name.get<std::string>());
  }
  auto add = [&](std::string_view bytes) { hash_ = checksum(bytes.data(), bytes.size(), hash_ + bytes.size()); };
  for (const std::string& t : tokens) add(t);
  for (const std::string& n : names_) add(n);
}

Tokenizer Tokenizer::load(const std::string& folder) {
  const std::string model = folder + "/tiktoken.model", config = folder + "/tokenizer_config.json";
  for (const std::string& path : {model, config})
    K3_CHECK(std::filesystem::exists(path), "[tokenizer] there is no {}; a model folder holds tiktoken.model and tokenizer_config.json", path);
  return Tokenizer(parse_ranks(read_file(model), model), read_file(config));
}

void Tokenizer::save(const std::string& folder) const {
  std::string model;
  for (int32_t rank = 0; rank < ranks(); ++rank) model += fmt::format("{} {}\n", to_base64(bpe_.bytes(rank)), rank);
  std::filesystem::create_directories(folder);
  write_file(folder + "/tiktoken.model", model);
  write_file(folder + "/tokenizer_config.json", config_);
}

}  // namespace k3

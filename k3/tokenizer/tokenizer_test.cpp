#include "k3/tokenizer/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <map>
#include <random>
#include <set>

#include "k3/core/error.h"
#include "k3/core/file.h"
#include "k3/tokenizer/learn.h"
#include "k3/tokenizer/pieces.h"

namespace k3 {
namespace {

using Ids = std::vector<int32_t>;

auto throws(const std::string& part) { return ::testing::ThrowsMessage<Error>(::testing::HasSubstr(part)); }

// The rule of model.md 7.2, step 3, word for word.
class Rule {
 public:
  explicit Rule(const Tokenizer& t) {
    for (int32_t r = 0; r < t.ranks(); ++r) rank_.emplace(t.token_bytes(r), r);
  }
  Ids operator()(std::string_view piece) const {
    if (const auto whole = rank_.find(piece); whole != rank_.end()) return {whole->second};
    std::vector<std::string> parts;
    for (const char c : piece) parts.emplace_back(1, c);
    for (;;) {
      int32_t lowest = INT32_MAX;
      size_t at = 0;
      for (size_t i = 0; i + 1 < parts.size(); ++i)
        if (const auto it = rank_.find(parts[i] + parts[i + 1]); it != rank_.end() && it->second < lowest) lowest = it->second, at = i;
      if (lowest == INT32_MAX) break;
      parts[at] += parts[at + 1];
      parts.erase(parts.begin() + long(at) + 1);
    }
    Ids ids;
    for (const std::string& p : parts) ids.push_back(rank_.find(p)->second);
    return ids;
  }

 private:
  std::map<std::string, int32_t, std::less<>> rank_;
};

// A table that no list of merges could make: random strings over a small alphabet, so that most tokens can be split in several ways and some
// in none.
Tokenizer random_table(uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::string> tokens;
  for (int b = 0; b < 256; ++b) tokens.emplace_back(1, char(b));
  std::shuffle(tokens.begin(), tokens.end(), random);
  std::set<std::string> seen;
  while (tokens.size() < 400) {
    std::string s;
    for (int n = 2 + int(random() % 4); n > 0; --n) s += "abc"[random() % 3];
    if (seen.insert(s).second) tokens.push_back(s);
  }
  return Tokenizer(tokens);
}

const Tokenizer& learned() {  // some hundred ranks of mixed text
  static const Tokenizer t = learn(700, [](const AddText& add) {
    for (int i = 0; i < 20; ++i)
      add("The quick brown fox jumps over the lazy dog, and the dog's owner isn't amused. 敏捷的棕色狐狸跳过了懒狗。 aaaaaaaaaaaaaaaaaaaa    \n\n");
    add("There is no one who loves pain itself, who seeks after it and wants to have it, simply because it is pain... "
        "没有人喜欢痛苦本身，追求它并想拥有它。");
  });
  return t;
}

std::string folder(const std::string& name) {
  const std::string path = std::filesystem::temp_directory_path() / ("k3_tokenizer_test_" + name + std::to_string(getpid()));
  std::filesystem::remove_all(path);
  std::filesystem::create_directories(path);
  return path;
}

TEST(bpe, short_and_long_pieces_follow_the_rule_word_for_word) {
  for (uint32_t seed = 0; seed < 8; ++seed) {
    const Tokenizer t = random_table(seed);
    const Rule rule(t);
    std::mt19937 random(seed);
    for (int i = 0; i < 60; ++i) {
      std::string piece;
      const int n = i < 50 ? 1 + int(random() % 40) : 90 + int(random() % 60);  // around the border to the heap
      while (int(piece.size()) < n) piece += random() % 20 ? "abc"[random() % 3] : char(random());
      Ids ids;
      t.bpe().encode(piece, ids);
      ASSERT_EQ(ids, rule(piece)) << seed << " " << piece;
    }
  }
}
TEST(bpe, a_whole_piece_in_the_table_needs_no_merges) {
  std::vector<std::string> tokens;
  for (int b = 0; b < 256; ++b) tokens.emplace_back(1, char(b));
  tokens.push_back("abcd");  // no pair leads to it
  const Tokenizer t(tokens);
  EXPECT_EQ(t.encode("abcd"), Ids{256});
  EXPECT_EQ(t.encode("abcde"), (Ids{'a', 'b', 'c', 'd', 'e'}));
}
TEST(bpe, time_grows_linearly_with_a_long_run) {
  auto seconds = [](const std::string& text, bool one_piece) {  // of this process, whatever else the machine does
    double best = 1e9;
    for (int i = 0; i < 3; ++i) {
      const std::clock_t start = std::clock();
      Ids ids;
      one_piece ? learned().bpe().encode(text, ids) : learned().encode(text, ids);
      best = std::min(best, double(std::clock() - start) / CLOCKS_PER_SEC);
    }
    return best;
  };
  std::mt19937 random(3);
  std::string letters(200000, ' '), han;
  for (char& c : letters) c = char('a' + random() % 26);
  while (han.size() < letters.size()) han += "狐";
  for (const std::string& text : {std::string(200000, 'a'), std::string(200000, ' '), han, std::string(200000, '1'), letters})
    for (const bool one_piece : {false, true}) {
      // twenty times the text: n log n gives 27, and caches add to it; a scan of the piece for each merge would give 400
      const double small = seconds(text.substr(0, 10000), one_piece), large = seconds(text, one_piece);
      EXPECT_LT(large, 120 * small + 0.002) << text.substr(0, 3) << one_piece;
    }
}
TEST(bpe, long_runs_get_the_ids_of_the_rule) {
  const Rule rule(learned());
  for (const std::string& text : {std::string(700, 'a'), std::string(700, ' '), std::string(1001, '1')}) {
    Ids expect;
    for (Pieces p(text); p.next();)
      for (const int32_t id : rule(p.piece())) expect.push_back(id);
    EXPECT_EQ(learned().encode(text), expect);
  }
}

TEST(tokenizer, decode_undoes_encode_for_any_bytes) {
  const Tokenizer bytes = Tokenizer::bytes();
  std::mt19937 random(2);
  for (int i = 0; i < 3000; ++i) {
    std::string text;
    for (int n = int(random() % 60); n > 0; --n) text += i % 2 ? char(random()) : "ab 中\xE4\n'1"[random() % 10];
    EXPECT_EQ(learned().decode(learned().encode(text)), text);
    EXPECT_EQ(bytes.decode(bytes.encode(text)), text);
  }
}
TEST(tokenizer, every_token_of_text_encodes_to_bytes_that_decode_to_it) {
  for (int32_t id = 0; id < learned().ranks(); ++id) {
    const std::string bytes(learned().token_bytes(id));
    EXPECT_EQ(learned().decode(Ids{id}), bytes);
    EXPECT_EQ(learned().decode(learned().encode(bytes)), bytes);
    EXPECT_EQ(learned().bpe().find(bytes), id);
  }
}
TEST(tokenizer, bytes_are_their_own_ids) {
  const Tokenizer t = Tokenizer::bytes();
  EXPECT_EQ(t.vocabulary(), 512);
  EXPECT_EQ(t.encode("Hi\xFF"), (Ids{72, 105, 255}));
  EXPECT_EQ(t.bos(), 256);
  EXPECT_EQ(t.eos(), 257);
  EXPECT_EQ(t.special("<|end_of_msg|>"), 258);
  EXPECT_EQ(t.pad(), 511);
}
TEST(tokenizer, every_id_of_the_vocabulary_decodes_and_specials_are_hidden) {
  const Tokenizer& t = learned();
  for (int32_t id = 0; id < t.vocabulary(); ++id) {
    EXPECT_FALSE(t.decode(Ids{id}, true).empty());
    EXPECT_EQ(t.decode(Ids{id}).empty(), t.is_special(id));
    EXPECT_FALSE(t.label(id).empty());
  }
  EXPECT_EQ(t.decode(Ids{'a', t.eos(), 'b'}), "ab");
  EXPECT_EQ(t.decode(Ids{'a', t.eos(), 'b'}, true), "a[EOS]b");
  const int32_t reserved = t.ranks() + 8;
  EXPECT_EQ(t.name(reserved), "<|reserved_token_" + std::to_string(reserved) + "|>");
  for (const int32_t id : {-1, t.vocabulary(), INT32_MAX, INT32_MIN}) {
    EXPECT_THAT([&] { t.decode(Ids{id}); }, throws("there is no token " + std::to_string(id)));
    EXPECT_THAT([&] { t.label(id); }, throws("there is no token"));
  }
}
TEST(tokenizer, text_never_becomes_a_special_token) {
  const Tokenizer& t = learned();
  for (int32_t id = t.ranks(); id < t.vocabulary(); ++id) {
    for (const int32_t got : t.encode("x" + std::string(t.name(id)) + "\n")) EXPECT_LT(got, t.ranks());
    EXPECT_EQ(t.encode_with_specials(t.name(id)), Ids{id});
  }
  Ids expect = t.encode("a ");
  expect.push_back(*t.special("<|open|>"));
  for (const int32_t id : t.encode("<|op [EOS")) expect.push_back(id);
  expect.push_back(*t.special("[EOS]"));
  EXPECT_EQ(t.encode_with_specials("a <|open|><|op [EOS[EOS]"), expect);
}
TEST(tokenizer, labels_are_printable) {
  const Tokenizer t = Tokenizer::bytes();
  EXPECT_EQ(t.label('a') + t.label('\n') + t.label(' ') + t.label(0xE4) + t.label('\\') + t.label(7) + t.label(256), "a\\n \\xe4\\\\\\x07[BOS]");
}

TEST(files, a_saved_tokenizer_is_the_same_one) {
  const std::string to = folder("save");
  learned().save(to);
  const Tokenizer t = Tokenizer::load(to);
  EXPECT_EQ(t.hash(), learned().hash());
  EXPECT_EQ(t.vocabulary(), learned().vocabulary());
  EXPECT_EQ(t.eos(), learned().eos());
  EXPECT_EQ(t.encode("The dog's 狐狸"), learned().encode("The dog's 狐狸"));
  EXPECT_NE(t.hash(), Tokenizer::bytes().hash());
  EXPECT_EQ(read_file(to + "/tiktoken.model").substr(0, 14), "AA== 0\nAQ== 1\n");
  // what it doesn't know stays in the file
  std::string config = read_file(to + "/tokenizer_config.json");
  config.insert(1, "\"chat_template\": \"x\",");
  write_file(to + "/tokenizer_config.json", config);
  const std::string again = folder("again");
  Tokenizer::load(to).save(again);
  EXPECT_EQ(read_file(again + "/tokenizer_config.json"), config);
  std::filesystem::remove_all(to), std::filesystem::remove_all(again);
}
TEST(files, the_hash_sees_tokens_and_names) {
  std::vector<std::string> tokens;
  for (int b = 0; b < 256; ++b) tokens.emplace_back(1, char(b));
  tokens.insert(tokens.end(), {"ab", "cd"});
  const uint64_t one = Tokenizer(tokens).hash();
  std::swap(tokens[256], tokens[257]);
  EXPECT_NE(Tokenizer(tokens).hash(), one);
}
TEST(files, names_come_from_the_config) {
  const std::string in = folder("names");
  Tokenizer::bytes().save(in);
  write_file(
      in + "/tokenizer_config.json",
      R"({"added_tokens_decoder": {"256": {"content": "[BOS]"}, "300": {"content": "<|im_end|>"}}, "eos_token": {"content": "<|im_end|>"}, "pad_token": null})");
  const Tokenizer t = Tokenizer::load(in);
  EXPECT_EQ(t.special("<|im_end|>"), 300);
  EXPECT_EQ(t.eos(), 300);
  EXPECT_EQ(t.special("<|reserved_token_257|>"), 257);
  EXPECT_EQ(t.special("[EOS]"), std::nullopt);
  EXPECT_THAT([&] { t.bos(); }, throws("names no bos_token"));
  const std::pair<const char*, const char*> wrong[] = {
      {"[1]", "not a JSON object"},
      {"{", "not a JSON object"},
      {R"({"added_tokens_decoder": {"255": {"content": "x"}}})", "added_tokens_decoder has id 255; specials are 256 to 511"},
      {R"({"added_tokens_decoder": {"512": {"content": "x"}}})", "added_tokens_decoder has id 512"},
      {R"({"added_tokens_decoder": {"x": {"content": "x"}}})", "added_tokens_decoder has id x"},
      {R"({"added_tokens_decoder": {"256": {"content": ""}}})", "id 256 needs a content"},
      {R"({"added_tokens_decoder": {"256": {"content": "x"}, "257": {"content": "x"}}})", "names both 256 and 257 x"},
      {R"({"added_tokens_decoder": []})", "must be an object"},
      {R"({"eos_token": "[EOS]"})", "eos_token is \"[EOS]\", which names no special"}};
  for (const auto& [config, message] : wrong) {
    write_file(in + "/tokenizer_config.json", config);
    EXPECT_THAT([&] { Tokenizer::load(in); }, throws(message)) << config;
  }
  std::filesystem::remove_all(in);
}
TEST(files, a_damaged_table_is_refused_with_its_line) {
  const std::string in = folder("damaged");
  Tokenizer::bytes().save(in);
  write_file(in + "/tokenizer_config.json", "{}");
  const std::string good = read_file(in + "/tiktoken.model");
  auto load_with = [&](const std::string& text) {
    write_file(in + "/tiktoken.model", text);
    return Tokenizer::load(in);
  };
  EXPECT_EQ(load_with(good).ranks(), 256);
  EXPECT_EQ(load_with(good.substr(0, good.size() - 1)).ranks(), 256) << "without the last line end";
  EXPECT_EQ(load_with("YWI= 256\n" + good).encode("ab"), Ids{256}) << "in any order";
  for (const char* bad :
       {"YWI=256", "YWI= x", "YWI=  256", "YWI= 256 ", "YWI= -1", "YWI= ", " 256", "YW= 256", "Y!I= 256", "YWJ= 256", "", "YWI= 99999999999"})
    EXPECT_THAT([&] { load_with(good + bad + "\nYWM= 257\n"); }, throws("tiktoken.model:257: expected base64, a space and a rank")) << bad;
  for (const std::string part : {"YWI= 25", "YWI= ", "YWI=", "YWI"})
    EXPECT_THAT([&] { load_with(good + part); }, throws(":257: the file ends inside this line, \"" + part + "\"; it was cut off")) << part;
  EXPECT_NO_THROW(load_with(good + "YWI= 256"));  // whole, only the last newline is not there
  EXPECT_THAT([&] { load_with(good + "YWI= 255\n"); }, throws(":257: rank 255 was given before, in line 256"));
  EXPECT_THAT([&] { load_with(good + "YWI= 257\n"); }, throws("no line has rank 256, but line 257 has rank 257"));
  EXPECT_THAT([&] { load_with(good + "/w== 256\n"); }, throws(":257: the same bytes as in line 256"));
  std::string missing = good;
  missing.replace(missing.find("QQ== 65"), 4, "YWI=");
  EXPECT_THAT([&] { load_with(missing); }, throws("the single byte 0x41 (QQ==) has no line"));
  EXPECT_THAT([&] { load_with(""); }, throws("is empty"));
  EXPECT_THAT([&] { load_with(good + "YWI= 999999999\n"); }, throws("rank 999999999 is too large"));
  std::filesystem::remove(in + "/tiktoken.model");
  EXPECT_THAT([&] { Tokenizer::load(in); }, throws("a model folder holds tiktoken.model"));
  std::filesystem::remove_all(in);
}

}  // namespace
}  // namespace k3

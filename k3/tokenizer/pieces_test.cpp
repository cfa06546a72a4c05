#include "k3/tokenizer/pieces.h"

#include <gtest/gtest.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

namespace k3 {
namespace {

using List = std::vector<std::string>;

List pieces(std::string_view text) {
  List out;
  for (Pieces p(text); p.next();) out.emplace_back(p.piece());
  return out;
}

// The pattern itself, run by a backtracking engine. Classes are spelled so that they mean the same there: script Han (not its extensions),
// White_Space.
class Engine {
 public:
  Engine() {
    const std::string s = R"(\x09-\x0D\x20\x85\xA0\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000})";
    const std::string u = R"((?:(?!\p{sc:Han})[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]))", w = R"((?:(?!\p{sc:Han})[\p{Ll}\p{Lm}\p{Lo}\p{M}]))";
    const std::string x = R"([^\r\n\p{L}\p{N}]?)", c = R"((?i:'s|'t|'re|'ve|'m|'ll|'d)?)";
    const std::string pattern = R"(\p{sc:Han}+|)" + x + u + "*" + w + "+" + c + "|" + x + u + "+" + w + "*" + c + R"(|\p{N}{1,3}| ?[^)" + s +
                                R"(\p{L}\p{N}]+[\r\n]*|[)" + s + R"(]*[\r\n]+|[)" + s + "]+(?![^" + s + "])|[" + s + "]+";
    int error = 0;
    size_t at = 0;
    code_ = pcre2_compile(PCRE2_SPTR(pattern.data()), pattern.size(), PCRE2_UTF | PCRE2_UCP, &error, &at, nullptr);
    EXPECT_NE(code_, nullptr) << "error " << error << " at " << at;
    data_ = pcre2_match_data_create_from_pattern(code_, nullptr);
  }
  ~Engine() { pcre2_match_data_free(data_), pcre2_code_free(code_); }
  List pieces(const std::string& text) const {
    List out;
    for (size_t at = 0; at < text.size();) {
      if (pcre2_match(code_, PCRE2_SPTR(text.data()), text.size(), at, PCRE2_ANCHORED, data_, nullptr) < 0) return {"no match"};
      const size_t end = pcre2_get_ovector_pointer(data_)[1];
      out.push_back(text.substr(at, end - at));
      at = end;
    }
    return out;
  }

 private:
  pcre2_code* code_ = nullptr;
  pcre2_match_data* data_ = nullptr;
};

void append_utf8(std::string& out, uint32_t c) {
  if (c < 0x80)
    out += char(c);
  else if (c < 0x800)
    out += {char(0xC0 | c >> 6), char(0x80 | (c & 63))};
  else if (c < 0x10000)
    out += {char(0xE0 | c >> 12), char(0x80 | (c >> 6 & 63)), char(0x80 | (c & 63))};
  else
    out += {char(0xF0 | c >> 18), char(0x80 | (c >> 12 & 63)), char(0x80 | (c >> 6 & 63)), char(0x80 | (c & 63))};
}

// Characters of every class of the pattern, those with trouble more often.
std::string random_text(std::mt19937& random) {
  static constexpr std::pair<uint32_t, uint32_t> kRanges[] = {
      {0x4E00, 0x9FA5}, {0x20000, 0x2A6D6}, {0x2E80, 0x2FD5},   {0x3005, 0x3007}, {0x3021, 0x3029},   {0x3041, 0x30FE}, {0xAC00, 0xD7A3},
      {0x0E01, 0x0E5B}, {0xFF10, 0xFF19},   {0x0966, 0x096F},   {0x2160, 0x2188}, {0x1F300, 0x1F64F}, {0x0300, 0x036F}, {0x0900, 0x0963},
      {0x00C0, 0x024F}, {0x0370, 0x03FF},   {0x10A0, 0x10FF},   {0x01C4, 0x01CC}, {0x1F80, 0x1FAF},   {0x02B0, 0x02FF}, {0x2000, 0x206F},
      {0x3000, 0x303F}, {0x0000, 0x00FF},   {0x16FF0, 0x16FF1}, {0xE000, 0xE100}};
  static const char* const kWords[] = {"'s", "'S", "'\u017F", "'re",    "'LL",    "'",      "\r\n", "\n",     "\r", "\t",
                                       " ",  "  ", "\u00A0",  "\u3000", "\u2028", "\u200D", "A",    "Ab",     "a",  "ABc",
                                       "1",  "12", "\u3007",  "\u4E2D", "\u0301", "/",      "}",    "\u3002", "_",  "\u01C5"};
  std::string text;
  for (int n = int(random() % 12) + 1; n > 0; --n) {
    if (random() % 2) {
      text += kWords[random() % std::size(kWords)];
    } else {
      const auto [low, high] = kRanges[random() % std::size(kRanges)];
      append_utf8(text, low + uint32_t(random() % (high - low + 1)));
    }
  }
  return text;
}

TEST(pieces, equal_those_of_a_backtracking_engine) {
  const Engine engine;
  std::mt19937 random(1);
  for (int i = 0; i < 100000; ++i) {
    const std::string text = random_text(random);
    ASSERT_EQ(pieces(text), engine.pieces(text)) << text;
  }
}

TEST(pieces, han_runs_stand_alone) {
  EXPECT_EQ(pieces("Hello中文world"), (List{"Hello", "中文", "world"}));
  EXPECT_EQ(pieces("我有3个GPU，2024年"), (List{"我有", "3", "个", "GPU", "，", "202", "4", "年"}));
  EXPECT_EQ(pieces(" 中"), (List{" ", "中"}));
  EXPECT_EQ(pieces("𠀀𪜀"), (List{"𠀀𪜀"})) << "beyond the basic plane";
  EXPECT_EQ(pieces("日本語です"), (List{"日本語", "です"})) << "kana are letters without case, but not Han";
  EXPECT_EQ(pieces("人々〇"), (List{"人々〇"}));
  EXPECT_EQ(pieces("1〇"), (List{"1〇"})) << "a Han numeral continues a number";
  EXPECT_EQ(pieces("〇1"), (List{"〇", "1"})) << "but begins a Han run";
}
TEST(pieces, a_contraction_needs_a_word_that_is_not_han) {
  EXPECT_EQ(pieces("it's IT'S we'll d'"), (List{"it's", " IT'S", " we'll", " d", "'"}));
  EXPECT_EQ(pieces("中's"), (List{"中", "'s"}));
  EXPECT_EQ(pieces("a'\u017F"), (List{"a'\u017F"})) << "long s is an s when case is ignored";
  EXPECT_EQ(pieces("a'sx"), (List{"a's", "x"}));
}
TEST(pieces, line_ends_after_punctuation_belong_to_it) {
  EXPECT_EQ(pieces("好。\n\n下"), (List{"好", "。\n\n", "下"}));
  EXPECT_EQ(pieces("}\n///x"), (List{"}\n", "///", "x"})) << "no slash in the tail";
  EXPECT_EQ(pieces("a \r\n\r\n b"), (List{"a", " \r\n\r\n", " b"}));
  EXPECT_EQ(pieces("a   \n   b"), (List{"a", "   \n", "  ", " b"}));
  EXPECT_EQ(pieces("a\t\tb  "), (List{"a", "\t", "\tb", "  "}));
}
TEST(pieces, numbers_come_by_three_and_case_splits_words) {
  EXPECT_EQ(pieces("1234567 １２３４"), (List{"123", "456", "7", " ", "１２３", "４"}));
  EXPECT_EQ(pieces("HTTPServer getURLs"), (List{"HTTPServer", " get", "URLs"}));
  EXPECT_EQ(pieces("camelCase"), (List{"camel", "Case"}));
}
TEST(pieces, marks_joiners_thai_and_hangul_stay_whole) {
  EXPECT_EQ(pieces("e\u0301tude"), (List{"e\u0301tude"}));
  EXPECT_EQ(pieces("\u0301A"), (List{"\u0301", "A"})) << "a mark that fails as a prefix is a word by itself";
  EXPECT_EQ(pieces("สวัสดี 안녕"), (List{"สวัสดี", " 안녕"}));
  EXPECT_EQ(pieces("👩\u200D👩\u200D👧!"), (List{"👩\u200D👩\u200D👧!"}));
}
TEST(pieces, broken_bytes_are_pieces_by_themselves) {
  EXPECT_EQ(pieces("ab\xFF\xFE\xE4\xB8"), (List{"ab", "\xFF\xFE\xE4\xB8"}));
  EXPECT_EQ(pieces("\xC3 \x80z"), (List{"\xC3", " ", "\x80", "z"}));
  EXPECT_EQ(pieces("\xED\xA0\x80"), (List{"\xED\xA0\x80"})) << "a surrogate is no character";
  EXPECT_EQ(pieces("a  \xFF"), (List{"a", " ", " ", "\xFF"})) << "and no white space";
  EXPECT_EQ(pieces(""), List{});
  EXPECT_EQ(pieces(std::string(2, '\0')), (List{std::string(2, '\0')}));
}
TEST(pieces, guards_cut_runs_of_25000_and_slices_of_400000) {
  const std::string a(60000, 'a');
  EXPECT_EQ(pieces(a), (List{a.substr(0, 25000), a.substr(0, 25000), a.substr(0, 10000)}));
  std::string han;
  for (int i = 0; i < 25001; ++i) han += "中";
  EXPECT_EQ(pieces(han), (List{han.substr(3), "中"})) << "characters are counted, not bytes";
  EXPECT_EQ(pieces(a.substr(0, 24999) + " " + a.substr(0, 25001)).size(), 3u) << "the count begins anew when the kind changes";
  std::string words;
  for (int i = 0; i < 133334; ++i) words += "ab ";
  const List cut = pieces(words);
  ASSERT_EQ(cut.size(), 133336u);
  EXPECT_EQ(cut[133333] + "|" + cut[133334] + "|" + cut[133335], " a|b| ") << "character 400,000 ends a slice";
  const List after_a_run = pieces(a.substr(0, 30000) + words);  // its cut doesn't begin a slice
  EXPECT_EQ(std::count(after_a_run.begin(), after_a_run.end(), "b"), 1);
}

}  // namespace
}  // namespace k3

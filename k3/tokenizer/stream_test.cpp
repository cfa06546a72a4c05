#include "k3/tokenizer/stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "k3/core/error.h"
#include "k3/tokenizer/unicode.h"

namespace k3 {
namespace {

bool is_utf8(std::string_view s) {
  for (size_t at = 0; at < s.size();) {
    const Char c = char_at(s, at);
    if (!c.bits) return false;
    at += c.length;
  }
  return true;
}

std::string streamed(const std::vector<std::string>& chunks) {
  Utf8Stream stream;
  std::string out;
  for (const std::string& c : chunks) {
    const std::string more = stream.add(c);
    EXPECT_TRUE(is_utf8(more));
    out += more;
  }
  return out + stream.finish();
}

TEST(utf8_stream, characters_cut_at_every_byte_come_out_whole) {
  const std::string text = "é中😀👩\u200D👧a ह";
  for (size_t i = 0; i <= text.size(); ++i)
    for (size_t j = i; j <= text.size(); ++j) EXPECT_EQ(streamed({text.substr(0, i), text.substr(i, j - i), text.substr(j)}), text);
}
TEST(utf8_stream, holds_back_nothing_that_is_complete) {
  Utf8Stream stream;
  EXPECT_EQ(stream.add("a\xE4\xB8"), "a");
  EXPECT_EQ(stream.add("\xAD"
                       "b"),
            "中b");
  EXPECT_EQ(stream.finish(), "");
}
TEST(utf8_stream, broken_bytes_become_one_mark_and_the_stream_goes_on) {
  EXPECT_EQ(streamed({"a\xE4\xB8", "b"}), "a\uFFFDb");
  EXPECT_EQ(streamed({"a\xE4\xB8"}), "a\uFFFD") << "the end cuts a character";
  EXPECT_EQ(streamed({"\xFF", "x"}), "\uFFFDx");
  EXPECT_EQ(streamed({"\x80\x80"}), "\uFFFD\uFFFD");
  EXPECT_EQ(streamed({"\xED\xA0\x80"}), "\uFFFD\uFFFD\uFFFD") << "a surrogate, as a decoder replaces it";
  EXPECT_EQ(streamed({"\xF0\x9F\x98", "\xF0\x9F\x98\x80"}), "\uFFFD😀");
  EXPECT_EQ(streamed({"\xC0\xAF"}), "\uFFFD\uFFFD");
  EXPECT_EQ(streamed({"\xF4\x90\x80\x80"}), "\uFFFD\uFFFD\uFFFD\uFFFD");
}
TEST(utf8_stream, the_cut_does_not_matter_for_random_bytes) {
  std::mt19937 random(1);
  for (int i = 0; i < 2000; ++i) {
    std::string bytes;
    for (int n = 20; n > 0; --n) bytes += "\xE4\xB8\xAD\xF0\x9F\x98\x80\xC3\xED\xA0 a\xFF"[random() % 13];
    std::vector<std::string> chunks(1);
    for (const char c : bytes) {
      chunks.back() += c;
      if (random() % 2) chunks.emplace_back();
    }
    EXPECT_EQ(streamed(chunks), replace_invalid_utf8(bytes));
  }
}

// Character by character: the text ends as soon as it ends in a stop string.
std::string plain_stop(const std::string& text, const std::vector<std::string>& stops) {
  for (size_t end = 1; end <= text.size(); ++end) {
    size_t cut = 0;
    for (const std::string& s : stops)
      if (text.substr(0, end).ends_with(s)) cut = std::max(cut, s.size());
    if (cut) return text.substr(0, end - cut);
  }
  return text;
}

std::string stopped(const std::vector<std::string>& chunks, const std::vector<std::string>& stops, bool* hit = nullptr) {
  StopStrings stop(stops);
  std::string out;
  for (const std::string& c : chunks) out += stop.add(c);
  out += stop.finish();
  if (hit) *hit = stop.stopped();
  return out;
}

TEST(stop_strings, text_ends_exactly_before_the_first_match_however_it_is_cut) {
  std::mt19937 random(1);
  for (int i = 0; i < 20000; ++i) {
    auto letters = [&](int n) {
      std::string s;
      while (n-- > 0) s += "ab中"[random() % 2];
      return s + (random() % 4 ? "" : "中");
    };
    std::vector<std::string> stops(random() % 5);
    for (std::string& s : stops) s = letters(1 + int(random() % 5));
    std::vector<std::string> chunks(1 + random() % 6);
    std::string text;
    for (std::string& c : chunks) text += c = letters(int(random() % 5));
    bool hit = false;
    ASSERT_EQ(stopped(chunks, stops, &hit), plain_stop(text, stops)) << text;
    ASSERT_EQ(hit, plain_stop(text, stops) != text);
  }
}
TEST(stop_strings, hold_back_only_what_could_become_a_match) {
  StopStrings stop({"\n\nUser:", "###"});
  EXPECT_EQ(stop.add("Hi"), "Hi");
  EXPECT_EQ(stop.add(" #\n"), " #");
  EXPECT_EQ(stop.add("\nUs"), "");
  EXPECT_EQ(stop.add("a"), "\n\nUsa");
  EXPECT_EQ(stop.add("##"), "");
  EXPECT_EQ(stop.finish(), "##") << "the end: nothing is lost";
  EXPECT_EQ(stop.add("x###y"), "x");
  EXPECT_TRUE(stop.stopped());
  EXPECT_EQ(stop.match(), "###");
  EXPECT_EQ(stop.add("more") + stop.finish(), "");
}
TEST(stop_strings, of_two_stops_the_shorter_prefix_ends_the_text_at_the_same_place) {
  EXPECT_EQ(stopped({"xa", "bc"}, {"abc", "ab"}), "x");
  EXPECT_EQ(stopped({"xabc"}, {"ab", "abc"}), "x");
}
TEST(stop_strings, an_empty_stop_is_refused_and_no_stop_passes_everything) {
  EXPECT_THAT([] { StopStrings({"a", ""}); }, ::testing::ThrowsMessage<Error>(::testing::HasSubstr("a stop string is empty")));
  EXPECT_EQ(stopped({"a", "b"}, {}), "ab");
}

}  // namespace
}  // namespace k3

#pragma once
// Text that arrives in pieces: whole characters only, and an end at stop strings. The joined output is the same for every way to cut the
// input.
#include <string>
#include <string_view>
#include <vector>

namespace k3 {

// Bytes in, valid UTF-8 out. Holds back an unfinished character (at most 3 bytes). Bytes that can't be UTF-8 become one U+FFFD for each
// run that a decoder would replace at once (the longest beginning of a character, or one byte), and the stream goes on.
class Utf8Stream {
 public:
  std::string add(std::string_view bytes);
  std::string finish();  // what was held back, as one U+FFFD; the stream is then new

 private:
  std::string held_;
};

std::string replace_invalid_utf8(std::string_view bytes);  // the same in one call

// Ends text exactly before the first match of a stop string; holds back only what could still become a match. First is the match that is
// complete first, as if each character were looked at when it comes (no stop waits for another); of two complete at once, the longer.
class StopStrings {
 public:
  StopStrings() = default;
  explicit StopStrings(std::vector<std::string> stops);  // an empty string is an Error

  std::string add(std::string_view text);  // text that is certainly before any stop; "" once stopped
  std::string finish();                    // what was held back: no match can come any more
  bool stopped() const { return stopped_ >= 0; }
  const std::string& match() const;  // the stop string that ended the text
  bool empty() const { return stops_.empty(); }

 private:
  std::vector<std::string> stops_;
  std::string held_;
  int stopped_ = -1;
};

}  // namespace k3

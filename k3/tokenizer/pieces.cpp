#include "k3/tokenizer/pieces.h"

#include <cassert>

#include "k3/tokenizer/unicode.h"

namespace k3 {
namespace {

using namespace unicode;
constexpr int kSlice = 400000;
constexpr int kRun = 25000;

// End of the run of characters at `at` that have one of the bits, `most` of them at most.
size_t run(std::string_view text, size_t at, uint8_t bits, int most = -1) {
  for (Char c; most-- != 0 && ((c = char_at(text, at)).bits & bits);) at += c.length;
  return at;
}

// C of the pattern, or nothing. U+017F is a small s to a pattern that ignores case.
size_t contraction(std::string_view text, size_t at) {
  auto letter = [&](size_t i) { return at + i < text.size() ? char(text[at + i] | 0x20) : '\0'; };
  if (at >= text.size() || text[at] != '\'') return at;
  const char a = letter(1), b = letter(2);
  if (a == 's' || a == 't' || a == 'm' || a == 'd') return at + 2;
  if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) return at + 3;
  return text.substr(at + 1, 2) == "\u017F" ? at + 3 : at;
}

// U* W+ (alternative 2) or U+ W* (alternative 3), with C; `at` when neither matches.
size_t word(std::string_view text, size_t at, bool small_end) {
  size_t end = at, last_w = at;  // last_w: end of the last character of the U run that is also in W
  for (Char c; (c = char_at(text, end)).bits & kU;) {
    end += c.length;
    if (c.bits & kW) last_w = end;
  }
  const size_t tail = run(text, end, kW);
  const size_t stop = tail > end ? tail : small_end ? last_w : end;
  return stop > at ? contraction(text, stop) : at;
}

// End of the first alternative that matches at text[0].
size_t match(std::string_view text) {
  const Char first = char_at(text, 0);
  if (first.bits == 0) {
    size_t at = 1;
    for (Char c; (c = char_at(text, at)).bits == 0 && c.length;) ++at;
    return at;
  }
  if (first.bits & kHan) return run(text, first.length, kHan);
  for (bool small_end : {true, false}) {
    const size_t x = first.bits & kX ? size_t(first.length) : 0;
    if (const size_t end = word(text, x, small_end); end > x) return end;
    if (const size_t end = x ? word(text, 0, small_end) : 0; end > 0) return end;  // a mark is in X, U and W
  }
  if (first.bits & kNumber) return run(text, 0, kNumber, 3);
  const size_t symbols = text[0] == ' ' ? 1 : 0, end = run(text, symbols, kSymbol);
  if (end > symbols) return run(text, end, kNewline);
  size_t at = 0, before_last = 0, newline = 0;  // the run of white space; newline: end of its last CR or LF
  for (Char c; (c = char_at(text, at)).bits & kSpace;) {
    before_last = at;
    at += c.length;
    if (c.bits & kNewline) newline = at;
  }
  if (newline) return newline;
  return at == text.size() || before_last == 0 ? at : before_last;
}

}  // namespace

bool Pieces::next() {
  begin_ = end_;
  if (begin_ == text_.size()) return false;
  if (begin_ == window_) next_window();
  end_ = begin_ + match(text_.substr(begin_, window_ - begin_));
  assert(end_ > begin_);
  return true;
}

void Pieces::next_window() {
  if (window_ == 0 && text_.size() <= size_t(kRun)) {
    window_ = text_.size();
    return;
  }
  for (int length = 0; window_ < text_.size();) {
    if (slice_ == kSlice) {
      slice_ = 0;
      return;
    }
    const Char c = char_at(text_, window_);
    const bool white = c.bits & kSpace;
    length = length && white == white_ ? length + 1 : 1;
    if (length > kRun) return;
    white_ = white;
    ++slice_, window_ += c.length;
  }
}

}  // namespace k3

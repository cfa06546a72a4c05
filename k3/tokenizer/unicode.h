#pragma once
// Character classes of the split pattern (model.md 7.2) and UTF-8 as it comes, broken bytes included.
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace k3 {

namespace unicode {
// Bits of a class. U and W are letters as the pattern groups them: marks and letters without case are in both.
constexpr uint8_t kHan = 1;        // script Han
constexpr uint8_t kU = 2;          // Lu Lt Lm Lo M, not Han
constexpr uint8_t kW = 4;          // Ll Lm Lo M, not Han
constexpr uint8_t kX = 8;          // anything but CR, LF, letters, numbers
constexpr uint8_t kNumber = 16;    // N
constexpr uint8_t kSpace = 32;     // White_Space
constexpr uint8_t kSymbol = 64;    // not white space, letter or number
constexpr uint8_t kNewline = 128;  // CR, LF
}  // namespace unicode

extern const uint32_t kUnicodeRuns[];
extern const int kUnicodeRunCount;

struct Char {
  uint32_t code = 0;
  uint8_t bits = 0;    // 0: not a character (a broken byte, or the end of the text)
  uint8_t length = 0;  // bytes; 1 for a broken byte, 0 at the end of the text
};

// Bytes of the character at text[at]: 1 to 4; 0 when the bytes there are no UTF-8; -1 when the text ends within a character. `seen`: how
// many bytes belong together all the same, so that a decoder replaces them by one mark.
int utf8_length(std::string_view text, size_t at, int& seen);

Char char_at(std::string_view text, size_t at);
uint8_t class_of(uint32_t code);

}  // namespace k3

#include "k3/tokenizer/unicode.h"

#include <vector>

namespace k3 {
namespace {

// Two levels: 0x1100 blocks of 256 code points; equal neighbours (most blocks are all one class) share a page.
struct Classes {
  uint16_t page[0x1100];
  std::vector<uint8_t> bits;  // (pages, 256)
  Classes() {
    int run = 0;
    uint8_t block[256];
    for (uint32_t b = 0; b < 0x1100; ++b) {
      for (uint32_t i = 0; i < 256; ++i) {
        while (run + 1 < kUnicodeRunCount && kUnicodeRuns[run + 1] >> 8 <= b * 256 + i) ++run;
        block[i] = uint8_t(kUnicodeRuns[run]);
      }
      bool same = b > 0;
      for (uint32_t i = 0; same && i < 256; ++i) same = bits[bits.size() - 256 + i] == block[i];
      if (!same) bits.insert(bits.end(), block, block + 256);
      page[b] = uint16_t(bits.size() / 256 - 1);
    }
  }
};
const Classes kClasses;

}  // namespace

uint8_t class_of(uint32_t code) { return kClasses.bits[kClasses.page[code >> 8] * 256 + (code & 255)]; }

int utf8_length(std::string_view text, size_t at, int& seen) {
  auto byte = [&](size_t i) { return uint8_t(text[at + i]); };
  const uint8_t b = byte(0);
  seen = 1;
  if (b < 0x80) return 1;
  const int n = b >= 0xC2 && b < 0xE0 ? 2 : b >= 0xE0 && b < 0xF0 ? 3 : b >= 0xF0 && b < 0xF5 ? 4 : 0;
  for (; seen < n; ++seen) {
    if (at + seen == text.size()) return -1;
    // the second byte keeps out overlong forms, surrogates and codes above 10FFFF
    const uint8_t low = seen > 1 ? 0x80 : b == 0xE0 ? 0xA0 : b == 0xF0 ? 0x90 : 0x80;
    const uint8_t high = seen > 1 ? 0xBF : b == 0xED ? 0x9F : b == 0xF4 ? 0x8F : 0xBF;
    if (byte(seen) < low || byte(seen) > high) return 0;
  }
  return n;
}

Char char_at(std::string_view text, size_t at) {
  if (at >= text.size()) return {};
  auto byte = [&](size_t i) { return uint32_t(uint8_t(text[at + i])); };
  if (byte(0) < 0x80) return {byte(0), kClasses.bits[byte(0)], 1};
  int seen;
  uint32_t code;
  const int n = utf8_length(text, at, seen);
  if (n == 2)
    code = (byte(0) & 31) << 6 | (byte(1) & 63);
  else if (n == 3)
    code = (byte(0) & 15) << 12 | (byte(1) & 63) << 6 | (byte(2) & 63);
  else if (n == 4)
    code = (byte(0) & 7) << 18 | (byte(1) & 63) << 12 | (byte(2) & 63) << 6 | (byte(3) & 63);
  else
    return {byte(0), 0, 1};
  return {code, class_of(code), uint8_t(n)};
}

}  // namespace k3

#pragma once
// Seeded damage for tests of parsers.
#include <fstream>
#include <string>

#include "k3/core/error.h"
#include "k3/core/rng.h"

namespace k3 {

// A few places of `text` changed: bits, bytes, digits, a piece cut out, doubled or moved to another place.
inline std::string mutated(std::string text, uint64_t seed) {
  const Rng rng{seed, 0x6d75};
  uint64_t draws = 0;
  auto below = [&](uint64_t n) { return rng.below(n ? n : 1, draws++); };
  for (uint64_t changes = 1 + below(3); changes > 0 && !text.empty(); --changes) {
    const size_t at = below(text.size()), n = 1 + below(12);
    switch (below(8)) {
      case 0:
        text[at] = char(text[at] ^ (1 << below(8)));
        break;
      case 1:
        text[at] = char(below(256));
        break;
      case 2:
        text.erase(at, n);
        break;
      case 3:
        text.insert(at, text.substr(at, n));
        break;
      case 4:
        text.insert(at, text.substr(below(text.size()), n));
        break;
      case 5:
        text.resize(at);
        break;
      case 6:
        text[at] = "{}[]\":,0-.e<|&/\\n"[below(17)];
        break;
      default: {  // a number grows, shrinks or changes its sign
        const size_t digit = text.find_first_of("0123456789", at);
        if (digit == text.npos) break;
        constexpr const char* kNumbers[] = {"-1", "0", "1", "4294967296", "9223372036854775807", "18446744073709551615", "1e308", "0.5"};
        text.replace(digit, 1, kNumbers[below(8)]);
      }
    }
  }
  return text;
}

// Without waiting for the disk.
inline void put(const std::string& file, const std::string& bytes) { std::ofstream(file, std::ios::binary) << bytes; }

// Runs f; whether it ended in an answer. Anything but an Error flies on and fails the test.
template <class F>
bool answers(F f) {
  try {
    f();
    return true;
  } catch (const Error&) { return false; }
}

}  // namespace k3

#include "k3/model/sha256.h"

#include <bit>
#include <cmath>
#include <algorithm>
#include <cstring>

namespace k3 {

namespace {

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes. A double has 20 more.
struct Constants {
  uint32_t k[64];
  Constants() {
    int found = 0;
    for (int p = 2; found < 64; ++p) {
      bool prime = true;
      for (int d = 2; d * d <= p; ++d) prime = prime && p % d != 0;
      if (prime) k[found++] = uint32_t(uint64_t(std::cbrt(double(p)) * 4294967296.0));
    }
  }
};

}  // namespace

void Sha256::block(const uint8_t* p) {
  static const Constants constants;
  uint32_t w[64];
  for (int i = 0; i < 16; ++i) w[i] = uint32_t(p[4 * i]) << 24 | uint32_t(p[4 * i + 1]) << 16 | uint32_t(p[4 * i + 2]) << 8 | p[4 * i + 3];
  for (int i = 16; i < 64; ++i) {
    uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
    uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = h_;
  for (int i = 0; i < 64; ++i) {
    uint32_t t1 = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + ((e & f) ^ (~e & g)) + constants.k[i] + w[i];
    uint32_t t2 = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
  }
  const uint32_t out[8] = {a, b, c, d, e, f, g, h};
  for (int i = 0; i < 8; ++i) h_[i] += out[i];
}

void Sha256::add(const void* data, size_t bytes) {
  const auto* p = static_cast<const uint8_t*>(data);
  size_t held = bytes_ % 64;
  bytes_ += bytes;
  if (held) {
    size_t n = std::min(bytes, 64 - held);
    std::memcpy(held_ + held, p, n);
    p += n, bytes -= n;
    if (held + n < 64) return;
    block(held_);
  }
  for (; bytes >= 64; p += 64, bytes -= 64) block(p);
  if (bytes) std::memcpy(held_, p, bytes);
}

std::string Sha256::hex() {
  const uint64_t bits = bytes_ * 8;
  const uint8_t one = 0x80, zero = 0;
  add(&one, 1);
  while (bytes_ % 64 != 56) add(&zero, 1);
  uint8_t length[8];
  for (int i = 0; i < 8; ++i) length[i] = uint8_t(bits >> (56 - 8 * i));
  add(length, 8);
  std::string text;
  for (uint32_t h : h_)
    for (int shift = 28; shift >= 0; shift -= 4) text += "0123456789abcdef"[h >> shift & 15];
  return text;
}

}  // namespace k3

#pragma once
// 1234567 -> "1,234,567"
#include <cstdint>
#include <string>

namespace k3 {

inline std::string thousands(int64_t n) {
  std::string s = std::to_string(n);
  for (int64_t at = int64_t(s.size()) - 3; at > 0 && s[size_t(at) - 1] != '-'; at -= 3) s.insert(size_t(at), 1, ',');
  return s;
}

}  // namespace k3

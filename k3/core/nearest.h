#pragma once
// The known name nearest to a misspelt one, for messages: "unknown key 'hiden_size'; the nearest known one is 'hidden_size'".
#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

namespace k3 {

inline std::string nearest(std::string_view name, const std::vector<std::string>& known) {
  std::string best;
  size_t best_distance = ~size_t(0);
  for (const std::string& k : known) {
    std::vector<size_t> row(k.size() + 1);  // edit distance, one row at a time
    for (size_t j = 0; j <= k.size(); ++j) row[j] = j;
    for (size_t i = 1; i <= name.size(); ++i) {
      size_t diagonal = row[0];
      row[0] = i;
      for (size_t j = 1; j <= k.size(); ++j) {
        size_t change = diagonal + (name[i - 1] != k[j - 1]);
        diagonal = row[j];
        row[j] = std::min({row[j] + 1, row[j - 1] + 1, change});
      }
    }
    if (row.back() < best_distance) best_distance = row.back(), best = k;
  }
  return best;
}

}  // namespace k3

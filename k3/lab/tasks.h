#pragma once
// Synthetic tasks: sequences made from a seed, with targets where something is asked.
//
//   palindrome   t_1 ... t_n <sep> t_n ... t_1          at t_n after <sep> predict t_{n-1}, and so on: n - 1 scored (training.md 11.4)
//   mqar         k_1 v_1 ... <sep> q_1 q_2 ...          keys differ, queries are drawn from them; each predicts its value at its own position
//   stack        <push> id e | <pop> id e               a pop's e is the last element pushed and not yet popped on stack id, asked at id
//   language     order-2 chains, one of four topics a sequence, with phrases that come back: every position is scored
//
// Token targets are those of the same position (not shifted here): targets[i] is what to predict having read ids[0..i].
#include <cstdint>
#include <string>
#include <vector>

namespace k3::lab {

struct Task {
  std::string name;
  int64_t symbols = 64;  // palindrome, stack: elements; mqar: keys and values, half each; language: letters
  int64_t vocabulary() const;
  // One sequence of exactly `length` tokens; `index` is its number. Ids and targets are appended; targets are kIgnored where nothing is asked.
  void make(uint64_t seed, uint64_t index, int64_t length, std::vector<int32_t>& ids, std::vector<int32_t>& targets) const;
};

}  // namespace k3::lab

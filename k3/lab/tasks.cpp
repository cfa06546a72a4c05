#include "k3/lab/tasks.h"

#include <algorithm>

#include "k3/core/error.h"
#include "k3/core/rng.h"
#include "k3/ops/loss/loss.h"

namespace k3::lab {

namespace {

constexpr int64_t kStacks = 8, kTopics = 4;

struct Draw {
  Rng rng;
  uint64_t at = 0;
  int64_t below(int64_t n) { return int64_t(rng.below(uint64_t(n), at++)); }
  double uniform() { return rng.uniform(at++); }
};

// One of four likely followers of a pair of letters, the same for all sequences of a topic; the first is the likeliest.
int32_t follower(int64_t topic, int32_t a, int32_t b, int64_t rank, int64_t letters) {
  return int32_t(Rng{uint64_t(topic), 77}.below(uint64_t(letters), uint64_t((int64_t(a) * letters + b) * 4 + rank)));
}

void palindrome(Draw& d, int64_t symbols, int64_t length, std::vector<int32_t>& ids, std::vector<int32_t>& targets) {
  const int64_t n = (length - 1) / 2;
  std::vector<int32_t> word;
  for (int64_t i = 0; i < n; ++i) word.push_back(int32_t(d.below(symbols)));
  for (int32_t w : word) ids.push_back(w), targets.push_back(kIgnored);
  ids.push_back(int32_t(symbols)), targets.push_back(kIgnored);
  for (int64_t i = n - 1; i >= 0; --i) ids.push_back(word[size_t(i)]), targets.push_back(i > 0 ? word[size_t(i - 1)] : kIgnored);
}

void mqar(Draw& d, int64_t symbols, int64_t length, std::vector<int32_t>& ids, std::vector<int32_t>& targets) {
  const int64_t half = symbols / 2, pairs = std::min(half, length / 4);
  std::vector<int32_t> keys;
  for (int64_t i = 0; i < half; ++i) keys.push_back(int32_t(i));
  for (int64_t i = 0; i < pairs; ++i) std::swap(keys[size_t(i)], keys[size_t(i + d.below(half - i))]);
  std::vector<int32_t> values;
  for (int64_t i = 0; i < pairs; ++i) {
    values.push_back(int32_t(half + d.below(half)));
    ids.push_back(keys[size_t(i)]), ids.push_back(values.back());
    targets.insert(targets.end(), 2, kIgnored);
  }
  ids.push_back(int32_t(symbols)), targets.push_back(kIgnored);
  for (int64_t i = 2 * pairs + 1; i < length; ++i) {
    const int64_t q = d.below(pairs);
    ids.push_back(keys[size_t(q)]), targets.push_back(values[size_t(q)]);
  }
}

void stack(Draw& d, int64_t symbols, int64_t length, std::vector<int32_t>& ids, std::vector<int32_t>& targets) {
  std::vector<std::vector<int32_t>> stacks(static_cast<size_t>(kStacks));
  for (int64_t i = 0; i + 3 <= length; i += 3) {
    std::vector<int64_t> full;
    for (int64_t s = 0; s < kStacks; ++s)
      if (!stacks[size_t(s)].empty()) full.push_back(s);
    const bool pop = !full.empty() && d.uniform() < 0.5;
    const int64_t s = pop ? full[size_t(d.below(int64_t(full.size())))] : d.below(kStacks);
    if (!pop) stacks[size_t(s)].push_back(int32_t(d.below(symbols)));
    const int32_t e = stacks[size_t(s)].back();
    if (pop) stacks[size_t(s)].pop_back();
    ids.insert(ids.end(), {int32_t(symbols + (pop ? 1 : 0)), int32_t(symbols + 2 + s), e});
    targets.insert(targets.end(), {kIgnored, pop ? e : kIgnored, kIgnored});
  }
}

void language(Draw& d, int64_t letters, int64_t length, std::vector<int32_t>& ids, std::vector<int32_t>& targets) {
  const int64_t topic = d.below(kTopics);
  std::vector<int32_t> text = {int32_t(d.below(letters)), int32_t(d.below(letters))};
  while (int64_t(text.size()) <= length) {
    if (text.size() > 24 && d.uniform() < 0.04) {  // a phrase from before comes back
      const int64_t from = d.below(int64_t(text.size()) - 12);
      for (int64_t i = 0; i < 12; ++i) text.push_back(text[size_t(from + i)]);
      continue;
    }
    const double u = d.uniform();
    text.push_back(follower(topic, text[text.size() - 2], text.back(), u < 0.6 ? 0 : u < 0.8 ? 1 : u < 0.92 ? 2 : 3, letters));
  }
  for (int64_t i = 0; i < length; ++i) ids.push_back(text[size_t(i)]), targets.push_back(text[size_t(i + 1)]);
}

}  // namespace

int64_t Task::vocabulary() const { return name == "stack" ? symbols + 2 + kStacks : symbols + 1; }

void Task::make(uint64_t seed, uint64_t index, int64_t length, std::vector<int32_t>& ids, std::vector<int32_t>& targets) const {
  const size_t before = ids.size();
  Draw d{{seed * 0x9E3779B97F4A7C15ull + index, 11}};
  if (name == "palindrome")
    palindrome(d, symbols, length, ids, targets);
  else if (name == "mqar")
    mqar(d, symbols, length, ids, targets);
  else if (name == "stack")
    stack(d, symbols, length, ids, targets);
  else if (name == "language")
    language(d, symbols, length, ids, targets);
  else
    fail("[lab] there is no task '{}'; palindrome, mqar, stack and language are known", name);
  while (int64_t(ids.size() - before) < length) ids.push_back(int32_t(vocabulary() - 1)), targets.push_back(kIgnored);
}

}  // namespace k3::lab

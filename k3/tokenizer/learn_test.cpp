#include "k3/tokenizer/learn.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "k3/core/error.h"
#include "k3/tokenizer/pieces.h"

namespace k3 {
namespace {

using Documents = std::vector<std::string>;

Tokenizer learn_from(int32_t ranks, const Documents& documents) {
  return learn(ranks, [&](const AddText& add) {
    for (const std::string& d : documents) add(d);
  });
}

Documents random_documents(uint32_t seed, int count = 30) {
  std::mt19937 random(seed);
  Documents out(count);
  for (std::string& d : out)
    for (int n = 200; n > 0; --n) d += std::string("aaabbc ")[random() % 7];
  return out;
}

// Encode everything with the table so far, count the joined bytes of neighbours, take the most frequent, first in order of bytes on ties.
std::vector<std::string> plain_learn(int32_t ranks, const Documents& documents) {
  std::vector<std::string> tokens;
  for (int b = 0; b < 256; ++b) tokens.emplace_back(1, char(b));
  while (int32_t(tokens.size()) < ranks) {
    const Tokenizer t(tokens);
    std::map<std::string, int> count;
    for (const std::string& d : documents)
      for (Pieces p(d); p.next();) {
        // merges alone: a piece that is a token is joined as well, since every token was made by a merge
        const std::vector<int32_t> ids = t.encode(p.piece());
        for (size_t i = 0; i + 1 < ids.size(); ++i) ++count[std::string(t.token_bytes(ids[i])) + std::string(t.token_bytes(ids[i + 1]))];
      }
    const auto best = std::max_element(count.begin(), count.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
    if (best == count.end() || best->second < 2) break;
    tokens.push_back(best->first);
  }
  return tokens;
}

std::vector<std::string> table(const Tokenizer& t) {
  std::vector<std::string> out;
  for (int32_t r = 0; r < t.ranks(); ++r) out.emplace_back(t.token_bytes(r));
  return out;
}

TEST(learn, equals_counting_anew_after_every_merge) {
  for (uint32_t seed = 0; seed < 4; ++seed) {
    const Documents documents = random_documents(seed, 8);
    EXPECT_EQ(table(learn_from(380, documents)), plain_learn(380, documents)) << seed;
  }
}
TEST(learn, does_not_depend_on_the_order_of_documents) {
  Documents documents = random_documents(7);
  const Tokenizer one = learn_from(400, documents);
  std::reverse(documents.begin(), documents.end());
  EXPECT_EQ(learn_from(400, documents).hash(), one.hash());
}
TEST(learn, frequent_words_become_tokens_and_pairs_never_cross_a_piece) {
  const Tokenizer t = learn_from(300, {"the cat the cat the cat 中文中文中文中文"});
  EXPECT_EQ(t.encode(" the").size(), 1u);
  for (const std::string& token : table(t)) EXPECT_EQ(token.find("e "), token.npos);
}
TEST(learn, stops_when_no_pair_occurs_twice) {
  EXPECT_EQ(learn_from(1000, {"abc"}).ranks(), 256);
  EXPECT_EQ(learn_from(1000, {"ab ab"}).ranks(), 257);
  EXPECT_EQ(learn_from(1000, {}).ranks(), 256);
}
TEST(learn, runs_are_joined_from_the_left) {
  const Tokenizer t = learn_from(258, {"aaaaa aaaaa"});  // aa aa a, twice
  EXPECT_EQ(table(t)[256], "aa");
  EXPECT_EQ(table(t)[257], "aaa") << "as frequent as aaaa, and first in order of bytes";
}
TEST(learn, fewer_than_256_ranks_are_refused) {
  EXPECT_THAT([] { learn_from(255, {"a"}); }, ::testing::ThrowsMessage<Error>(::testing::HasSubstr("ranks is 255")));
}

}  // namespace
}  // namespace k3

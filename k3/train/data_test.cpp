// Corpus, token file and sampler: bytes in, the right tokens out, in an order that depends on seed and step alone.
#include <cstring>
#include <map>
#include <set>

#include "k3/ops/loss/loss.h"
#include "k3/tokenizer/learn.h"
#include "k3/train/sampler.h"
#include "k3/train/testing.h"

namespace k3 {
namespace {

using testing::get;
using testing::put;
using testing::TemporaryFolder;
using testing::throws_error;

Tokenizer small_bpe() {
  return learn(280, [](const AddText& add) { add("the then there other father mother weather \n\n  \n ninety ninety-nine"); });
}

TokenFile tokens_of(const TemporaryFolder& folder, const std::string& text, const std::string& separator, const Tokenizer& tokenizer) {
  put(folder / "text", text);
  write_token_file(folder / "tokens.bin", list_sources({folder / "text"}), separator, tokenizer);
  return TokenFile(folder / "tokens.bin");
}

std::vector<std::string> documents_of(const std::string& text, const std::string& separator) {
  TemporaryFolder folder;
  const Tokenizer t = Tokenizer::bytes();
  TokenFile f = tokens_of(folder, text, separator, t);
  std::vector<std::string> all;
  for (int64_t d = 0; d < f.documents(); ++d) {
    EXPECT_EQ(f.document(d).back(), t.eos());
    all.push_back(t.decode(f.document(d)));
  }
  return all;
}

TEST(corpus, a_separator_is_a_whole_line_and_belongs_to_no_document) {
  using V = std::vector<std::string>;
  EXPECT_EQ(documents_of("a\n%\nb\n%\n", "%"), (V{"a\n", "b\n"}));
  EXPECT_EQ(documents_of("a\n%\nb", "%"), (V{"a\n", "b"}));
  EXPECT_EQ(documents_of("%\na%\n%b\n%\n%\n\n%", "%"), (V{"a%\n%b\n", "\n"}));
  EXPECT_EQ(documents_of("a\r\n%\r\nb\r\n", "%"), (V{"a\r\n", "b\r\n"}));
  EXPECT_EQ(documents_of("a\n%\nb\n", ""), (V{"a\n%\nb\n"}));
}

TEST(corpus, a_separator_is_found_wherever_a_read_ends) {
  for (int64_t shift = -4; shift <= 4; ++shift) {
    std::string first((1 << 20) + shift, 'x');
    auto all = documents_of(first + "\n---\nsecond\n", "---");
    ASSERT_EQ(all.size(), 2u) << shift;
    EXPECT_TRUE(all[0] == first + "\n" && all[1] == "second\n") << shift;
  }
}

TEST(corpus, bytes_are_data) {
  std::string text;
  for (int i = 0; i < 1000; ++i) text += char(i * 37);
  text += std::string("\0\xff\xfe\xc3\x28\n", 6);
  EXPECT_EQ(documents_of(text, ""), std::vector<std::string>{text});
}

// The tokenizer looks at 400,000 characters together; a document that arrives in parts must be cut there and nowhere else.
TEST(corpus, one_endless_line_has_the_ids_of_the_whole) {
  TemporaryFolder folder;
  const Tokenizer t = small_bpe();
  std::string text;
  while (text.size() < 5000000) text += text.size() % 7 ? "the weather \u00e4\u4e2d other" : "fathers\xff mother's  \u2003 99999";
  TokenFile f = tokens_of(folder, text, "%", t);
  std::vector<int32_t> want = t.encode(text);
  want.push_back(t.eos());
  ASSERT_EQ(f.documents(), 1);
  EXPECT_EQ(std::vector<int32_t>(f.ids().begin(), f.ids().end()), want);
}

TEST(corpus, folders_are_read_in_order_of_name_without_the_runs_own) {
  TemporaryFolder folder;
  put(folder / "b", "2"), put(folder / "a/z", "1"), put(folder / "runs/out/tokens.bin", "own"), put(folder / "runs/outer", "3");
  std::vector<std::string> names;
  for (const Source& s : list_sources({folder.str()}, folder / "runs/out")) names.push_back(s.path.substr(folder.str().size() + 1));
  EXPECT_EQ(names, (std::vector<std::string>{"a/z", "b", "runs/outer"}));
}

TEST(corpus, missing_and_empty_data_are_named) {
  TemporaryFolder folder;
  put(folder / "empty", "");
  std::filesystem::create_directory(folder / "nothing");
  EXPECT_THAT([&] { list_sources({}); }, throws_error("no data given; name files or folders with --data"));
  EXPECT_THAT([&] { list_sources({folder / "missing"}); }, throws_error("missing is not there"));
  EXPECT_THAT([&] { list_sources({folder / "nothing"}); }, throws_error("nothing holds no files"));
  EXPECT_THAT([&] { list_sources({folder / "empty"}); }, throws_error("not one byte"));
}

TEST(corpus, a_file_that_changes_while_it_is_read_is_an_error) {
  TemporaryFolder folder;
  put(folder / "text", "before");
  auto sources = list_sources({folder / "text"});
  put(folder / "text", "before and after");
  EXPECT_THAT(
      [&] {
        read_documents(sources, "", {[](std::string_view) {}, [] {}, {}});
      },
      throws_error("text changed while it was read (6 bytes at first, 16 now)"));
}

TEST(token_file, ids_above_65535_come_back) {
  TemporaryFolder folder;
  const std::vector<int32_t> ids = {0, 65535, 65536, 65537, 131072, 163583, 163839};
  TokenWriter w(folder / "t", 163840, 7);
  w.add(ids), w.end_document();
  w.commit({}, "");
  TokenFile f(folder / "t");
  EXPECT_EQ(std::vector<int32_t>(f.ids().begin(), f.ids().end()), ids);
}

TEST(token_file, an_id_outside_the_vocabulary_is_named_with_its_place) {
  TemporaryFolder folder;
  const std::vector<int32_t> ids = {1, 2, 163840};
  TokenWriter w(folder / "t", 163840, 7);
  w.add(ids), w.end_document();
  w.commit({}, "");
  EXPECT_THAT([&] { TokenFile(folder / "t"); }, throws_error("token 2 is id 163840, but the vocabulary has 163840"));
}

TEST(token_file, damage_and_cuts_are_seen_wherever_they_are) {
  TemporaryFolder folder;
  const Tokenizer t = Tokenizer::bytes();
  tokens_of(folder, "some text\n%\nand more\n", "%", t);
  const std::string whole = get(folder / "tokens.bin");
  for (size_t i = 0; i < whole.size(); i += 3) {
    std::string damaged = whole;
    damaged[i] = char(damaged[i] ^ 0x10);
    put(folder / "tokens.bin", damaged);
    EXPECT_THAT([&] { TokenFile(folder / "tokens.bin"); }, throws_error("remove")) << "byte " << i;
    put(folder / "tokens.bin", whole.substr(0, i));
    EXPECT_THAT([&] { TokenFile(folder / "tokens.bin"); }, throws_error("remove")) << "cut to " << i;
  }
}

TEST(token_file, another_width_vocabulary_or_tokenizer_is_refused) {
  TemporaryFolder folder;
  const Tokenizer bytes = Tokenizer::bytes();
  TokenFile f = tokens_of(folder, "text", "", bytes);
  EXPECT_NO_THROW(f.check_tokenizer(bytes));
  EXPECT_THAT([&] { f.check_tokenizer(small_bpe()); }, throws_error("made with a vocabulary of 512 but this tokenizer has 5"));
  std::vector<std::string> reversed;
  for (int b = 255; b >= 0; --b) reversed.emplace_back(1, char(b));
  EXPECT_THAT([&] { f.check_tokenizer(Tokenizer(reversed)); }, throws_error("another tokenizer of the same size"));
  std::string narrow = get(folder / "tokens.bin");
  narrow[12] = 2;
  put(folder / "tokens.bin", narrow);
  EXPECT_THAT([&] { TokenFile(folder / "tokens.bin"); }, throws_error("stores ids of 2 bytes"));
}

TEST(token_file, is_used_again_only_while_nothing_changed) {
  TemporaryFolder folder;
  const Tokenizer t = Tokenizer::bytes();
  put(folder / "text", "one\n%\ntwo\n");
  auto reused = [&](const std::string& separator, const Tokenizer& tokenizer) {
    return prepare_token_file(folder / "tokens.bin", list_sources({folder / "text"}), separator, tokenizer).reused;
  };
  EXPECT_FALSE(reused("%", t));
  EXPECT_TRUE(reused("%", t));
  EXPECT_FALSE(reused("", t)) << "another separator";
  EXPECT_FALSE(reused("", small_bpe())) << "another tokenizer";
  EXPECT_FALSE(reused("%", t));
  std::string damaged = get(folder / "tokens.bin");
  damaged[40] ^= 1;
  put(folder / "tokens.bin", damaged);
  EXPECT_FALSE(reused("%", t)) << "damaged";
  put(folder / "text", "one\n%\ntwo more\n");
  EXPECT_FALSE(reused("%", t)) << "another size";
  std::filesystem::last_write_time(folder / "text", std::filesystem::file_time_type::clock::now() + std::chrono::hours(1));
  EXPECT_FALSE(reused("%", t)) << "another time";
}

TEST(token_file, difference_names_what_changed) {
  TemporaryFolder folder;
  put(folder / "d/a", "one"), put(folder / "d/b", "two");
  write_token_file(folder / "tokens.bin", list_sources({folder / "d"}), "", Tokenizer::bytes());
  TokenFile f(folder / "tokens.bin");
  auto now = [&] { return difference(f, list_sources({folder / "d"})); };
  EXPECT_EQ(now(), "");
  std::filesystem::last_write_time(folder / "d/a", std::filesystem::file_time_type::clock::now() + std::chrono::hours(1));
  EXPECT_EQ(now(), "") << "only touched";
  put(folder / "d/a", "eno");
  EXPECT_THAT(now(), ::testing::HasSubstr("d/a has other content"));
  put(folder / "d/a", "one more");
  EXPECT_THAT(now(), ::testing::HasSubstr("d/a had 3 bytes and now has 8"));
  put(folder / "d/a", "one"), put(folder / "d/c", "three");
  EXPECT_THAT(now(), ::testing::HasSubstr("d/c is new"));
  std::filesystem::remove(folder / "d/b");
  EXPECT_THAT(now(), ::testing::HasSubstr("d/b is no longer"));
}

struct Data {
  TemporaryFolder folder;
  TokenFile file;
  Split split;
  explicit Data(int documents = 40)
      : file(tokens_of(folder, testing::tiny_text(documents), "%", Tokenizer::bytes())), split(split_documents(file, 0.2)) {}
};

bool same(const TokenBatch& a, const TokenBatch& b) {
  return a.ids == b.ids && a.targets == b.targets && a.batch.cu_seqlens == b.batch.cu_seqlens && a.counted == b.counted;
}

TEST(sampler, batches_are_a_pure_function_of_seed_and_step) {
  Data d;
  Sampler one(d.file, d.split.train, 5, 16), two(d.file, d.split.train, 5, 16), other(d.file, d.split.train, 6, 16);
  std::map<int64_t, TokenBatch> first;
  for (int64_t step = 0; step < 60; ++step) first[step] = one.tokens(step * 64, 64);
  bool differs = false;
  for (int64_t step : {59, 3, 17, 0, 58, 31}) {
    EXPECT_TRUE(same(two.tokens(step * 64, 64), first[step])) << step;
    differs |= !same(other.tokens(step * 64, 64), first[step]);
  }
  EXPECT_TRUE(differs);
}

TEST(sampler, the_cut_into_micro_batches_changes_no_token) {
  Data d;
  Sampler s(d.file, d.split.train, 5, 16);
  TokenBatch whole = s.tokens(640, 128), joined;
  for (int64_t at = 640; at < 768; at += 32)
    for (const auto& p : s.tokens(at, 32).pieces) joined.add(d.file, p);
  EXPECT_TRUE(same(whole, joined));
}

TEST(sampler, an_epoch_holds_each_training_token_once_and_the_next_one_another_order) {
  Data d;
  Sampler s(d.file, d.split.train, 5, 16);
  const int64_t tokens = s.epoch_tokens();
  std::vector<std::vector<int64_t>> order(2);
  std::map<std::pair<int64_t, int64_t>, int> seen[2];
  int64_t at = 0;
  for (const auto& p : s.tokens(0, 2 * tokens / 16 * 16).pieces) {
    const size_t epoch = size_t(at / tokens);
    for (int64_t i = 0; i < p.length; ++i) ++seen[epoch][{p.document, p.from + i}];
    if (p.from == 0) order[epoch].push_back(p.document);
    at += p.length;
  }
  EXPECT_EQ(int64_t(seen[0].size()), tokens);
  for (const auto& [place, count] : seen[0]) EXPECT_EQ(count, 1);
  EXPECT_NE(order[0], order[1]);
  EXPECT_NE(order[0], d.split.train);
  EXPECT_EQ(std::set<int64_t>(order[0].begin(), order[0].end()), std::set<int64_t>(d.split.train.begin(), d.split.train.end()));
}

TEST(sampler, held_out_documents_are_never_trained_on) {
  Data d;
  ASSERT_GT(d.split.held_out.size(), 2u);
  const std::set<int64_t> held(d.split.held_out.begin(), d.split.held_out.end());
  Sampler s(d.file, d.split.train, 5, 16);
  for (const auto& p : s.tokens(0, 3 * s.epoch_tokens() / 16 * 16).pieces) EXPECT_FALSE(held.count(p.document));
}

TEST(sampler, targets_and_sequences_never_cross_a_border) {
  Data d;
  Sampler s(d.file, d.split.train, 5, 16);
  const TokenBatch b = s.tokens(0, 2048);
  ASSERT_EQ(b.batch.tokens(), 2048);
  ASSERT_EQ(b.batch.sequences(), int64_t(b.pieces.size()));
  int64_t counted = 0;
  for (int64_t q = 0; q < b.batch.sequences(); ++q) {
    const auto& p = b.pieces[size_t(q)];
    auto document = d.file.document(p.document);
    EXPECT_LE(b.batch.length(q), 16);
    EXPECT_EQ(b.batch.begin(q) / 16, (b.batch.begin(q) + b.batch.length(q) - 1) / 16) << "crosses a row";
    for (int64_t i = 0; i < p.length; ++i) {
      const int64_t in_document = p.from + i, row = b.batch.begin(q) + i;
      EXPECT_EQ(b.ids[size_t(row)], document[size_t(in_document)]);
      const bool last = in_document + 1 == int64_t(document.size());
      EXPECT_EQ(b.targets[size_t(row)], last ? kIgnored : document[size_t(in_document) + 1]);
      counted += !last;
    }
  }
  EXPECT_EQ(b.counted, counted);
}

TEST(sampler, two_ahead_stays_inside_a_piece) {
  TokenBatch b;
  b.batch = Batch::of_lengths({4, 1, 0, 2, 1});
  b.ids = {10, 11, 12, 13, 20, 30, 31, 40};
  b.targets = {11, 12, 13, kIgnored, kIgnored, 31, 32, kIgnored};  // the second last piece goes on beyond its row
  const NextTokens n(b);
  EXPECT_EQ(n.targets, (std::vector<int32_t>{12, 13, kIgnored, kIgnored, kIgnored, 32, kIgnored, kIgnored}));
  EXPECT_EQ(n.batch.padding, (std::vector<uint8_t>{0, 0, 0, 1, 1, 0, 0, 1}));
  EXPECT_EQ(n.counted, 3);
  for (size_t t = 0; t < n.ids.size(); ++t) EXPECT_EQ(n.ids[t], n.batch.padding[t] ? 0 : b.targets[t]);
}

TEST(sampler, copies_of_a_document_are_on_one_side) {
  TemporaryFolder folder;
  std::string text = testing::tiny_text(60);
  TokenFile f = tokens_of(folder, text + text, "%", Tokenizer::bytes());
  Split split = split_documents(f, 0.3);
  std::set<std::vector<int32_t>> held;
  for (int64_t d : split.held_out) held.insert({f.document(d).begin(), f.document(d).end()});
  EXPECT_GT(held.size(), 5u);
  for (int64_t d : split.train) EXPECT_FALSE(held.count({f.document(d).begin(), f.document(d).end()}));
}

}  // namespace
}  // namespace k3

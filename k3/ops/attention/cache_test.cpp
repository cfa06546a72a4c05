#include "k3/ops/attention/cache.h"

#include <gtest/gtest.h>

#include "k3/ops/attention/attention.h"
#include "k3/ops/testing.h"

namespace k3 {
namespace {

using testing::Step;
using testing::Values;

const MlaShape kShape{2, 16, 8, 12, 24, 0.2f};

// Tokens at..at+n-1 of a fixed text of 400 tokens go through `slot`.
class Text {
 public:
  explicit Text(uint64_t seed) : q_(400 * 48, seed), c_(400 * 24, seed + 1), k_pe_(400 * 8, seed + 2), kv_b_(56 * 24, 99, 0.2) {}
  Tensor read(Step& step, LatentCache& cache, int32_t slot, int64_t at, int64_t n) const {
    Batch batch = Batch::one(n);
    batch.slots = {slot};
    Param& w = step.keep(step.param("kv_b_proj.weight", kv_b_, {56, 24}, false));
    return mla_attention(step.input(q_.slice(at * 48, n * 48), {n, 48}), step.input(c_.slice(at * 24, n * 24), {n, 24}),
                         step.input(k_pe_.slice(at * 8, n * 8), {n, 8}), w, kShape, batch, &cache)
        .value();
  }

 private:
  Values q_, c_, k_pe_, kv_b_;
};

TEST(token_cache, bytes_per_token_are_those_of_the_document) {
  EXPECT_EQ(LatentCache(1, {96, 128, 64, 128, 512, 1}).bytes_per_token(), 2304u);
  EXPECT_EQ(LatentCache(1, {96, 128, 64, 128, 512, 1}, true).bytes_per_token(), 98560u);
  EXPECT_EQ(KvCache(1, {8, 2, 64, 32, 1}).bytes_per_token(), 4u * 2 * 96);
}

// Two readings that part at token 5, 127, 128 or 130 each go on as if alone: neither writes what the other reads.
TEST(token_cache, a_fork_goes_on_by_itself) {
  Text a(1), b(50);
  for (bool keep_expanded : {false, true})
    for (int64_t at : {0, 5, 127, 128, 130}) {
      Step step(false);
      LatentCache cache(4, kShape, keep_expanded);
      a.read(step, cache, 0, 0, at);
      cache.copy(1, 0);
      Tensor a1 = a.read(step, cache, 0, at, 7), b1 = b.read(step, cache, 1, at, 9), a2 = a.read(step, cache, 0, at + 7, 130);
      Tensor b2 = b.read(step, cache, 1, at + 9, 3);
      a.read(step, cache, 2, 0, at), a.read(step, cache, 3, 0, at);
      EXPECT_TRUE(testing::same_bits(a1, a.read(step, cache, 2, at, 7))) << at;
      EXPECT_TRUE(testing::same_bits(b1, b.read(step, cache, 3, at, 9))) << at;
      EXPECT_TRUE(testing::same_bits(a2, a.read(step, cache, 2, at + 7, 130))) << at;
      EXPECT_TRUE(testing::same_bits(b2, b.read(step, cache, 3, at + 9, 3))) << at;
    }
}

TEST(token_cache, truncated_tokens_were_never_there) {
  Text a(1), b(50);
  for (bool deterministic : {true, false})
    for (int64_t drop : {0, 1, 5, 130, 140}) {
      Step step(false);
      step.context.deterministic = deterministic;
      LatentCache cache(2, kShape);
      a.read(step, cache, 0, 0, 140 - drop);
      b.read(step, cache, 0, 140 - drop, drop);
      cache.truncate(0, drop);
      EXPECT_EQ(cache.tokens(0), 140 - drop);
      a.read(step, cache, 1, 0, 140 - drop);
      EXPECT_TRUE(testing::same_bits(a.read(step, cache, 0, 140 - drop, 3), a.read(step, cache, 1, 140 - drop, 3))) << drop;
    }
  LatentCache cache(1, kShape);
  EXPECT_THAT([&] { cache.truncate(0, 1); }, testing::throws_error("[attention] slot 0 has 0 tokens; 1 can't be dropped"));
}

TEST(token_cache, a_saved_sequence_goes_on_elsewhere) {
  Text a(1);
  for (int64_t n : {0, 1, 3, 63, 64, 65, 130}) {
    Step step(false);
    LatentCache here(2, kShape), there(5, kShape);
    a.read(step, here, 1, 0, n);
    Blob blob;
    here.save(1, blob);
    there.load(4, blob);
    EXPECT_TRUE(blob.at_end());
    EXPECT_TRUE(testing::same_bits(a.read(step, here, 1, n, 100), a.read(step, there, 4, n, 100))) << n;
  }
}

TEST(token_cache, other_bytes_are_refused_and_change_nothing) {
  Text a(1);
  Step step(false);
  LatentCache cache(2, kShape), expanded(1, kShape, true);
  a.read(step, cache, 0, 0, 10);
  Blob blob, same;
  cache.save(0, blob), cache.save(0, same);
  EXPECT_THAT([&] { expanded.load(0, blob); }, testing::throws_error("expected part expanded cache of 2 heads of 16+8 / 12"));
  same.bytes.resize(same.bytes.size() - 1);
  EXPECT_THAT([&] { cache.load(0, same); }, testing::throws_error("the bytes end before part block"));
  EXPECT_EQ(cache.tokens(0), 10);
  EXPECT_THAT([&] { cache.reset(2); }, testing::throws_error("slot 2 of a cache with 2 slots"));
  cache.reset(0);
  EXPECT_EQ(cache.tokens(0), 0);
}

}  // namespace
}  // namespace k3

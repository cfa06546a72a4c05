#include "k3/core/progress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace k3::testing {
namespace {

struct Watch {  // a clock that a test moves
  double now = 100;
  Pace::Clock clock() {
    return [this] { return now; };
  }
};

// A gigabyte at 10 MB/s, a megabyte at a time.
std::vector<std::string> said_of_a_slow_load(double period) {
  Watch watch;
  Pace pace(period, watch.clock());
  const Progress loading("loading", Progress::bytes, watch.clock());
  std::vector<std::string> said;
  for (uint64_t done = 1'000'000; done <= 1'000'000'000; done += 1'000'000) {
    watch.now += 0.1;
    if (pace.due()) said.push_back(loading.text(done, 1'000'000'000));
  }
  return said;
}

TEST(progress, a_load_says_percent_size_rate_and_time_left_once_a_period) {
  const std::vector<std::string> terminal = said_of_a_slow_load(1), piped = said_of_a_slow_load(10);
  EXPECT_NEAR(double(terminal.size()), 100, 10);  // a tenth of a second is not a float: some come a piece late
  EXPECT_NEAR(double(piped.size()), 10, 1);
  ASSERT_GE(piped.size(), 2u);
  EXPECT_THAT(piped[0], ::testing::MatchesRegex("loading: 10 % of 1.00 GB, 10.0 MB/s, 1:[0-9]+ left"));
  EXPECT_THAT(terminal[0], ::testing::MatchesRegex("loading: 1 % of 1.00 GB, 10.0 MB/s, 1:[0-9]+ left"));
}

TEST(progress, a_prompt_says_tokens_done_of_all_and_the_rate) {
  Watch watch;
  const Progress reading("reading the prompt", Progress::tokens, watch.clock());
  EXPECT_EQ(reading.text(0, 20000), "reading the prompt: 0 of 20,000 tokens, 0 tokens/s, ? left");
  watch.now += 8;
  EXPECT_EQ(reading.text(4000, 20000), "reading the prompt: 4,000 of 20,000 tokens, 500 tokens/s, 0:32 left");
  watch.now += 32;
  EXPECT_EQ(reading.text(20000, 20000), "reading the prompt: 20,000 of 20,000 tokens, 500 tokens/s, 0:00 left");
}

TEST(progress, the_time_left_is_within_three_tenths_after_the_first_quarter) {
  // Pieces take up to half as long again or half as long, in waves shorter than the first quarter and by chance.
  for (const double wave : {3., 40., 200.}) {
    Watch watch;
    const Progress work("work", Progress::tokens, watch.clock());
    std::vector<double> at;
    const int n = 1000;
    std::vector<double> forecast;
    for (int i = 1; i <= n; ++i) {
      watch.now += 0.01 * (1 + 0.25 * std::sin(6.283 * i / wave) + 0.2 * (i * 7919 % 101 / 50. - 1));
      at.push_back(watch.now), forecast.push_back(work.seconds_left(uint64_t(i), n));
    }
    for (int i = n / 4; i < n * 9 / 10; ++i) {
      const double left = at.back() - at[size_t(i)];
      EXPECT_NEAR(forecast[size_t(i)], left, 0.3 * left) << wave << ", piece " << i;
    }
  }
}

TEST(progress, durations_and_sizes_read_as_people_write_them) {
  EXPECT_EQ(duration_text(0), "0:00");
  EXPECT_EQ(duration_text(64.4), "1:04");
  EXPECT_EQ(duration_text(7200), "2:00:00");
  EXPECT_EQ(size_text(1500), "1.5 kB");
  EXPECT_EQ(size_text(8.59e9), "8.59 GB");
}

}  // namespace
}  // namespace k3::testing

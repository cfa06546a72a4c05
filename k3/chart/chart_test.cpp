#include "k3/chart/chart.h"

#include <gtest/gtest.h>

#include <cmath>

namespace k3::chart {

static size_t count(const std::string& in, const std::string& what) {
  size_t n = 0;
  for (size_t at = 0; (at = in.find(what, at)) != std::string::npos; at += what.size()) ++n;
  return n;
}

TEST(chart, nothing_to_show_is_no_chart) {
  EXPECT_EQ(svg({Chart::curves, "t", "x", "y", {}}), "");
  EXPECT_EQ(svg({Chart::curves, "t", "x", "y", {{"a", {1, 2}, {NAN, INFINITY}}}}), "");
  EXPECT_EQ(svg({Chart::curves, "t", "x", "y", {{"a", {1, 2}, {0, -1}}}, {}, false, true}), "");
}

TEST(chart, values_that_an_axis_cannot_show_are_left_out) {
  const std::string s = svg({Chart::curves, "t", "x", "y", {{"a", {1, 2, 3, 4}, {1, NAN, 3, 0}}}, {}, false, true});
  EXPECT_EQ(count(s, "<circle"), 2u);
  EXPECT_EQ(count(s, "nan") + count(s, "inf"), 0u);
}

TEST(chart, one_point_and_a_constant_have_room) {
  for (const std::vector<double>& y : {std::vector<double>{5}, std::vector<double>{5, 5, 5}}) {
    const std::string s = svg({Chart::curves, "t", "x", "y", {{"a", std::vector<double>(y.size(), 7), y}}});
    EXPECT_EQ(count(s, "<circle"), y.size());
    EXPECT_EQ(count(s, "nan"), 0u);
  }
}

TEST(chart, more_points_than_pixels_become_means) {
  Series s{"a", {}, {}};
  for (int i = 0; i < 100000; ++i) s.x.push_back(i), s.y.push_back(i % 2);
  EXPECT_LT(svg({Chart::curves, "t", "x", "y", {s}}).size(), 12000u);
}

TEST(chart, text_cannot_become_markup) {
  const std::string bad = "<b a='1'>&";
  for (const std::string& s : {svg({Chart::curves, bad, bad, bad, {{bad, {1, 2}, {1, 2}, {}, {}, Series::marks, {bad, bad}, {bad, bad}}}}),
                               svg({Chart::bars, bad, bad, bad, {{bad, {}, {1}}}, {bad}}), svg({Chart::heat, bad, bad, bad, {{bad, {}, {1}}}, {bad}}),
                               shares(bad, {{bad, bad, {{bad, 1}}}}, [&](double) { return bad; }), page_head(bad)})
    EXPECT_EQ(s.find("<b a"), std::string::npos) << s;
}

TEST(chart, parts_of_no_weight_are_joined) {
  std::vector<std::pair<std::string, double>> parts{{"large", 1000}};
  for (int i = 0; i < 20; ++i) parts.emplace_back("small" + std::to_string(i), 1);
  const std::string s = shares("t", {{"a", "sum", parts}}, [](double v) { return std::to_string(int(v)); });
  EXPECT_NE(s.find("other 20"), std::string::npos);
  EXPECT_EQ(s.find("small"), std::string::npos);
}

}  // namespace k3::chart

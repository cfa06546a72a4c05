#pragma once
// The three charts of the report as SVG text.
#include <string>
#include <vector>

namespace k3::plan {

struct Point {
  double x, y;
  std::string label;  // in the key, by the number in its mark; empty: no number
  std::string tip;
};
struct Series {
  std::string name;
  std::vector<Point> points;
  bool line = true;    // else marks only
  bool faint = false;  // a limit rather than data
};
// Both axes logarithmic.
std::string xy_chart(const std::string& title, const std::string& x_label, const std::string& y_label, const std::vector<Series>& series,
                     const std::string& x_unit, const std::string& y_unit);

struct Bar {
  std::string name, total;
  std::vector<std::pair<std::string, double>> parts;  // parts below 1 % are joined
};
// One bar a line, each on its own scale of shares; the legend of a part names its value.
std::string stacked_bars(const std::string& title, const std::vector<Bar>& bars, const std::string& unit);

std::string escape(const std::string& text);  // for HTML

}  // namespace k3::plan

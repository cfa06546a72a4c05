#pragma once
// Charts of a report as SVG text: curves with a band over seeds, groups of bars, a heat map.
#include <string>
#include <vector>

namespace k3::lab {

struct Series {
  std::string name;
  std::vector<double> x, y;       // bars and heat maps count x from 0 and leave it empty
  std::vector<double> low, high;  // the band; empty: none
};
struct Chart {
  enum Kind { curves, bars, heat } kind = curves;
  std::string title, x_label, y_label;
  std::vector<Series> series;           // heat: one a row
  std::vector<std::string> names = {};  // bars, heat: of the columns
  bool log_x = false, log_y = false;
};
std::string svg(const Chart& chart);
std::string escaped(const std::string& text);

}  // namespace k3::lab

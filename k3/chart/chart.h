#pragma once
// Charts as SVG text for pages that need nothing else: curves (with a band, with numbered marks, with limits), groups of bars, shares, a heat map.
//
//   std::string page = chart::page_head("Loss");
//   page += chart::svg({chart::Chart::curves, "Loss", "step", "nats a token", {{"trained on", steps, losses}}});
//   page += "</html>\n";
//
// Values that are not finite (or not above 0 on a logarithmic axis) are left out; a chart of nothing is an empty string.
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace k3::chart {

struct Series {
  std::string name;
  std::vector<double> x, y;                              // bars and heat maps count x from 0 and leave it empty
  std::vector<double> low = {}, high = {};               // the band; empty: none
  enum Style { line, dots, marks, limit } style = line;  // marks: points with numbers, no line; limit: a faint line that is not data
  std::vector<std::string> labels = {};                  // of points: numbered marks, explained in the key; written beside a limit. Empty: none
  std::vector<std::string> tips = {};                    // shown under the pointer; empty: name and values
  std::string colour = "";                               // empty: the next one
};
using ToText = std::function<std::string(double)>;
struct Chart {
  enum Kind { curves, bars, heat } kind = curves;
  std::string title, x_label, y_label;
  std::vector<Series> series;           // heat: one a row
  std::vector<std::string> names = {};  // bars, heat: of the columns
  bool log_x = false, log_y = false;
  ToText x_text = nullptr, y_text = nullptr;  // of ticks and tips; null: four digits
  bool last_values = false;                   // in the legend
};
std::string svg(const Chart& chart);

struct Share {
  std::string name, total;
  std::vector<std::pair<std::string, double>> parts;
};
// One bar a line, each the whole width; a part has one colour in all of them, parts below 1 % everywhere are joined as "other".
std::string shares(const std::string& title, const std::vector<Share>& bars, const ToText& text);

std::string colour_of_layer(size_t i, size_t n);  // from blue to orange, so that the order can be seen
std::string escaped(const std::string& text);     // for HTML, in attributes too
std::string page_head(const std::string& title);  // up to and with the heading; light and dark

}  // namespace k3::chart

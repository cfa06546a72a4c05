#include "k3/lab/chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace k3::lab {

namespace {

constexpr double kWidth = 720, kHeight = 340, kLeft = 70, kRight = 16, kTop = 14, kBottom = 48;
const char* const kColours[] = {"#2a78d6", "#eb6834", "#1baf7a", "#eda100", "#7a5fd0", "#e87ba4", "#2f8f2f", "#d94848", "#7d8590"};
const char* colour(size_t i) { return kColours[i % 9]; }

struct Axis {
  bool log;
  double low = 1e300, high = -1e300, from = 0, to = 1;
  bool shows(double v) const { return std::isfinite(v) && (!log || v > 0); }
  double of(double v) const { return log ? std::log10(v) : v; }
  void see(double v) {
    if (shows(v)) low = std::min(low, of(v)), high = std::max(high, of(v));
  }
  double at(double v) const { return from + (std::clamp(of(v), low, high) - low) / (high - low) * (to - from); }
  std::vector<double> ticks() const {
    std::vector<double> t;
    if (log) {
      int every = std::max(1, int((high - low) / 8 + 0.99));
      for (int d = int(std::ceil(low)); d <= int(std::floor(high)); ++d)
        if (d % every == 0) t.push_back(std::pow(10, d));
      if (high - low < 2)  // one decade or so: 2 and 5 as well
        for (int d = int(std::floor(low)); d <= int(std::floor(high)); ++d)
          for (double m : {2.0, 5.0})
            if (double v = m * std::pow(10, d); of(v) >= low && of(v) <= high) t.push_back(v);
      if (t.size() < 2) t = {std::pow(10, low), std::pow(10, (low + high) / 2), std::pow(10, high)};
      return t;
    }
    double raw = (high - low) / 5, power = std::pow(10, std::floor(std::log10(raw))), step = 10 * power;
    for (double m : {1.0, 2.0, 5.0})
      if (m * power >= raw) {
        step = m * power;
        break;
      }
    for (double v = std::ceil(low / step) * step; v <= high + 1e-9 * step; v += step) t.push_back(std::abs(v) < 1e-9 * step ? 0 : v);
    return t;
  }
  void widen() {
    if (low > high) low = 0, high = 1;
    if (high - low < 1e-12 * std::max(1.0, std::abs(high)))
      low -= 0.5, high += 0.5;
    else if (!log)
      high += 0.04 * (high - low);
  }
};

std::string text(double x, double y, const std::string& s, const char* anchor) {
  return fmt::format("<text x='{:.1f}' y='{:.1f}' text-anchor='{}'>{}</text>", x, y, anchor, escaped(s));
}

std::string y_axis(const Axis& y, const std::string& label) {
  std::string out;
  for (double v : y.ticks())
    out += fmt::format("<line class='grid' x1='{}' x2='{}' y1='{:.1f}' y2='{:.1f}'/>", kLeft, kWidth - kRight, y.at(v), y.at(v)) +
           text(kLeft - 6, y.at(v) + 4, fmt::format("{:.4g}", v), "end");
  return out +
         fmt::format("<text transform='translate(14 {}) rotate(-90)' text-anchor='middle'>{}</text>", (kTop + kHeight - kBottom) / 2, escaped(label));
}

std::string legend(const Chart& c) {
  std::string out = "<p class='legend'>";
  for (size_t i = 0; i < c.series.size(); ++i)
    out += fmt::format("<span><i style='background:{}'></i>{}</span> ", colour(i), escaped(c.series[i].name));
  return out + "</p>";
}

std::string curves(const Chart& c) {
  Axis x{c.log_x}, y{c.log_y};
  for (const Series& s : c.series)
    for (size_t i = 0; i < s.y.size(); ++i) {
      x.see(s.x[i]), y.see(s.y[i]);
      if (!s.low.empty()) y.see(s.low[i]), y.see(s.high[i]);
    }
  x.widen(), y.widen();
  x.from = kLeft, x.to = kWidth - kRight, y.from = kHeight - kBottom, y.to = kTop;
  std::string out = y_axis(y, c.y_label) + text((kLeft + kWidth - kRight) / 2, kHeight - 8, c.x_label, "middle");
  for (double v : x.ticks()) out += text(x.at(v), kHeight - kBottom + 18, fmt::format("{:.4g}", v), "middle");
  for (size_t i = 0; i < c.series.size(); ++i) {
    const Series& s = c.series[i];
    std::string line, upper, lower, dots;
    for (size_t j = 0; j < s.y.size(); ++j) {
      if (!x.shows(s.x[j]) || !y.shows(s.y[j])) continue;
      line += fmt::format("{:.1f},{:.1f} ", x.at(s.x[j]), y.at(s.y[j]));
      if (s.y.size() <= 24)
        dots += fmt::format("<circle cx='{:.1f}' cy='{:.1f}' r='3' fill='{}'><title>{}: {:.4g}, {:.4g}</title></circle>", x.at(s.x[j]), y.at(s.y[j]),
                            colour(i), escaped(s.name), s.x[j], s.y[j]);
      if (s.low.empty() || !y.shows(s.low[j]) || !y.shows(s.high[j])) continue;
      upper += fmt::format("{:.1f},{:.1f} ", x.at(s.x[j]), y.at(s.high[j]));
      lower = fmt::format("{:.1f},{:.1f} ", x.at(s.x[j]), y.at(s.low[j])) + lower;
    }
    if (!upper.empty()) out += fmt::format("<polygon points='{}{}' fill='{}' opacity='.18'/>", upper, lower, colour(i));
    out += fmt::format("<polyline points='{}' stroke='{}'><title>{}</title></polyline>", line, colour(i), escaped(s.name)) + dots;
  }
  return out;
}

std::string bars(const Chart& c) {
  Axis y{c.log_y};
  for (const Series& s : c.series)
    for (size_t i = 0; i < s.y.size(); ++i) {
      y.see(s.y[i]);
      if (!s.high.empty()) y.see(s.low[i]), y.see(s.high[i]);
    }
  if (c.log_y)
    y.low -= 0.3;
  else
    y.see(0);
  y.widen();
  y.from = kHeight - kBottom, y.to = kTop;
  const double group = (kWidth - kLeft - kRight) / double(std::max<size_t>(1, c.names.size())), one = group * 0.8 / double(c.series.size());
  std::string out = y_axis(y, c.y_label);
  const double floor = c.log_y ? y.from : y.at(0);
  for (size_t j = 0; j < c.names.size(); ++j) {
    out += text(kLeft + group * (double(j) + 0.5), kHeight - kBottom + 18, c.names[j], "middle");
    for (size_t i = 0; i < c.series.size(); ++i) {
      const Series& s = c.series[i];
      if (j >= s.y.size() || !y.shows(s.y[j])) continue;
      double left = kLeft + group * (double(j) + 0.1) + one * double(i), top = y.at(s.y[j]);
      out += fmt::format("<rect x='{:.1f}' y='{:.1f}' width='{:.1f}' height='{:.1f}' fill='{}'><title>{}, {}: {:.4g}</title></rect>", left,
                         std::min(top, floor), one * 0.92, std::max(0.5, std::abs(floor - top)), colour(i), escaped(s.name), escaped(c.names[j]),
                         s.y[j]);
      if (!s.high.empty() && s.high[j] > s.low[j])
        out += fmt::format("<line class='whisker' x1='{0:.1f}' x2='{0:.1f}' y1='{1:.1f}' y2='{2:.1f}'/>", left + one * 0.46, y.at(s.low[j]),
                           y.at(s.high[j]));
    }
  }
  return out + text((kLeft + kWidth - kRight) / 2, kHeight - 8, c.x_label, "middle");
}

std::string heat(const Chart& c) {
  double top = 1e-30;
  for (const Series& s : c.series)
    for (double v : s.y) top = std::max(top, std::isfinite(v) ? v : 0);
  const double w = (kWidth - kLeft - kRight) / double(std::max<size_t>(1, c.names.size())),
               h = (kHeight - kTop - kBottom) / double(std::max<size_t>(1, c.series.size()));
  std::string out;
  for (size_t i = 0; i < c.series.size(); ++i) {
    out += text(kLeft - 6, kTop + h * (double(i) + 0.5) + 4, c.series[i].name, "end");
    for (size_t j = 0; j < c.series[i].y.size(); ++j)
      if (double v = c.series[i].y[j]; std::isfinite(v))
        out += fmt::format(
            "<rect x='{:.1f}' y='{:.1f}' width='{:.1f}' height='{:.1f}' fill='#2a78d6' fill-opacity='{:.3f}'><title>{}, {}: {:.3g}</title></rect>",
            kLeft + w * double(j), kTop + h * double(i), w - 1, h - 1, 0.04 + 0.96 * v / top, escaped(c.series[i].name),
            escaped(j < c.names.size() ? c.names[j] : ""), v);
  }
  for (size_t j = 0; j < c.names.size(); ++j) out += text(kLeft + w * (double(j) + 0.5), kHeight - kBottom + 18, c.names[j], "middle");
  return out + text((kLeft + kWidth - kRight) / 2, kHeight - 8, c.x_label, "middle");
}

}  // namespace

std::string escaped(const std::string& s) {
  std::string out;
  for (char c : s) {
    if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '&')
      out += "&amp;";
    else if (c == '\'')
      out += "&#39;";
    else
      out += c;
  }
  return out;
}

std::string svg(const Chart& c) {
  std::string body = c.kind == Chart::curves ? curves(c) : c.kind == Chart::bars ? bars(c) : heat(c);
  return fmt::format("<figure><figcaption>{}</figcaption><svg viewBox='0 0 {} {}' role='img' aria-label='{}'>{}</svg>{}</figure>\n", escaped(c.title),
                     kWidth, kHeight, escaped(c.title), body, c.kind == Chart::heat ? "" : legend(c));
}

}  // namespace k3::lab

#include "k3/chart/chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace k3::chart {

namespace {

constexpr double kWidth = 720, kHeight = 340, kLeft = 92, kRight = 24, kTop = 34, kBottom = 48;
constexpr size_t kColours = 9, kMostParts = 8, kMostPoints = 500;
const char* colour(size_t i) {
  static const char* const all[kColours] = {"#2a78d6", "#eb6834", "#1baf7a", "#eda100", "#7a5fd0", "#e87ba4", "#2f8f2f", "#d94848", "#7d8590"};
  return all[i % kColours];
}
std::string colour(const Chart& c, size_t i) {
  if (c.series[i].style == Series::limit) return "#8a8a86";
  if (!c.series[i].colour.empty()) return c.series[i].colour;
  return colour(
      size_t(std::count_if(c.series.begin(), c.series.begin() + std::ptrdiff_t(i), [](const Series& s) { return s.style != Series::limit; })));
}

std::string text_of(const ToText& f, double v) { return f ? f(v) : fmt::format("{:.4g}", v); }

struct Axis {
  bool log;
  double low = 1e300, high = -1e300, from = 0, to = 1;
  bool shows(double v) const { return std::isfinite(v) && (!log || v > 0); }
  double of(double v) const { return log ? std::log10(v) : v; }
  void see(double v) {
    if (shows(v)) low = std::min(low, of(v)), high = std::max(high, of(v));
  }
  bool empty() const { return low > high; }
  double at(double v) const { return from + (std::clamp(of(v), low, high) - low) / (high - low) * (to - from); }
  // 1, 2 or 5 times a power of ten; on a logarithmic axis powers of ten, with 2 and 5 where they are few.
  std::vector<double> ticks() const {
    std::vector<double> t;
    if (log) {
      const int every = std::max(1, int((high - low) / 8 + 0.99));
      for (int d = int(std::floor(low)); d <= int(std::floor(high)); ++d)
        for (double m : {1.0, 2.0, 5.0}) {
          const double v = m * std::pow(10, d);
          if (of(v) >= low - 1e-9 && of(v) <= high + 1e-9 && (m == 1 ? d % every == 0 : high - low <= 2.5)) t.push_back(v);
        }
      return t;
    }
    const double raw = (high - low) / 5, power = std::pow(10, std::floor(std::log10(raw)));
    const double step = power * (raw <= power ? 1 : raw <= 2 * power ? 2 : raw <= 5 * power ? 5 : 10);
    for (double v = std::ceil(low / step) * step; v <= high + 1e-9 * step; v += step) t.push_back(std::abs(v) < 1e-9 * step ? 0 : v);
    return t;
  }
  void widen() {
    if (log) low = std::floor(2 * low) / 2, high = std::ceil(2 * high) / 2;
    if (high - low < 1e-9 * std::max(1.0, std::abs(high)))
      low -= 0.5, high += 0.5;
    else if (!log)
      high += 0.04 * (high - low);
  }
};

std::string text(double x, double y, const std::string& s, const char* anchor, const char* of_class = "") {
  return fmt::format("<text x='{:.1f}' y='{:.1f}' text-anchor='{}'{}>{}</text>", x, y, anchor, of_class, escaped(s));
}

std::string y_axis(const Axis& y, const Chart& c) {
  std::string out;
  for (double v : y.ticks())
    out += fmt::format("<line class='grid' x1='{}' x2='{}' y1='{:.1f}' y2='{:.1f}'/>", kLeft, kWidth - kRight, y.at(v), y.at(v)) +
           text(kLeft - 6, y.at(v) + 4, text_of(c.y_text, v), "end");
  return out + text(4, kTop - 16, c.y_label, "start");
}

std::string legend(const Chart& c, const std::vector<std::string>& key) {
  std::string out = "<p class='legend'>";
  for (size_t i = 0; i < c.series.size(); ++i) {
    const Series& s = c.series[i];
    if (s.style == Series::limit) continue;
    out += fmt::format("<span><i style='background:{}'></i>{}", colour(c, i), escaped(s.name));
    if (c.last_values && !s.y.empty()) out += fmt::format(" <small>{}</small>", text_of(c.y_text, s.y.back()));
    out += "</span> ";
  }
  for (size_t i = 0; i < key.size(); ++i) out += fmt::format("<span><b>{}</b> {}</span> ", i + 1, escaped(key[i]));
  return out + "</p>";
}

struct Place {
  double x, y, low, high;
  size_t point;
};
// What can be seen of a series, in pixels; of more points than pixels can show, the mean of each bucket.
std::vector<Place> places(const Series& s, const Axis& x, const Axis& y) {
  std::vector<Place> all;
  for (size_t j = 0; j < s.y.size(); ++j) {
    if (!x.shows(s.x[j]) || !y.shows(s.y[j])) continue;
    const bool band = !s.low.empty() && y.shows(s.low[j]) && y.shows(s.high[j]);
    all.push_back({x.at(s.x[j]), y.at(s.y[j]), y.at(band ? s.low[j] : s.y[j]), y.at(band ? s.high[j] : s.y[j]), j});
  }
  if (all.size() <= kMostPoints) return all;
  std::vector<Place> thin;
  for (size_t b = 0; b < kMostPoints; ++b) {
    const size_t first = b * all.size() / kMostPoints, last = (b + 1) * all.size() / kMostPoints;
    Place mean{0, 0, 0, 0, all[first].point};
    for (size_t i = first; i < last; ++i) mean.x += all[i].x, mean.y += all[i].y, mean.low += all[i].low, mean.high += all[i].high;
    const double n = double(last - first);
    thin.push_back({mean.x / n, mean.y / n, mean.low / n, mean.high / n, mean.point});
  }
  return thin;
}

std::string curves(const Chart& c, std::vector<std::string>* key) {
  Axis x{c.log_x}, y{c.log_y};
  for (const Series& s : c.series)
    for (size_t i = 0; i < s.y.size(); ++i) {
      if (!x.shows(s.x[i]) || !y.shows(s.y[i])) continue;
      x.see(s.x[i]), y.see(s.y[i]);
      if (!s.low.empty()) y.see(s.low[i]), y.see(s.high[i]);
    }
  if (x.empty()) return "";
  x.widen(), y.widen();
  x.from = kLeft, x.to = kWidth - kRight, y.from = kHeight - kBottom, y.to = kTop;
  std::string out = y_axis(y, c) + text((kLeft + kWidth - kRight) / 2, kHeight - 8, c.x_label, "middle");
  for (double v : x.ticks()) out += text(x.at(v), kHeight - kBottom + 18, text_of(c.x_text, v), "middle");
  for (size_t i = 0; i < c.series.size(); ++i) {
    const Series& s = c.series[i];
    const std::string hue = colour(c, i);
    const std::vector<Place> seen = places(s, x, y);
    std::string line, upper, lower;
    for (const Place& p : seen) {
      line += fmt::format("{:.1f},{:.1f} ", p.x, p.y);
      upper += fmt::format("{:.1f},{:.1f} ", p.x, p.high), lower = fmt::format("{:.1f},{:.1f} ", p.x, p.low) + lower;
    }
    if (!s.low.empty() && !seen.empty()) out += fmt::format("<polygon points='{}{}' fill='{}' opacity='.18'/>", upper, lower, hue);
    if (s.style != Series::marks)
      out += fmt::format("<polyline points='{}' stroke='{}'{}><title>{}</title></polyline>", line, hue,
                         s.style == Series::limit ? " class='limit'" : "", escaped(s.name));
    const bool dots = s.style == Series::dots || s.style == Series::marks || (s.style == Series::line && seen.size() <= 24);
    for (const Place& p : seen) {
      const std::string label = p.point < s.labels.size() ? s.labels[p.point] : "";
      const std::string tip = p.point < s.tips.size()
                                  ? s.tips[p.point]
                                  : fmt::format("{}: {}, {}", s.name, text_of(c.x_text, s.x[p.point]), text_of(c.y_text, s.y[p.point]));
      if (dots)
        out += fmt::format("<circle cx='{:.1f}' cy='{:.1f}' r='{}' fill='{}'><title>{}</title></circle>", p.x, p.y, label.empty() ? 3 : 8, hue,
                           escaped(tip));
      if (label.empty()) continue;
      if (s.style == Series::limit) {
        out += text(p.x - 4, p.y - 6, label, "end");
        continue;
      }
      auto it = std::find(key->begin(), key->end(), label);
      if (it == key->end()) it = key->insert(key->end(), label);
      out += text(p.x, p.y + 3.5, std::to_string(it - key->begin() + 1), "middle", " class='mark'");
    }
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
  if (y.empty()) return "";
  if (c.log_y)
    y.low -= 0.3;
  else
    y.see(0);
  y.widen();
  y.from = kHeight - kBottom, y.to = kTop;
  const double group = (kWidth - kLeft - kRight) / double(std::max<size_t>(1, c.names.size())), one = group * 0.8 / double(c.series.size());
  std::string out = y_axis(y, c);
  const double floor = c.log_y ? y.from : y.at(0);
  for (size_t j = 0; j < c.names.size(); ++j) {
    out += text(kLeft + group * (double(j) + 0.5), kHeight - kBottom + 18, c.names[j], "middle");
    for (size_t i = 0; i < c.series.size(); ++i) {
      const Series& s = c.series[i];
      if (j >= s.y.size() || !y.shows(s.y[j])) continue;
      double left = kLeft + group * (double(j) + 0.1) + one * double(i), top = y.at(s.y[j]);
      out += fmt::format("<rect x='{:.1f}' y='{:.1f}' width='{:.1f}' height='{:.1f}' fill='{}'><title>{}, {}: {}</title></rect>", left,
                         std::min(top, floor), one * 0.92, std::max(0.5, std::abs(floor - top)), colour(c, i), escaped(s.name), escaped(c.names[j]),
                         text_of(c.y_text, s.y[j]));
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

std::string figure(const std::string& title, double height, const std::string& body, const std::string& below) {
  return fmt::format("<figure><figcaption>{0}</figcaption><svg viewBox='0 0 {1} {2}' role='img' aria-label='{0}'>{3}</svg>{4}</figure>\n",
                     escaped(title), kWidth, height, body, below);
}

}  // namespace

std::string svg(const Chart& c) {
  std::vector<std::string> key;
  const std::string body = c.kind == Chart::curves ? curves(c, &key) : c.kind == Chart::bars ? bars(c) : heat(c);
  return body.empty() ? "" : figure(c.title, kHeight, body, c.kind == Chart::heat ? "" : legend(c, key));
}

std::string shares(const std::string& title, const std::vector<Share>& bars, const ToText& value) {
  std::vector<std::pair<std::string, double>> largest;  // of each part, its largest share of a bar
  for (const Share& b : bars) {
    double sum = 0;
    for (const auto& [n, v] : b.parts) sum += std::max(0.0, v);
    for (const auto& [n, v] : b.parts) {
      auto it = std::find_if(largest.begin(), largest.end(), [&](const auto& x) { return x.first == n; });
      if (it == largest.end()) it = largest.insert(largest.end(), {n, 0});
      if (sum > 0) it->second = std::max(it->second, v / sum);
    }
  }
  std::vector<double> ranked{0.01};
  for (const auto& [n, share] : largest) ranked.push_back(share);
  std::sort(ranked.begin() + 1, ranked.end(), std::greater<>());
  const double least = std::max(0.01, ranked[std::min(kMostParts, ranked.size() - 1)]);
  std::vector<std::string> shown;
  for (const auto& [n, share] : largest)
    if (share >= least && shown.size() < kMostParts) shown.push_back(n);
  constexpr double left = 8, width = kWidth - 16;
  std::string out;
  double y = 10;
  for (const Share& b : bars) {
    double sum = 0, x = left, key_x = left, key_y = y + 46;
    for (const auto& [n, v] : b.parts) sum += std::max(0.0, v);
    out += text(left, y + 10, b.name, "start", " class='ink'") + text(left + width, y + 10, b.total, "end", " class='ink'");
    double other = sum;
    auto part = [&](const std::string& n, double v, const char* hue) {
      if (v <= 0 || sum <= 0) return;
      const double w = width * v / sum;
      const std::string label = fmt::format("{} {}", n, value(v));
      out += fmt::format("<rect x='{:.1f}' y='{:.1f}' width='{:.1f}' height='20' fill='{}'><title>{} ({:.1f} %)</title></rect>", x, y + 18,
                         std::max(0.5, w - 1.5), hue, escaped(label), 100 * v / sum);
      x += w;
      const double need = 22 + 6.7 * double(label.size());
      if (key_x + need > left + width + 10) key_x = left, key_y += 15;
      out += fmt::format("<rect x='{:.1f}' y='{:.1f}' width='9' height='9' rx='2' fill='{}'/>", key_x, key_y, hue) +
             text(key_x + 13, key_y + 8, label, "start");
      key_x += need;
    };
    for (const auto& [n, v] : b.parts) {
      auto it = std::find(shown.begin(), shown.end(), n);
      if (it == shown.end()) continue;
      other -= std::max(0.0, v);
      part(n, v, colour(size_t(it - shown.begin())));
    }
    if (other > 1e-9 * sum) part("other", other, "#b9b8b2");
    y = key_y + 28;
  }
  return figure(title, y - 4, out, "");
}

std::string colour_of_layer(size_t i, size_t n) { return fmt::format("hsl({:.0f} 75% 52%)", 220 + 170 * (n > 1 ? double(i) / double(n - 1) : 0)); }

std::string escaped(const std::string& s) {
  std::string out;
  for (char c : s) c == '&' ? out += "&amp;" : c == '<' ? out += "&lt;" : c == '>' ? out += "&gt;" : c == '\'' ? out += "&#39;" : out += c;
  return out;
}

std::string page_head(const std::string& title) {
  return fmt::format(R"(<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1"><title>{0}</title>
<style>
:root {{ color-scheme: light dark; --ink: #1d2430; --soft: #5d6878; --page: #fbfbfa; --card: #fff; --line: #e3e6ea; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e8eaee; --soft: #9aa5b4; --page: #14171c; --card: #1c2027; --line: #313742; }} }}
body {{ margin: 0 auto; max-width: 1000px; padding: 24px 20px; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }}
body.wide {{ max-width: 1240px; }}
h1 {{ font-size: 22px; margin: 0; }}
h2 {{ font-size: 17px; margin: 28px 0 6px; }}
.answer {{ font-size: 17px; }}
ul, code, .soft {{ color: var(--soft); }}
.soft b {{ color: var(--ink); }}
main {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 18px; }}
figure {{ margin: 18px 0; padding: 14px 16px; background: var(--card); border: 1px solid var(--line); border-radius: 8px; }}
main figure {{ margin: 0; }}
figcaption, th {{ font-weight: 600; }}
svg {{ width: 100%; height: auto; display: block; }}
svg text {{ fill: var(--soft); font: 12px system-ui, sans-serif; }}
main svg text {{ font-size: 17px; }}
svg text.ink {{ fill: var(--ink); }}
svg text.mark {{ fill: #fff; font-size: 9.5px; font-weight: 600; pointer-events: none; }}
.grid {{ stroke: var(--line); }}
.whisker {{ stroke: var(--ink); }}
polyline {{ fill: none; stroke-width: 1.8; stroke-linejoin: round; }}
polyline.limit {{ stroke-width: 1; stroke-dasharray: 5 4; }}
.legend {{ margin: 4px 0 0; font-size: 13px; color: var(--soft); }}
.legend span {{ margin-right: 14px; white-space: nowrap; }}
.legend i {{ display: inline-block; width: 14px; height: 3px; margin-right: 5px; vertical-align: middle; border-radius: 2px; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: left; padding: 3px 14px 3px 0; border-bottom: 1px solid var(--line); vertical-align: top; }}
.numbers {{ width: 100%; font-size: 13px; }}
.numbers td:nth-child(2) {{ text-align: right; white-space: nowrap; }}
.numbers td:nth-child(3) {{ color: var(--soft); white-space: nowrap; }}
.numbers td:nth-child(4) {{ color: var(--soft); }}
</style>
<h1>{0}</h1>
)",
                     escaped(title));
}

}  // namespace k3::chart

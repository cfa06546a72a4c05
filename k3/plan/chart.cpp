#include "k3/plan/chart.h"

#include <algorithm>
#include <cmath>

#include "k3/core/error.h"
#include "k3/plan/number.h"

namespace k3::plan {

namespace {

const char* const kColours[] = {"#2a78d6", "#eb6834", "#1baf7a", "#eda100", "#4a3aa7", "#e87ba4", "#008300", "#e34948"};
constexpr int kMaxParts = 8;
constexpr double kWidth = 860, kLeft = 96, kRight = 160, kTop = 34, kHeight = 400, kBottom = 52;

std::string text(double x, double y, const std::string& s, const char* anchor = "start", const char* cls = "t") {
  return fmt::format("<text x='{:.1f}' y='{:.1f}' text-anchor='{}' class='{}'>{}</text>", x, y, anchor, cls, escape(s));
}

struct Axis {
  double low, high, from, to;
  double at(double v) const { return from + (std::log10(v) - low) / (high - low) * (to - from); }
};

Axis axis(double smallest, double largest, double from, double to) {
  double low = std::floor(std::log10(smallest) * 2) / 2, high = std::ceil(std::log10(largest) * 2) / 2;
  if (high - low < 0.5) high = low + 0.5;
  return {low, high, from, to};
}

std::string ticks(const Axis& a, const std::string& unit, bool horizontal, double other0, double other1) {
  std::string out;
  const bool fine = a.high - a.low <= 2.5, coarse = a.high - a.low > 8;
  for (int decade = int(std::floor(a.low)); decade <= int(std::ceil(a.high)); ++decade)
    for (int m : {1, 2, 5}) {
      if ((!fine && m != 1) || (coarse && decade % 2)) continue;
      double e = decade + std::log10(m);
      if (e < a.low - 1e-9 || e > a.high + 1e-9) continue;
      double at = a.at(m * std::pow(10, decade));
      std::string label = show(m * std::pow(10, decade), unit);
      if (horizontal)
        out +=
            fmt::format("<line x1='{0:.1f}' x2='{0:.1f}' y1='{1}' y2='{2}' class='g'/>", at, other0, other1) + text(at, other1 + 18, label, "middle");
      else
        out +=
            fmt::format("<line y1='{0:.1f}' y2='{0:.1f}' x1='{1}' x2='{2}' class='g'/>", at, other0, other1) + text(other0 - 8, at + 4, label, "end");
    }
  return out;
}

}  // namespace

std::string escape(const std::string& s) {
  std::string out;
  for (char c : s) c == '&' ? out += "&amp;" : c == '<' ? out += "&lt;" : c == '>' ? out += "&gt;" : c == '\'' ? out += "&#39;" : out += c;
  return out;
}

std::string xy_chart(const std::string& title, const std::string& x_label, const std::string& y_label, const std::vector<Series>& series,
                     const std::string& x_unit, const std::string& y_unit) {
  double x0 = 1e300, x1 = 0, y0 = 1e300, y1 = 0;
  for (const Series& s : series)
    for (const Point& p : s.points)
      if (p.x > 0 && p.y > 0 && std::isfinite(p.x) && std::isfinite(p.y))
        x0 = std::min(x0, p.x), x1 = std::max(x1, p.x), y0 = std::min(y0, p.y), y1 = std::max(y1, p.y);
  if (x1 == 0) return "";
  const double bottom = kHeight - kBottom, right = kWidth - kRight;
  Axis ax = axis(x0, x1, kLeft, right), ay = axis(y0, y1, bottom, kTop);
  std::string out = fmt::format("<figure><figcaption>{}</figcaption><svg viewBox='0 0 {} {}' role='img'>", escape(title), kWidth, kHeight);
  out += ticks(ax, x_unit, true, kTop, bottom) + ticks(ay, y_unit, false, kLeft, right);
  out += text((kLeft + right) / 2, kHeight - 10, x_label, "middle", "l") + text(kLeft, kTop - 14, y_label, "start", "l");
  std::vector<std::string> key;  // labels of marks: the number in the mark says which
  int colour = 0;
  double legend = kTop + 6;
  for (const Series& s : series) {
    const char* c = s.faint ? "#8a8a86" : kColours[size_t(colour++) % 8];
    if (s.line) {
      std::string path;
      for (const Point& p : s.points)
        if (p.x > 0 && p.y > 0) path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : "L", ax.at(p.x), ay.at(p.y));
      out += fmt::format("<path d='{}' fill='none' stroke='{}' stroke-width='{}'{}/>", path, c, s.faint ? 1 : 2,
                         s.faint ? " stroke-dasharray='5 4'" : "");
    }
    for (const Point& p : s.points) {
      if (!(p.x > 0 && p.y > 0)) continue;
      const double x = ax.at(p.x), y = ay.at(p.y);
      if (s.faint) {
        if (!p.label.empty()) out += text(x - 4, y - 6, p.label, "end");
        continue;
      }
      out +=
          fmt::format("<circle cx='{:.1f}' cy='{:.1f}' r='{}' fill='{}' stroke='#fcfcfb' stroke-width='1.5'><title>{}</title></circle>", x, y,
                      s.line ? 3.5 : 8, c, escape(p.tip.empty() ? fmt::format("{}: {}, {}", s.name, show(p.x, x_unit), show(p.y, y_unit)) : p.tip));
      if (p.label.empty()) continue;
      auto it = std::find(key.begin(), key.end(), p.label);
      if (it == key.end()) it = key.insert(key.end(), p.label);
      out += text(x, y + 3.5, std::to_string(it - key.begin() + 1), "middle", "n");
    }
    if (!s.faint) {
      out += fmt::format("<rect x='{}' y='{}' width='12' height='12' rx='2' fill='{}'/>", right + 14, legend - 6, c) +
             text(right + 32, legend + 4, s.name);
      legend += 20;
    }
  }
  legend += 8;
  for (size_t i = 0; i < key.size(); ++i, legend += 17)
    out += text(right + 26, legend + 4, std::to_string(i + 1), "end", "l") + text(right + 32, legend + 4, key[i]);
  return out + "</svg></figure>";
}

std::string stacked_bars(const std::string& title, const std::vector<Bar>& bars, const std::string& unit) {
  // one colour a part, the same in every bar
  std::vector<std::pair<std::string, double>> names;
  for (const Bar& b : bars) {
    double sum = 0;
    for (const auto& [n, v] : b.parts) sum += v;
    for (const auto& [n, v] : b.parts) {
      auto it = std::find_if(names.begin(), names.end(), [&](const auto& x) { return x.first == n; });
      double share = sum > 0 ? v / sum : 0;
      if (it == names.end())
        names.emplace_back(n, share);
      else
        it->second = std::max(it->second, share);
    }
  }
  std::vector<std::pair<std::string, double>> ranked = names;
  std::stable_sort(ranked.begin(), ranked.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
  std::vector<std::string> shown;
  for (const auto& [n, share] : names)
    for (int i = 0; i < std::min<int>(kMaxParts, int(ranked.size())); ++i)
      if (ranked[size_t(i)].first == n && share >= 0.01) shown.push_back(n);
  const double line = 84, height = 16 + line * double(bars.size()), left = 8, width = kWidth - 16;
  std::string out = fmt::format("<figure><figcaption>{}</figcaption><svg viewBox='0 0 {} {}' role='img'>", escape(title), kWidth, height);
  double y = 10;
  for (const Bar& b : bars) {
    double sum = 0, x = left, lx = left, ly = y + 46;
    for (const auto& [n, v] : b.parts) sum += std::max(0.0, v);
    out += text(left, y + 10, b.name, "start", "l") + text(left + width, y + 10, b.total, "end", "l");
    double other = sum;
    auto part = [&](const std::string& n, double v, const char* colour) {
      if (v <= 0 || sum <= 0) return;
      double w = width * v / sum;
      out += fmt::format("<rect x='{:.1f}' y='{:.1f}' width='{:.1f}' height='20' fill='{}'><title>{}: {} ({:.1f} %)</title></rect>", x, y + 18,
                         std::max(0.5, w - 1.5), colour, escape(n), show(v, unit), 100 * v / sum);
      x += w;
      std::string label = fmt::format("{} {}", n, show(v, unit));
      double need = 22 + 6.7 * double(label.size());
      if (lx + need > left + width + 10) lx = left, ly += 15;
      out += fmt::format("<rect x='{:.1f}' y='{:.1f}' width='9' height='9' rx='2' fill='{}'/>", lx, ly, colour) +
             text(lx + 13, ly + 8, label, "start", "s");
      lx += need;
    };
    for (const auto& [n, v] : b.parts) {
      auto it = std::find(shown.begin(), shown.end(), n);
      if (it == shown.end()) continue;
      other -= std::max(0.0, v);
      part(n, v, kColours[size_t(it - shown.begin()) % 8]);
    }
    if (other > 1e-9 * sum) part("other", other, "#b9b8b2");
    y += line;
  }
  return out + "</svg></figure>";
}

}  // namespace k3::plan

#include "k3/train/report.h"

#include <algorithm>
#include <cmath>
#include <fmt/format.h>
#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "k3/core/file.h"

namespace k3 {

using nlohmann::json;

namespace {

struct Point {
  double x, y;
};
struct Series {
  std::string name, color;
  std::vector<Point> points;
  bool dots = false;  // few points, far apart
};

// As many points as pixels can show: the mean of each bucket.
std::vector<Point> thinned(const std::vector<Point>& p, size_t most = 500) {
  if (p.size() <= most) return p;
  std::vector<Point> out;
  for (size_t b = 0; b < most; ++b) {
    size_t first = b * p.size() / most, last = (b + 1) * p.size() / most;
    double x = 0, y = 0;
    for (size_t i = first; i < last; ++i) x += p[i].x, y += p[i].y;
    out.push_back({x / double(last - first), y / double(last - first)});
  }
  return out;
}

// 1, 2 or 5 times a power of ten, so that about `count` steps make `span`.
double tick_step(double span, int count) {
  double raw = span / count, power = std::pow(10, std::floor(std::log10(raw)));
  for (double m : {1.0, 2.0, 5.0, 10.0})
    if (m * power >= raw) return m * power;
  return raw;
}

std::string escaped(const std::string& s) {
  std::string out;
  for (char c : s) {
    if (c == '<')
      out += "&lt;";
    else if (c == '&')
      out += "&amp;";
    else
      out += c;
  }
  return out;
}

std::string chart(const std::string& title, const std::string& note, std::vector<Series> series) {
  constexpr double W = 560, H = 280, left = 58, right = 12, top = 10, bottom = 30;
  double x0 = 1e300, x1 = -1e300, y0 = 1e300, y1 = -1e300;
  for (Series& s : series) {
    std::erase_if(s.points, [](const Point& p) { return !std::isfinite(p.y); });
    s.points = thinned(s.points);
    for (const Point& p : s.points) x0 = std::min(x0, p.x), x1 = std::max(x1, p.x), y0 = std::min(y0, p.y), y1 = std::max(y1, p.y);
  }
  std::erase_if(series, [](const Series& s) { return s.points.empty(); });
  if (series.empty()) return "";
  if (x1 <= x0) x1 = x0 + 1;
  if (y1 - y0 < 1e-9 * std::max(1.0, std::abs(y1))) y0 -= 0.5 * std::max(1e-6, std::abs(y1)), y1 += 0.5 * std::max(1e-6, std::abs(y1));
  const double step_y = tick_step(y1 - y0, 5), step_x = std::max(1.0, tick_step(x1 - x0, 6));
  y0 = std::floor(y0 / step_y) * step_y, y1 = std::ceil(y1 / step_y) * step_y;
  auto px = [&](double x) { return left + (x - x0) / (x1 - x0) * (W - left - right); };
  auto py = [&](double y) { return H - bottom - (y - y0) / (y1 - y0) * (H - top - bottom); };
  std::string svg = fmt::format("<figure><figcaption><b>{}</b> {}</figcaption><svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\">",
                                escaped(title), escaped(note), W, H, escaped(title));
  for (double y = y0; y <= y1 + 1e-6 * step_y; y += step_y)
    svg += fmt::format(
        "<line class=\"grid\" x1=\"{}\" x2=\"{}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/><text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{:.6g}</text>", left,
        W - right, py(y), py(y), left - 6, py(y) + 4, std::abs(y) < 1e-9 * step_y ? 0.0 : y);
  for (double x = std::ceil(x0 / step_x) * step_x; x <= x1; x += step_x)
    svg += fmt::format("<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{:.6g}</text>", px(x), H - 10, x);
  for (const Series& s : series) {
    std::string path;
    for (const Point& p : s.points) path += fmt::format("{:.1f},{:.1f} ", px(p.x), py(p.y));
    svg += fmt::format("<polyline points=\"{}\" stroke=\"{}\"><title>{}</title></polyline>", path, s.color, escaped(s.name));
    if (s.dots || s.points.size() == 1)
      for (const Point& p : s.points)
        svg += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\" fill=\"{}\"><title>{}, step {:.0f}: {:.5g}</title></circle>", px(p.x),
                           py(p.y), s.color, escaped(s.name), p.x, p.y);
  }
  svg += "</svg><p class=\"legend\">";
  for (const Series& s : series)
    svg += fmt::format("<span><i style=\"background:{}\"></i>{} <small>{:.4g}</small></span>", s.color, escaped(s.name), s.points.back().y);
  return svg + "</p></figure>\n";
}

// Layers from blue to orange, so that their order can be seen.
std::string layer_color(size_t i, size_t n) {
  double t = n > 1 ? double(i) / double(n - 1) : 0;
  return fmt::format("hsl({:.0f} 75% 52%)", 220 + 170 * t);
}

constexpr const char* kHead = R"(<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>{0}</title>
<style>
:root {{ color-scheme: light dark; --ink: #1d2430; --soft: #5d6878; --page: #fbfbfa; --card: #fff; --line: #e3e6ea; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e8eaee; --soft: #9aa5b4; --page: #14171c; --card: #1c2027; --line: #313742; }} }}
body {{ margin: 0 auto; max-width: 1240px; padding: 24px 20px; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 22px; margin: 0; }}
.sum {{ color: var(--soft); margin: 2px 0 20px; }}
.sum b {{ color: var(--ink); }}
main {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 18px; }}
figure {{ margin: 0; padding: 14px 16px; background: var(--card); border: 1px solid var(--line); border-radius: 8px; }}
figcaption {{ color: var(--soft); }}
figcaption b {{ color: var(--ink); }}
svg {{ width: 100%; height: auto; display: block; }}
svg text {{ fill: var(--soft); font: 12px system-ui, sans-serif; }}
.grid {{ stroke: var(--line); }}
polyline {{ fill: none; stroke-width: 1.6; stroke-linejoin: round; }}
.legend {{ margin: 4px 0 0; font-size: 13px; color: var(--soft); }}
.legend span {{ margin-right: 14px; white-space: nowrap; }}
.legend i {{ display: inline-block; width: 14px; height: 3px; margin-right: 5px; vertical-align: middle; border-radius: 2px; }}
</style>
<h1>{0}</h1>
)";

}  // namespace

void write_report(const std::string& metrics_path, const std::string& page_path, const std::string& title) {
  Series loss{"trained on", "hsl(215 75% 52%)", {}}, held{"held out", "hsl(25 85% 52%)", {}, true};
  Series bits{"trained on", "hsl(215 75% 52%)", {}}, held_bits{"held out", "hsl(25 85% 52%)", {}, true};
  Series rate{"learning rate", "hsl(265 60% 58%)", {}}, norm{"gradient norm", "hsl(160 60% 40%)", {}},
      speed{"tokens a second", "hsl(190 70% 42%)", {}};
  std::vector<Series> load;
  std::map<int64_t, Series> keep, open;
  json last, last_held;
  int64_t skipped = 0;
  const std::string all = read_file(metrics_path);
  for (size_t at = 0; at < all.size();) {
    size_t end = std::min(all.find('\n', at), all.size());
    json m = json::parse(all.begin() + std::ptrdiff_t(at), all.begin() + std::ptrdiff_t(end), nullptr, false);
    at = end + 1;
    if (!m.is_object() || !m.contains("step")) continue;
    const double x = m["step"];
    auto add = [&](const char* key, Series& s) {
      if (m.contains(key) && m[key].is_number()) s.points.push_back({x, m[key].get<double>()});
    };
    add("loss", loss), add("bits_per_byte", bits), add("held_out_loss", held), add("held_out_bits_per_byte", held_bits);
    add("learning_rate", rate), add("gradient_norm", norm), add("tokens_per_second", speed);
    if (m.contains("load"))
      for (size_t i = 0; i < m["load"].size(); ++i) {
        if (load.size() <= i) load.push_back({fmt::format("layer {}", m["load"][i]["layer"].get<int64_t>()), "", {}});
        load[i].points.push_back({x, m["load"][i]["max_over_mean"].get<double>()});
      }
    if (m.contains("gates"))
      for (const json& g : m["gates"])
        for (auto [key, into] : {std::pair{"keep", &keep}, {"open", &open}})
          if (g[key].is_number()) (*into)[g["layer"]].points.push_back({x, g[key].get<double>()});
    skipped += m.contains("skipped");
    if (m.contains("held_out_loss")) last_held = m;
    last = m;
  }
  auto layers = [](std::map<int64_t, Series>& of) {
    std::vector<Series> list;
    for (auto& [layer, s] : of) s.name = fmt::format("layer {}", layer), list.push_back(s);
    return list;
  };
  auto colored = [](std::vector<Series> list) {
    for (size_t i = 0; i < list.size(); ++i) list[i].color = layer_color(i, list.size());
    return list;
  };
  std::string page = fmt::format(fmt::runtime(kHead), escaped(title));
  if (last.is_object()) {
    auto number = [](const json& j, const char* key) { return j.contains(key) && j[key].is_number() ? j[key].get<double>() : NAN; };
    page += fmt::format("<p class=\"sum\">step <b>{}</b>, {} tokens seen; loss <b>{:.4f}</b>, <b>{:.4f}</b> bits per byte",
                        last["step"].get<int64_t>(), last.value("tokens_seen", int64_t(0)), number(last, "loss"), number(last, "bits_per_byte"));
    if (last_held.is_object())
      page += fmt::format("; held out at step {}: <b>{:.4f}</b>, <b>{:.4f}</b> bits per byte", last_held["step"].get<int64_t>(),
                          number(last_held, "held_out_loss"), number(last_held, "held_out_bits_per_byte"));
    if (skipped) page += fmt::format("; <b>{}</b> steps skipped, their gradient was not finite", skipped);
    page += "</p>\n";
  }
  page += "<main>\n";
  page += chart("Loss", "nats a token", {loss, held});
  page += chart("Bits per byte", "what the text would take, compressed by the model", {bits, held_bits});
  page += chart("Expert load", "the fullest expert over the mean; 1 is even", colored(load));
  page += chart("Memory kept", "mean of the forget gate, exp(log_decay); 1 forgets nothing", colored(layers(keep)));
  page += chart("Output gate", "mean of sigmoid(output_gate); near 0 a layer is silent", colored(layers(open)));
  page += chart("Gradient norm", "before clipping", {norm});
  page += chart("Learning rate", "", {rate});
  page += chart("Speed", "tokens a second", {speed});
  page += "</main>\n</html>\n";
  write_file(page_path, page);
}

}  // namespace k3

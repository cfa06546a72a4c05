#include "k3/train/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "k3/chart/chart.h"
#include "k3/core/file.h"

namespace k3 {

using nlohmann::json;

namespace {

using chart::Chart;
using chart::Series;

void add(Series& s, double x, double y) {
  if (std::isfinite(y)) s.x.push_back(x), s.y.push_back(y);
}
std::string over_steps(const std::string& title, const std::string& what, std::vector<Series> series) {
  std::erase_if(series, [](const Series& s) { return s.y.empty(); });
  Chart c{Chart::curves, title, "step", what, std::move(series)};
  c.last_values = true;
  return chart::svg(c);
}

}  // namespace

void write_report(const std::string& metrics_path, const std::string& page_path, const std::string& title) {
  Series loss{"trained on", {}, {}}, held{"held out", {}, {}, {}, {}, Series::dots}, bits = loss, held_bits = held;
  Series rate{"learning rate", {}, {}}, norm{"gradient norm", {}, {}}, speed{"tokens a second", {}, {}};
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
    auto read = [&](const char* key, Series& s) {
      if (m.contains(key) && m[key].is_number()) add(s, x, m[key].get<double>());
    };
    read("loss", loss), read("bits_per_byte", bits), read("held_out_loss", held), read("held_out_bits_per_byte", held_bits);
    read("learning_rate", rate), read("gradient_norm", norm), read("tokens_per_second", speed);
    if (m.contains("load"))
      for (size_t i = 0; i < m["load"].size(); ++i) {
        if (load.size() <= i) load.push_back({fmt::format("layer {}", m["load"][i]["layer"].get<int64_t>()), {}, {}});
        add(load[i], x, m["load"][i]["max_over_mean"].get<double>());
      }
    if (m.contains("gates"))
      for (const json& g : m["gates"])
        for (auto [key, into] : {std::pair{"keep", &keep}, {"open", &open}})
          if (g[key].is_number()) add((*into)[g["layer"]], x, g[key].get<double>());
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
    for (size_t i = 0; i < list.size(); ++i) list[i].colour = chart::colour_of_layer(i, list.size());
    return list;
  };
  std::string page = chart::page_head(title);
  if (last.is_object()) {
    auto number = [](const json& j, const char* key) { return j.contains(key) && j[key].is_number() ? j[key].get<double>() : NAN; };
    page += fmt::format("<p class=\"soft\">step <b>{}</b>, {} tokens seen; loss <b>{:.4f}</b>, <b>{:.4f}</b> bits per byte",
                        last["step"].get<int64_t>(), last.value("tokens_seen", int64_t(0)), number(last, "loss"), number(last, "bits_per_byte"));
    if (last_held.is_object())
      page += fmt::format("; held out at step {}: <b>{:.4f}</b>, <b>{:.4f}</b> bits per byte", last_held["step"].get<int64_t>(),
                          number(last_held, "held_out_loss"), number(last_held, "held_out_bits_per_byte"));
    if (skipped) page += fmt::format("; <b>{}</b> steps skipped, their gradient was not finite", skipped);
    page += "</p>\n";
  }
  page += "<main>\n";
  page += over_steps("Loss", "nats a token", {loss, held});
  page += over_steps("Bits per byte: what the text would take, compressed by the model", "bits", {bits, held_bits});
  page += over_steps("Expert load", "fullest expert over the mean; 1 is even", colored(load));
  page += over_steps("Memory kept", "mean of exp(log_decay); 1 forgets nothing", colored(layers(keep)));
  page += over_steps("Output gate", "mean of sigmoid(output_gate)", colored(layers(open)));
  page += over_steps("Gradient norm before clipping", "", {norm});
  page += over_steps("Learning rate", "", {rate});
  page += over_steps("Speed", "tokens a second", {speed});
  page += "</main>\n</html>\n";
  write_file(page_path, page);
}

}  // namespace k3

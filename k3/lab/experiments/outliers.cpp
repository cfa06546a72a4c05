// Activations against the scale of the input, through one and two gated layers, and the gradient near the bound.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "k3/core/rng.h"
#include "k3/lab/experiment.h"
#include "k3/ops/activation/activation_ref.h"

namespace k3::lab {

namespace {

constexpr int64_t kWidth = 64, kHidden = 128;
const char* const kNames[] = {"swiglu", "clipped", "situ"};
Activation activation(int i) {
  Activation a;
  a.kind = i == 0 ? Activation::Kind::swiglu : i == 1 ? Activation::Kind::clipped : Activation::Kind::situ;
  return a;  // limit 7; betas 4 and 25
}

// max |h| of the hidden units of the second layer when `layers` is 2, else of the first.
double largest(const Activation& a, double scale, int layers, uint64_t seed) {
  std::vector<double> x(kWidth), h(kHidden);
  for (int64_t i = 0; i < kWidth; ++i) x[size_t(i)] = scale * Rng{seed, 1}.normal(uint64_t(i));
  double top = 0;
  for (int layer = 0; layer < layers; ++layer) {
    auto row = [&](uint64_t which, int64_t r) {
      double s = 0;
      const Rng w{seed, 10 + 3 * uint64_t(layer) + which};
      for (int64_t i = 0; i < kWidth; ++i) s += x[size_t(i)] * w.normal(uint64_t(r * kWidth + i)) / std::sqrt(double(kWidth));
      return s;
    };
    top = 0;
    for (int64_t r = 0; r < kHidden; ++r) h[size_t(r)] = ref::glu(row(0, r), row(1, r), a), top = std::max(top, std::abs(h[size_t(r)]));
    const Rng w{seed, 10 + 3 * uint64_t(layer) + 2};
    for (int64_t i = 0; i < kWidth; ++i) {
      x[size_t(i)] = 0;
      for (int64_t r = 0; r < kHidden; ++r) x[size_t(i)] += h[size_t(r)] * w.normal(uint64_t(i * kHidden + r)) / std::sqrt(double(kHidden));
    }
  }
  return top;
}

std::vector<double> scales() {
  std::vector<double> s;
  for (int i = -4; i <= 12; ++i) s.push_back(std::pow(10, i / 4.0));
  return s;
}

std::vector<Unit> units(const Setting& setting) {
  const int64_t seeds = setting.seeds;
  return {{"growth", 1, {{"seeds", seeds}, {"width", kWidth}}, [seeds](const Tick& tick) {
             json out;
             for (int a = 0; a < 3; ++a)
               for (int layers : {1, 2}) {
                 json& curve = out[fmt::format("{} {}", kNames[a], layers)];
                 for (double s : scales()) {
                   double sum = 0;
                   for (int64_t seed = 1; seed <= seeds; ++seed) sum += std::log(largest(activation(a), s, layers, uint64_t(seed)));
                   curve.push_back(std::exp(sum / double(seeds)));
                 }
                 tick((a * 2 + layers) / 6.0);
               }
             for (int a = 0; a < 3; ++a)
               for (double u = 0; u <= 100; u += 2.5) {
                 double dg = 0, du = 0;
                 ref::glu_backward(2.0, u, activation(a), 1, dg, du);
                 out["gradient"][kNames[a]].push_back(du);
               }
             return out;
           }}};
}

Findings conclude(const Setting& setting, const Results& r) {
  const json& j = r.at("growth");
  Findings f;
  const std::vector<double> x = scales();
  auto slope = [&](const std::string& key) {  // over the last decade
    const size_t n = x.size();
    return std::log(j[key][n - 1].get<double>() / j[key][n - 5].get<double>()) / std::log(x[n - 1] / x[n - 5]);
  };
  Chart growth{Chart::curves, "Largest hidden activation against the scale of the input", "input scale", "max |h|", {}, {}, true, true};
  Table t{"Growth", {"activation", "slope, 1 layer", "slope, 2 layers", "largest seen", "d/du at up = 30"}, {}};
  for (const char* name : kNames) {
    double most = 0;
    for (int layers : {1, 2}) {
      const std::string key = fmt::format("{} {}", name, layers);
      Series s{key + (layers == 1 ? " layer" : " layers"), x, j[key].get<std::vector<double>>(), {}, {}};
      for (double v : s.y) most = std::max(most, v);
      growth.series.push_back(s);
    }
    t.rows.push_back({name, fmt::format("{:.2f}", slope(fmt::format("{} 1", name))), fmt::format("{:.2f}", slope(fmt::format("{} 2", name))),
                      fmt::format("{:.4g}", most), fmt::format("{:.3g}", j["gradient"][name][12].get<double>())});
  }
  Chart gradient{Chart::curves, "Gradient of the up branch at gate = 2", "up", "dh/du", {}, {}, false, false};
  for (const char* name : kNames) {
    Series s{name, {}, j["gradient"][name].get<std::vector<double>>(), {}, {}};
    for (size_t i = 0; i < s.y.size(); ++i) s.x.push_back(2.5 * double(i));
    gradient.series.push_back(s);
  }
  f.answer = fmt::format(
      "SwiGLU grows like |x|^{:.1f} through one layer and |x|^{:.1f} through two; SiTU never passes 4 x 25 = 100 and, at up = 30, still passes "
      "{:.2f} of "
      "the gradient where the clip passes {:.0f}.",
      slope("swiglu 1"), slope("swiglu 2"), j["gradient"]["situ"][12].get<double>(), j["gradient"]["clipped"][12].get<double>());
  f.notes = {fmt::format("Width {}, hidden {}, Gaussian weights, geometric mean of {} draws, double precision.", kWidth, kHidden, setting.seeds),
             "The notes put W_3 inside the bound of 100; it holds for the hidden activation, before the down-projection.",
             "The notes bound the gate by (-4, 4); its lower end is about -0.27, because the sigmoid ends it there."};
  f.tables.push_back(t);
  f.charts = {growth, gradient};
  return f;
}

}  // namespace

const Experiment kOutliers{"outliers", "How do activations grow with the input for SwiGLU, a clip and SiTU, and what gradient is left at the bound?",
                           units, conclude};

}  // namespace k3::lab

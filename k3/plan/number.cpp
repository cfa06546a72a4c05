#include "k3/plan/number.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "k3/core/error.h"
#include "k3/core/nearest.h"

namespace k3::plan {

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::exact:
      return "exact";
    case Kind::counted:
      return "counted";
    case Kind::modelled:
      return "estimate";
    case Kind::measured:
      return "measured";
  }
  return "?";
}

std::string show(double v, const std::string& unit, bool full) {
  if (!std::isfinite(v)) return std::isnan(v) ? "-" : v > 0 ? "inf" : "-inf";
  auto digits = [](double x) { return std::fabs(x) >= 1000 ? fmt::format("{:.1f}", x) : fmt::format("{:.4g}", x); };
  if (full && std::floor(v) == v && std::fabs(v) < 1e15) {
    std::string s = fmt::format("{:.0f}", std::fabs(v));
    for (int at = int(s.size()) - 3; at > 0; at -= 3) s.insert(size_t(at), ",");
    return (v < 0 ? "-" : "") + s + (unit.empty() ? "" : " " + unit);
  }
  if (unit == "s") {
    if (v == 0) return "0 s";
    double a = std::fabs(v);
    if (a < 1e-3) return digits(v * 1e6) + " us";
    if (a < 1) return digits(v * 1e3) + " ms";
    if (a < 7200) return digits(v) + " s";
    if (a < 172800) return digits(v / 3600) + " h";
    return digits(v / 86400) + " days";
  }
  if (unit == "%") return digits(v * 100) + " %";
  if (unit == "ratio" || unit == "FLOP/B") return digits(v) + (unit == "ratio" ? "" : " FLOP/B");
  static const char* kPrefix[] = {"", "k", "M", "G", "T", "P", "E", "Z", "Y"};
  int p = 0;
  while (std::fabs(v) >= 1000 && p < 8) v /= 1000, ++p;
  std::string text = digits(v), tail = std::string(kPrefix[p]) + unit;
  return tail.empty() ? text : text + " " + tail;
}

std::string table(const Sections& sections) {
  size_t key = 0, value = 0;
  for (const Section& s : sections)
    for (const Number& n : s.numbers) key = std::max(key, n.key.size()), value = std::max(value, show(n.value, n.unit).size());
  std::string out;
  for (const Section& s : sections) {
    out += (out.empty() ? "" : "\n") + s.title + "\n";
    for (const Number& n : s.numbers) out += fmt::format("  {:<{}}  {:>{}}  {}\n", n.key, key, show(n.value, n.unit), value, name_of(n.kind));
  }
  return out;
}

nlohmann::json to_json(const Sections& sections) {
  nlohmann::json out = nlohmann::json::object();
  for (const Section& s : sections)
    for (const Number& n : s.numbers)
      out[n.key] = {{"value", std::isfinite(n.value) ? nlohmann::json(n.value) : nlohmann::json()},
                    {"unit", n.unit},
                    {"kind", name_of(n.kind)},
                    {"formula", n.formula},
                    {"section", s.title}};
  return out;
}

const Number& find(const Sections& sections, const std::string& key) {
  std::vector<std::string> keys;
  for (const Section& s : sections)
    for (const Number& n : s.numbers) {
      if (n.key == key) return n;
      keys.push_back(n.key);
    }
  fail("[plan] this plan has no number '{}'; the nearest is '{}'", key, nearest(key, keys));
}

std::string explain(const Sections& sections, const std::string& key) {
  const Number& n = find(sections, key);
  std::string exactly = show(n.value, n.unit, true), shortly = show(n.value, n.unit);
  return fmt::format("{} = {}{} ({})\n  {}\n", n.key, exactly, exactly == shortly ? "" : ", or " + shortly, name_of(n.kind), n.formula);
}

}  // namespace k3::plan

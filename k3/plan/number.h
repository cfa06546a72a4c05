#pragma once
// Number: a value with its unit, how it was found, and the formula that gives it, so that every figure of a plan can be asked for its reason.
// A plan is a list of Sections; the table, the JSON and --explain all print that one list.
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace k3::plan {

enum class Kind {
  exact,     // arithmetic from the config
  counted,   // reported by the operators of the model's own code on the null device
  modelled,  // estimated with the efficiency constants of the hardware file
  measured,  // on this machine, or published
};
const char* name_of(Kind kind);

struct Number {
  std::string key;  // unique within a plan: "decode.hbm"
  double value = 0;
  std::string unit;  // "B", "FLOP", "s", "B/s", "token/s", "" for a count; printed with a prefix (GB, TF, ms)
  Kind kind = Kind::exact;
  std::string formula;  // symbols, then the values put in
};

struct Section {
  std::string title;
  std::vector<Number> numbers;
};
using Sections = std::vector<Section>;

// 1.5599e12 B as "1560 GB"; exact numbers below 1e15 keep all digits when `full`.
std::string show(double value, const std::string& unit, bool full = false);
std::string table(const Sections& sections);
nlohmann::json to_json(const Sections& sections);
// The value, its kind and its formula; an unknown key is an Error that names the nearest one.
std::string explain(const Sections& sections, const std::string& key);
const Number& find(const Sections& sections, const std::string& key);

}  // namespace k3::plan

#include "k3/tokenizer/json_text.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include <nlohmann/json.hpp>

#include "k3/core/error.h"

namespace k3 {
namespace {

using Json = nlohmann::ordered_json;
constexpr size_t kDeepest = 200;  // levels: each one copies what it holds

std::string print_double(double v) {  // the shortest digits that read back the same; an exponent below -4 and from 16
  if (v == 0) return std::signbit(v) ? "-0.0" : "0.0";
  char text[40];
  const int exponent = [&] {
    const auto end = std::to_chars(text, text + sizeof text, v, std::chars_format::scientific).ptr;
    *end = 0;
    return std::atoi(std::find(text, end, 'e') + 1);
  }();
  if (exponent < -4 || exponent >= 16) return text;
  std::string out(text, std::to_chars(text, text + sizeof text, v, std::chars_format::fixed).ptr);
  return out.find('.') == out.npos ? out + ".0" : out;
}

// Prints while it reads: every finished value is a string, an object is a list of them until its brace closes.
class Printer : public nlohmann::json_sax<Json> {
 public:
  explicit Printer(JsonStyle style)
      : sorted_(style == JsonStyle::sorted_compact),
        comma_(style == JsonStyle::in_order_spaced ? ", " : ","),
        colon_(style == JsonStyle::in_order_spaced ? ": " : ":") {}
  bool null() override { return value("null"); }
  bool boolean(bool v) override { return value(v ? "true" : "false"); }
  bool number_integer(number_integer_t v) override { return value(std::to_string(v)); }
  bool number_unsigned(number_unsigned_t v) override { return value(std::to_string(v)); }
  bool number_float(number_float_t v, const std::string& source) override {
    return value(source.find_first_of(".eE") == source.npos ? source : print_double(v));  // an integer too large for 64 bits
  }
  bool string(std::string& v) override { return value(quote_json(v)); }
  bool binary(Json::binary_t&) override { return false; }
  bool start_object(size_t) override { return open_.emplace_back(), open_.size() <= kDeepest; }
  bool start_array(size_t) override { return open_.emplace_back(), open_.size() <= kDeepest; }
  bool key(std::string& k) override {
    Level& level = open_.back();
    const auto [it, fresh] = level.at.try_emplace(k, level.values.size());  // of members with one key the last counts, in the first's place
    if (fresh) level.keys.push_back(k), level.values.emplace_back();
    level.next = it->second;
    return true;
  }
  bool end_object() override {
    const Level level = close();
    std::vector<size_t> order(level.keys.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    if (sorted_) std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return level.keys[a] < level.keys[b]; });
    std::string out = "{";
    for (const size_t i : order) out += (out.size() > 1 ? comma_ : "") + quote_json(level.keys[i]) + colon_ + level.values[i];
    return value(out + "}");
  }
  bool end_array() override {
    const Level level = close();
    std::string out = "[";
    for (const std::string& v : level.values) out += (out.size() > 1 ? comma_ : "") + v;
    return value(out + "]");
  }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception&) override { return false; }
  std::string result;

 private:
  struct Level {
    std::vector<std::string> keys, values;
    std::map<std::string, size_t> at;
    size_t next = 0;  // place of the value after a key
  };
  Level close() {
    Level level = std::move(open_.back());
    open_.pop_back();
    return level;
  }
  bool value(std::string text) {
    if (open_.empty())
      result = std::move(text);
    else if (Level& level = open_.back(); level.keys.empty())
      level.values.push_back(std::move(text));
    else
      level.values[level.next] = std::move(text);
    return true;
  }
  bool sorted_;
  std::string comma_, colon_;
  std::vector<Level> open_;
};

}  // namespace

std::string print_json(std::string_view json, JsonStyle style, std::string_view what) {
  Printer printer(style);
  K3_CHECK(Json::sax_parse(json, &printer), "[chat] {} must be JSON of at most {} levels: {}", what, kDeepest, json.substr(0, 80));
  return printer.result;
}

std::string quote_json(std::string_view utf8) { return '"' + escape_json(utf8) + '"'; }

std::string escape_json(std::string_view utf8) {
  std::string out;
  for (const char c : utf8) {
    const size_t named = std::string_view("\"\\\b\f\n\r\t").find(c);
    if (named != std::string_view::npos)
      out += {'\\', "\"\\bfnrt"[named]};
    else if (uint8_t(c) < 0x20)
      out += fmt::format("\\u{:04x}", uint8_t(c));
    else
      out += c;
  }
  return out;
}

bool is_json(std::string_view text) { return Json::accept(text); }

bool read_members(std::string_view json, std::vector<JsonMember>& members) {
  members.clear();
  size_t at = 0;
  auto skip_white = [&] { at = std::min(json.find_first_not_of(" \t\r\n", at), json.size()); };
  auto skip = [&](char wanted) {  // white space, then the character if it comes
    skip_white();
    const bool found = at < json.size() && json[at] == wanted;
    at += found;
    return found;
  };
  auto value = [&] {  // to the end of a string, or of a value with all its brackets; if it is JSON is asked later
    const size_t begin = at;
    for (int depth = 0; at < json.size(); ++at) {
      const char c = json[at];
      if (c == '"') {
        for (++at; at < json.size() && json[at] != '"'; ++at) at += json[at] == '\\';
        if (at >= json.size()) break;
      }
      if (depth == 0 && (c == ',' || c == '}' || c == ']' || c == ':' || c == ' ' || c == '\t' || c == '\r' || c == '\n')) break;
      depth += c == '{' || c == '[';
      depth -= c == '}' || c == ']';
      if (depth == 0 && (c == '"' || c == '}' || c == ']')) {
        ++at;
        break;
      }
    }
    at = std::min(at, json.size());
    return json.substr(begin, at - begin);
  };
  if (!skip('{')) return false;
  if (skip('}')) return true;
  do {
    skip_white();
    const std::string_view key = value();
    if (!skip(':')) return false;
    skip_white();
    const std::string_view source = value();
    const Json name = Json::parse(key, nullptr, false), parsed = Json::parse(source, nullptr, false);
    if (!name.is_string() || parsed.is_discarded()) return false;
    members.push_back({name.get<std::string>(), parsed.type_name(), parsed.is_string() ? parsed.get<std::string>() : std::string(source)});
  } while (skip(','));
  return skip('}');
}

}  // namespace k3

#pragma once
// JSON as text: printed the way that the chat formats want it, and read one level deep without touching the source of the values.
#include <string>
#include <string_view>
#include <vector>

namespace k3 {

// Characters beyond ASCII stay as they are; numbers are printed as Python does (1e-05, 1e+16, 2.0), integers of any size word for word.
enum class JsonStyle {
  sorted_compact,    // keys in code point order, "," and ":"
  in_order_compact,  // keys as they come
  in_order_spaced,   // ", " and ": "
};
std::string print_json(std::string_view json, JsonStyle, std::string_view what);  // what: named in the Error when it is no JSON

std::string quote_json(std::string_view utf8);   // "..."
std::string escape_json(std::string_view utf8);  // without the quotes

// The members of a JSON object: strings decoded, every other value as it stands in the source. False if it is no object; what follows the
// closing brace is not looked at.
struct JsonMember {
  std::string key, type, value;  // type: string number boolean null object array
};
bool read_members(std::string_view json, std::vector<JsonMember>& members);

bool is_json(std::string_view text);

}  // namespace k3

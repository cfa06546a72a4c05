#include "k3/tokenizer/stop_ids.h"

#include <algorithm>
#include <filesystem>

#include <nlohmann/json.hpp>

#include "k3/core/error.h"
#include "k3/core/file.h"
#include "k3/tokenizer/tokenizer.h"

namespace k3 {
namespace {

using Json = nlohmann::json;

void add(std::vector<StopId>& ids, int32_t id, const std::string& from) {
  const auto known = std::find_if(ids.begin(), ids.end(), [&](const StopId& s) { return s.id == id; });
  if (known == ids.end())
    ids.push_back({id, from});
  else if (known->from != from && !known->from.ends_with(", " + from))
    known->from += ", " + from;
}

void add_from(std::vector<StopId>& ids, const Json& config, const std::string& from, int32_t vocabulary) {
  const auto field = config.find("eos_token_id");
  if (field == config.end() || field->is_null()) return;
  for (const Json& id : field->is_array() ? *field : Json::array({*field})) {
    const bool known = id.is_number_integer() && id >= 0 && id < vocabulary;
    K3_CHECK(known, "[stop] {}: eos_token_id has {}, which is no id of the tokenizer (0 to {})", from, id.dump(), vocabulary - 1);
    add(ids, id, from);
  }
}

}  // namespace

std::vector<StopId> stop_ids(const std::string& folder, const Tokenizer& t) {
  std::vector<StopId> ids;
  for (const char* name : {"generation_config.json", "config.json"}) {
    const std::string path = folder + "/" + name;
    if (!std::filesystem::exists(path)) continue;
    const Json config = Json::parse(read_file(path), nullptr, false);
    K3_CHECK(config.is_object(), "[stop] {} is not a JSON object", path);
    add_from(ids, config, name, t.vocabulary());
    if (const auto inner = config.find("text_config"); inner != config.end() && inner->is_object()) add_from(ids, *inner, name, t.vocabulary());
  }
  if (t.has_eos()) add(ids, t.eos(), "tokenizer_config.json");
  for (const char* end : {"<|end_of_msg|>", "<|im_end|>"})
    if (const auto id = t.special(end)) add(ids, *id, "the chat format");
  std::sort(ids.begin(), ids.end(), [](const StopId& a, const StopId& b) { return a.id < b.id; });
  return ids;
}

}  // namespace k3

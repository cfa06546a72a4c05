#include "k3/plan/architecture.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "k3/core/error.h"
#include "k3/core/file.h"
#include "k3/core/nearest.h"
#include "k3/model/choices.h"

namespace k3::plan {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

const Format kFormats[] = {
    {"f32", 4},
    {"bf16", 2},
    {"fp8", 1},
    {"fp8_block", 1 + 4.0 / 16384},  // a float32 scale for 128 x 128
    {"mxfp8", 1 + 1.0 / 32},         // E8M0 for 32
    {"mxfp4", 0.5 + 1.0 / 32},
    {"nvfp4", 0.5 + 1.0 / 16},  // E4M3 for 16
    {"int4", 0.5 + 2.0 / 32},   // bf16 scale for 32
    {"int4_g128", 0.5 + 2.0 / 128},
};

// The keys of DeepSeek's layout that Config does not know; none changes a size.
void to_our_layout(json& j, Architecture& a) {
  std::string type = j.value("model_type", "");
  if (type != "deepseek_v3" && type != "kimi_k2") return;
  a.notes.push_back("read as all-MLA without rotation (" + type + "): no count depends on it");
  j["model_type"] = "kimi_linear";
  j["mixers"] = {"mla"};
  j["mla_use_nope"] = true;
  if (j.contains("scoring_func")) j["moe_router_activation_func"] = j["scoring_func"];
}

// Published formats that the planner knows beyond the model's: the key is taken out before Config sees it.
void take_quantization(json& j, Architecture& a) {
  if (!j.is_object() || !j.contains("quantization_config") || !j["quantization_config"].is_object()) return;
  const json& q = j["quantization_config"];
  if (q.value("format", "") == "mxfp4-pack-quantized")
    a.experts = format_of("mxfp4");
  else if (q.value("quant_method", "") == "fp8")
    a.experts = format_of("fp8_block"), j.erase("quantization_config");
  else if (q.value("format", "") == "pack-quantized")
    a.experts = format_of("int4"), j.erase("quantization_config");
}

bool set_format(Architecture& a, const std::string& key, const std::string& value) {
  if (key == "experts_format")
    a.experts = format_of(value);
  else if (key == "trunk_format")
    a.trunk = format_of(value);
  else
    return false;
  return true;
}

}  // namespace

std::vector<std::string> format_names() {
  std::vector<std::string> names;
  for (const Format& f : kFormats) names.push_back(f.name);
  return names;
}

Format format_of(const std::string& name) {
  for (const Format& f : kFormats)
    if (f.name == name) return f;
  fail("[plan] unknown storage format '{}'; the nearest known one is '{}'", name, nearest(name, format_names()));
}

std::string configs_folder() {
  std::error_code none;
  fs::path start[] = {fs::current_path(none), fs::read_symlink("/proc/self/exe", none).parent_path()};
  for (fs::path at : start)
    for (; !at.empty(); at = at.parent_path()) {
      if (fs::is_directory(at / "configs" / "hardware", none)) return (at / "configs").string();
      if (at == at.parent_path()) break;
    }
  fail("[plan] found no folder configs/hardware in the working directory or above the program; run from the project's folder");
}

std::vector<std::string> shipped_models() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(configs_folder()))
    if (entry.path().extension() == ".json") names.push_back(entry.path().stem().string());
  std::sort(names.begin(), names.end());
  return names;
}

Architecture load_architecture(const std::string& what, const std::vector<std::string>& sets) {
  // A shipped name means the shipped model wherever one stands; a file or folder of that name is ./NAME.
  const std::vector<std::string> shipped = shipped_models();
  std::string path = what;
  std::error_code none;
  if (fs::is_directory(path, none)) path += "/config.json";
  if (std::find(shipped.begin(), shipped.end(), what) != shipped.end()) path = configs_folder() + "/" + what + ".json";
  K3_CHECK(fs::is_regular_file(path, none), "[plan] '{}' is no shipped model, config file or snapshot folder; the nearest shipped one is '{}'", what,
           nearest(what, shipped));
  json j = read_config_file(path);

  Architecture a;
  a.name = fs::path(path).stem() == "config" ? fs::absolute(path).parent_path().filename().string() : fs::path(path).stem().string();
  a.experts = a.trunk = format_of("bf16");
  const std::string dtype =
      j.contains("text_config") ? j["text_config"].value("dtype", j.value("dtype", "")) : j.value("dtype", j.value("torch_dtype", ""));
  if (dtype == "float32") a.experts = a.trunk = format_of("f32");
  take_quantization(j, a);
  if (j.contains("text_config")) take_quantization(j["text_config"], a);
  if (j.contains("plan")) {
    for (const auto& [key, value] : j["plan"].items()) {
      if (key == "note")
        a.notes.push_back(value.get<std::string>());
      else
        K3_CHECK(set_format(a, key + "_format", value.get<std::string>()), "[plan] {}: unknown key plan.{}; known are experts, trunk and note", path,
                 key);
    }
    j.erase("plan");
  }
  j.erase("train");
  to_our_layout(j, a);
  a.config = Config::parse(j);
  for (const std::string& s : sets) {
    size_t eq = s.find('=');
    if (eq != std::string::npos && set_format(a, s.substr(0, eq), s.substr(eq + 1))) {
    } else {
      if (eq != std::string::npos && !Config::is_key(s.substr(0, eq)) && !Config::is_key("linear_attn_config." + s.substr(0, eq))) {
        auto keys = Config::keys();
        keys.insert(keys.end(), {"experts_format", "trunk_format"});
        fail("[plan] --set {}: unknown key; the nearest known one is '{}'", s, nearest(s.substr(0, eq), keys));
      }
      a.config.set(s);
    }
    a.name += " " + s;
  }
  a.config.finish();
  if (a.config.num_nextn_predict_layers > 0)
    a.notes.push_back(
        "the layer of multi-token prediction is not counted: it serves training; as a draft for decoding see --draft-width and --draft-ms");
  static const std::vector<std::string> kMixers = {"kda", "gdn", "deltanet", "mla", "mla_absorbed", "gqa", "mfa", "mqa"};
  for (const std::string& m : a.config.mixer_of_layer)
    K3_CHECK(std::find(kMixers.begin(), kMixers.end(), m) != kMixers.end(),
             "[plan] the planner has no formulas for mixer '{}'; the nearest known one is '{}'", m, nearest(m, kMixers));
  return a;
}

std::vector<std::pair<std::string, int64_t>> Architecture::mixers() const {
  std::vector<std::pair<std::string, int64_t>> kinds;
  for (const std::string& m : config.mixer_of_layer) {
    auto it = std::find_if(kinds.begin(), kinds.end(), [&](const auto& k) { return k.first == m; });
    if (it == kinds.end())
      kinds.emplace_back(m, 1);
    else
      ++it->second;
  }
  return kinds;
}

int64_t Architecture::moe_layers() const {
  int64_t n = 0;
  for (int64_t l = 0; l < config.num_hidden_layers; ++l) n += config.is_moe(l);
  return n;
}

bool Architecture::runs() const {
  auto names = mixer_names();
  return std::all_of(config.mixer_of_layer.begin(), config.mixer_of_layer.end(),
                     [&](const std::string& m) { return std::find(names.begin(), names.end(), m) != names.end(); });
}

}  // namespace k3::plan

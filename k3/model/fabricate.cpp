#include "k3/model/fabricate.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "k3/core/error.h"
#include "k3/core/file.h"
#include "k3/core/threads.h"
#include "k3/model/model.h"
#include "k3/model/safetensors.h"

namespace k3 {

using nlohmann::json;
namespace fs = std::filesystem;

namespace {

constexpr uint64_t kLinearShard = 5'000'000'000;  // the usual limit of a shard

bool is_expert(std::string_view name) { return name.find(".experts.") != name.npos; }

// Types of the releases (model.md 6.1, 6.3).
DType dtype_of(const Config& c, std::string_view name) {
  bool f32 = name.ends_with(".A_log") || name.ends_with(".dt_bias");
  if (c.nested()) f32 = f32 || name.ends_with("_conv1d.weight") || name.ends_with(".o_norm.weight") || name.ends_with(".e_score_correction_bias");
  return f32 ? DType::f32 : DType::bf16;
}

void add(const Config& c, const Param& p, std::vector<LayoutTensor>& to) {
  std::string name = c.prefix() + p.name;
  if (!c.quantization.empty() && is_expert(name)) {
    K3_CHECK(p.shape[1] % 32 == 0, "[fabricate] {} is {}, but MXFP4 needs a multiple of 32 inputs", name, to_string(p.shape));
    to.push_back({name + "_packed", DType::u8, {p.shape[0], p.shape[1] / 2}});
    to.push_back({name + "_scale", DType::u8, {p.shape[0], p.shape[1] / 32}});
    return;
  }
  Shape shape = p.shape;
  if (name.ends_with(".A_log")) {
    if (c.nested())
      shape = {std::max(shape.size(), c.kda_head_dim)};
    else
      shape = {1, 1, shape.size(), 1};
  }
  to.push_back({name, dtype_of(c, name), shape});
}

// 27 blocks of width 1024 with 12 heads of 128, patches of 14 x 14 x 3, 64 x 64 positions. The release's sums of parameters fix the shapes;
// the names are of the family's earlier towers. Nothing here reads them.
void add_vision(std::vector<LayoutShard>& shards) {
  auto put = [](LayoutShard& s, const std::string& name, Shape shape) { s.tensors.push_back({name, DType::bf16, shape}); };
  LayoutShard& projector = shards.emplace_back();
  put(projector, "mm_projector.post_norm.weight", {7168});
  put(projector, "mm_projector.proj.0.weight", {4096, 4096});
  put(projector, "mm_projector.proj.2.weight", {7168, 4096});
  LayoutShard& tower = shards.emplace_back();
  put(tower, "vision_tower.patch_embed.proj.weight", {1024, 3, 14, 14});
  put(tower, "vision_tower.patch_embed.pos_emb.weight", {64, 64, 1024});
  put(tower, "vision_tower.encoder.final_layernorm.weight", {1024});
  for (int l = 0; l < 27; ++l) {
    std::string block = "vision_tower.encoder.blocks." + std::to_string(l) + ".";
    put(tower, block + "norm0.weight", {1024}), put(tower, block + "norm1.weight", {1024});
    put(tower, block + "wqkv.weight", {4608, 1024}), put(tower, block + "wo.weight", {1024, 1536});
    put(tower, block + "mlp.fc0.weight", {4096, 1024}), put(tower, block + "mlp.fc1.weight", {1024, 4096});
  }
}

// What the values of a tensor are drawn from: uniform in center +- range; or MXFP4 codes and scales.
struct Law {
  enum Kind { uniform, codes, scales } kind = uniform;
  float center = 0, range = 0;
  int64_t used = 0;  // the rest is zero
};

Law law_of(const Config& c, const LayoutTensor& t) {
  const std::string_view name = t.name;
  const float in = float(t.shape.rank > 1 ? t.shape.size() / t.shape[0] : 1), unit = std::sqrt(3.0f);  // uniform in +- sqrt(3): variance 1
  Law law{.range = unit / std::sqrt(in), .used = t.shape.size()};
  if (name.ends_with("_packed"))
    law.kind = Law::codes;
  else if (name.ends_with("_scale"))
    law.kind = Law::scales, law.center = 127 - std::round(std::log2(2.93f * std::sqrt(in * 32)));  // 2.93: the codes' root mean square
  else if (name.ends_with(".A_log"))
    law.center = law.range = c.gate_lower_bound ? 0.5f : 1.386f, law.used = c.kda_num_heads;
  else if (name.ends_with(".dt_bias"))
    law.center = -4.5f, law.range = 2.3f;  // steps of about 0.001 to 0.1
  else if (name.ends_with("embed_tokens.weight"))
    law.range = unit;
  else if (name.ends_with("_bias"))
    law.range = 0.01f;
  else if (t.shape.rank == 1)
    law.center = 1, law.range = 0.1f;  // gains
  return law;
}

uint64_t mixed(uint64_t x) {  // splitmix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

constexpr int64_t kBlock = 1 << 16;  // elements; a multiple of the values drawn at once

// Elements [first, last) of a tensor; first is a multiple of kBlock. Four 16-bit draws come from one 64-bit word.
void draw(const Law& law, DType dtype, uint64_t stream, int64_t first, int64_t last, char* to) {
  auto word = [&](int64_t i) { return mixed(stream + uint64_t(i) * 0x9e3779b97f4a7c15ull); };
  if (law.kind == Law::codes) {
    for (int64_t i = first; i < last; i += 8) {
      uint64_t w = word(i / 8);
      std::memcpy(to + (i - first), &w, size_t(std::min<int64_t>(8, last - i)));
    }
    return;
  }
  for (int64_t i = first; i < last; i += 4) {
    uint64_t w = word(i / 4);
    for (int64_t j = i; j < std::min(i + 4, last); ++j, w >>= 16) {
      float u = (float(w & 0xffff) - 32767.5f) * (1 / 32768.0f);
      float x = j < law.used ? law.center + law.range * u : 0.0f;
      if (law.kind == Law::scales)
        to[j - first] = char(uint8_t(law.center + std::round(u)));
      else if (dtype == DType::f32)
        std::memcpy(to + (j - first) * 4, &x, 4);
      else
        reinterpret_cast<bf16*>(to)[j - first] = to_bf16(x);
    }
  }
}

void write_values(AtomicFile& f, const Config& c, const LayoutTensor& t, uint64_t seed, std::vector<char>& memory) {
  const Law law = law_of(c, t);
  const uint64_t stream = mixed(checksum(t.name.data(), t.name.size()) + seed);
  const int64_t width = int64_t(bytes_of(t.dtype)), n = t.shape.size(), at_once = 64 * kBlock;
  memory.resize(size_t(at_once * width));
  for (int64_t at = 0; at < n; at += at_once) {
    const int64_t count = std::min(at_once, n - at);
    parallel_blocks(count, kBlock, [&](int64_t a, int64_t b) { draw(law, t.dtype, stream, at + a, at + b, memory.data() + a * width); });
    f.write(memory.data(), size_t(count * width));
  }
}

json cut(const json& published, const FabricateOptions& o) {
  json top = published;
  json& text = top.contains("text_config") ? top["text_config"] : top;
  if (o.layers) {
    text["num_hidden_layers"] = o.layers;
    for (const char* list : {"layer_types", "mlp_layer_types"})
      if (text.contains(list) && text[list].is_array())
        while (int64_t(text[list].size()) > o.layers) text[list].erase(text[list].size() - 1);
    if (text.contains("linear_attn_config"))
      for (const char* list : {"kda_layers", "full_attn_layers"}) {
        json kept = json::array();
        for (const json& l : text["linear_attn_config"].value(list, json::array()))
          if (l.get<int64_t>() <= o.layers) kept.push_back(l);
        text["linear_attn_config"][list] = kept;
      }
  }
  if (o.experts) {
    text["num_experts"] = o.experts;
    text["num_experts_per_token"] = std::min(o.experts, text.value("num_experts_per_token", o.experts));
  }
  if (!o.experts_as.empty()) {
    for (const char* key : {"quantization_config", "compression_config"}) top.erase(key), text.erase(key);
    if (o.experts_as == "mxfp4") text["quantization_config"] = {{"quant_method", "compressed-tensors"}, {"format", "mxfp4-pack-quantized"}};
  }
  return top;
}

// The whole of it, faults of the config itself first; then cut.
json cut_file(const std::string& config, const FabricateOptions& o) {
  K3_CHECK(o.experts_as.empty() || o.experts_as == "bf16" || o.experts_as == "mxfp4", "[fabricate] experts_as is '{}' but must be bf16 or mxfp4",
           o.experts_as);
  json published = read_config_file(config);
  published.erase("train");
  Config whole = Config::parse(published);
  whole.finish();
  K3_CHECK(o.layers <= whole.num_hidden_layers, "[fabricate] layers is {} but {} has only {}", o.layers, config, whole.num_hidden_layers);
  K3_CHECK(o.experts == 0 || whole.num_experts > 0, "[fabricate] experts is {} but {} has none", o.experts, config);
  return cut(published, o);
}

}  // namespace

Config fabricated_config(const std::string& config, const FabricateOptions& o) {
  Config c = Config::parse(cut_file(config, o));
  c.finish();
  return c;
}

std::vector<LayoutShard> published_layout(const Config& c, bool whole) {
  for (const std::string& mixer : c.mixer_of_layer)
    K3_CHECK(mixer == "kda" || mixer == "mla", "[fabricate] mixer {} is in no published model; kda and mla are", mixer);
  const Model model(c);  // declares names and shapes; holds no memory
  std::vector<LayoutShard> shards;
  if (c.nested()) {
    shards.resize(size_t(c.num_hidden_layers) + 1);
    for (const Param& p : model.params().all()) {
      size_t layer = p.name.starts_with("model.layers.") ? size_t(std::atoll(p.name.c_str() + 13)) : size_t(c.num_hidden_layers);
      add(c, p, shards[layer].tensors);
    }
    if (whole) add_vision(shards);
  } else {
    uint64_t bytes = kLinearShard;
    std::vector<LayoutTensor> some;
    for (const Param& p : model.params().all()) {
      some.clear();
      add(c, p, some);
      for (LayoutTensor& t : some) {
        if (bytes + t.bytes() > kLinearShard) shards.emplace_back(), bytes = 0;
        bytes += t.bytes();
        shards.back().tensors.push_back(std::move(t));
      }
    }
  }
  auto rank = [](DType t) { return t == DType::f32 ? 0 : t == DType::bf16 ? 1 : 2; };
  for (size_t s = 0; s < shards.size(); ++s) {
    shards[s].file = fmt::format("model-{:05}-of-{:06}.safetensors", s + 1, shards.size());
    std::sort(shards[s].tensors.begin(), shards[s].tensors.end(),
              [&](const LayoutTensor& a, const LayoutTensor& b) { return std::pair(rank(a.dtype), a.name) < std::pair(rank(b.dtype), b.name); });
  }
  return shards;
}

Fabricated fabricate(const std::string& from, const std::string& out, const FabricateOptions& o,
                     const std::function<void(uint64_t, uint64_t)>& progress) {
  const json top = cut_file(from, o);
  Config c = Config::parse(top);
  c.finish();
  K3_CHECK(!fs::exists(out) || (fs::is_directory(out) && fs::is_empty(out)), "[fabricate] {} is there and not empty; name another --out", out);
  std::error_code fault;
  fs::create_directories(out, fault);
  K3_CHECK(!fault, "[fabricate] cannot make the folder {}: {}", out, fault.message());

  const std::vector<LayoutShard> shards = published_layout(c, c.nested() && c.hidden_size == 7168 && !o.layers && !o.experts);
  Fabricated result{.shards = int64_t(shards.size())};
  uint64_t done = 0;
  for (const LayoutShard& s : shards)
    for (const LayoutTensor& t : s.tensors) result.bytes += t.bytes(), ++result.tensors;
  std::string index = fmt::format("{{\n  \"metadata\": {{\n    \"total_size\": {}\n  }},\n  \"weight_map\": {{\n", result.bytes);
  std::vector<char> memory;
  for (const LayoutShard& s : shards) {
    std::vector<NamedTensor> named;
    uint64_t bytes = 0;
    for (const LayoutTensor& t : s.tensors) {
      named.push_back({t.name, Tensor(nullptr, t.dtype, t.shape)});
      bytes += t.bytes();
      index += fmt::format("    \"{}\": \"{}\",\n", t.name, s.file);
    }
    const std::string path = out + "/" + s.file, header = safetensors_header(named);
    const uint64_t length = header.size();
    AtomicFile f(path);
    f.write(&length, 8);
    f.write(header);
    if (!o.headers_only)
      for (const LayoutTensor& t : s.tensors) {
        write_values(f, c, t, o.seed, memory);
        done += t.bytes();
        if (progress) progress(done, result.bytes);
      }
    f.commit();
    if (o.headers_only) fs::resize_file(path, 8 + length + bytes);
  }
  index.resize(index.size() - 2);
  write_file(out + "/model.safetensors.index.json", index + "\n  }\n}");
  write_file(out + "/config.json", top.dump(2) + "\n");
  json generation = c.nested() ? json{{"max_length", 1048576}} : json{{"bos_token_id", c.bos_token_id}, {"pad_token_id", c.pad_token_id}};
  generation["eos_token_id"] = c.eos_token_id.size() == 1 ? json(c.eos_token_id[0]) : json(c.eos_token_id);
  write_file(out + "/generation_config.json", generation.dump(2) + "\n");
  return result;
}

}  // namespace k3

#include "k3/model/checkpoint.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "k3/core/error.h"
#include "k3/core/gpu.h"
#include "k3/core/threads.h"
#include "k3/model/loading.h"
#include "k3/ops/linear/quantize.h"
#include "k3/ops/linear/weight_product.h"

namespace k3 {

namespace {

// Other spellings of a name, most usual first.
std::vector<std::string> spellings(const Config& c, const std::string& name) {
  std::vector<std::string> all = {c.prefix() + name};
  auto replaced = [&](const std::string& from, const std::string& to) {
    size_t at = name.find(from);
    if (at != std::string::npos) all.push_back(c.prefix() + name.substr(0, at) + to + name.substr(at + from.size()));
  };
  replaced(".mlp.", ".block_sparse_moe.");                                             // the dense layer as re-saved by the native implementation
  for (const char* residual : {"self_attention_res", "mlp_res", "output_attn_res"}) {  // first releases
    replaced(std::string(residual) + "_norm.weight", std::string(residual) + ".norm_weight");
    replaced(std::string(residual) + "_proj.weight", std::string(residual) + ".proj_weight");
  }
  return all;
}

Shape squeezed(const Shape& s) {
  Shape out;
  for (int i = 0; i < s.rank; ++i)
    if (s[i] != 1) out.dims[out.rank++] = s[i];
  return out;
}

bool ignorable(const Config& c, std::string_view name) {
  for (std::string_view start : {"vision_tower.", "mm_projector.", "model.mtp", "language_model.model.mtp"})
    if (name.starts_with(start)) return true;
  size_t at = name.find("model.layers.");
  return at != std::string_view::npos && std::atoll(std::string(name.substr(at + 13, 9)).c_str()) >= c.num_hidden_layers;
}

template <class T, class F>
void convert(const Tensor& from, float* to, F value) {
  const T* p = static_cast<const T*>(from.data());
  parallel_blocks(from.size(), 1 << 16, [&](int64_t a, int64_t b) {
    for (int64_t i = a; i < b; ++i) to[i] = value(p[i]);
  });
}

float half_to_float(uint16_t h) {
  int exponent = (h >> 10) & 31, mantissa = h & 1023;
  float magnitude = exponent == 31 ? (mantissa ? NAN : INFINITY)
                    : exponent     ? std::ldexp(1024.0f + float(mantissa), exponent - 25)
                                   : std::ldexp(float(mantissa), -24);
  return h & 0x8000 ? -magnitude : magnitude;
}

void to_float32(const Tensor& from, float* to, const std::string& name) {
  switch (from.dtype()) {
    case DType::f32:
      std::memcpy(to, from.data(), from.bytes());
      break;
    case DType::bf16:
      convert<bf16>(from, to, [](bf16 x) { return to_float(x); });
      break;
    case DType::f16:
      convert<uint16_t>(from, to, half_to_float);
      break;
    case DType::f64:
      convert<double>(from, to, [](double x) { return float(x); });
      break;
    default:
      fail("[checkpoint] tensor {} has dtype {}, which is no weight", name, name_of(from.dtype()));
  }
}

// What only linear() and experts() read, which take any storage.
bool is_product_weight(const Param& p) { return p.role.kind == Role::Kind::matrix && p.shape.rank == 2 && !p.name.ends_with(".kv_b_proj.weight"); }

bool is_dense(const Param& p) {
  auto has = [&](const char* part) { return p.name.find(part) != std::string::npos; };
  return is_product_weight(p) && !has(".experts.") && !has(".gate.") && !has(".f_a_proj.") && !has(".f_b_proj.") && !has("_res_proj.");
}

// p.value and p.scale from a stored matrix, some rows at a time.
void narrow(Param& p, ParamSet& set, const Snapshot& snapshot, const StoredTensor& t, Dense dense) {
  const Tensor stored = snapshot.view(t);
  const int64_t out = p.shape[0], in = p.shape[1], step = std::max<int64_t>(1, (int64_t(8) << 20) / (4 * in));
  std::vector<float> wide(size_t(std::min(step, out) * in));
  if (dense == Dense::bf16)
    p.value = set.own(DType::bf16, p.shape);
  else if (dense == Dense::q8)
    p.value = set.own(DType::u8, p.shape), p.scale = set.own(DType::f32, {out, (in + kGroupQ8 - 1) / kGroupQ8});
  else
    p.value = set.own(DType::u8, {out, in / 2}), p.scale = set.own(DType::u8, {out, in / kGroupMxfp4});
  for (int64_t a = 0; a < out; a += step) {
    const int64_t b = std::min(a + step, out);
    to_float32(stored.reshape(p.shape).row_range(a, b), wide.data(), t.name);
    if (dense == Dense::bf16)
      parallel_blocks((b - a) * in, 1 << 16, [&](int64_t i, int64_t j) {
        for (; i < j; ++i) p.value.as<bf16>()[a * in + i] = to_bf16(wide[size_t(i)]);
      });
    else
      quantize(dense == Dense::q8 ? Stored::q8 : Stored::mxfp4, wide.data(), b - a, in, p.value.row_range(a, b).data(),
               p.scale.row_range(a, b).data(), t.name);
    give_back(stored.reshape(p.shape).row_range(0, b));
  }
}
bool narrows(const Param& p, DType stored, Dense dense) {
  if (!is_dense(p)) return false;
  switch (dense) {
    case Dense::as_stored:
      return false;
    case Dense::bf16:
      return stored != DType::bf16;
    case Dense::q8:
      return true;
    case Dense::mxfp4:
      return p.shape[1] % kGroupMxfp4 == 0;
  }
  return false;
}

// A_log is stored with one value a head, or padded with zeros.
bool is_padded_A_log(const Param& p, const StoredTensor& t) {
  return p.name.ends_with(".A_log") && squeezed(t.shape).rank <= 1 && t.shape.size() >= p.shape.size();
}

}  // namespace

std::string resolve_snapshot(const std::string& folder) {
  namespace fs = std::filesystem;
  K3_CHECK(fs::exists(folder), "[model] {} is not there", folder);
  if (!fs::is_directory(folder) || fs::exists(folder + "/config.json")) return folder;
  K3_CHECK(fs::exists(folder + "/LATEST"), "[model] {} holds neither config.json nor LATEST; is it a model's folder?", folder);
  std::string step = read_file(folder + "/LATEST");
  while (!step.empty() && std::isspace(static_cast<unsigned char>(step.back()))) step.pop_back();
  K3_CHECK(!step.empty() && step.find('/') == std::string::npos && fs::exists(folder + "/" + step + "/config.json"),
           "[model] {}/LATEST names '{}', which is no checkpoint there; write the name of another step folder into it", folder, step);
  return folder + "/" + step;
}

const StoredTensor* find_parameter(const Snapshot& snapshot, const Config& config, const std::string& name) {
  for (const std::string& n : spellings(config, name))
    if (const StoredTensor* t = snapshot.find(n)) return t;
  return nullptr;
}

std::vector<StoredParam> find_parameters(const Model& model, const Snapshot& snapshot) {
  const Config& c = model.config();
  std::vector<StoredParam> all;
  std::unordered_set<const StoredTensor*> used;
  std::vector<std::string> missing;
  auto use = [&](const std::string& name) {
    const StoredTensor* t = find_parameter(snapshot, c, name);
    if (t) used.insert(t);
    return t;
  };
  for (const Param& p : model.params().all()) {
    StoredParam& at = all.emplace_back();
    at.value = use(p.name);
    if (!at.value && p.name.ends_with(".weight")) {
      const std::string base = p.name.substr(0, p.name.size() - 7);
      at.value = use(base + ".weight_packed"), at.scale = use(base + ".weight_scale");
      if (!at.value != !at.scale) {
        missing.push_back(c.prefix() + base + (at.value ? ".weight_scale" : ".weight_packed"));
        continue;
      }
    }
    if (!at.value) {
      missing.push_back(c.prefix() + p.name);
      continue;
    }
    const StoredTensor& t = *at.value;
    const std::string& file = snapshot.file_of(t);
    if (at.scale) {
      K3_CHECK(p.shape.rank == 2 && t.dtype == DType::u8 && t.shape == Shape({p.shape[0], p.shape[1] / 2}) && p.shape[1] % 32 == 0,
               "[checkpoint] {} in {} is {} {} but {} needs U8 {} x {}", t.name, file, name_of(t.dtype), to_string(t.shape), to_string(p.shape),
               p.shape[0], p.shape[1] / 2);
      K3_CHECK(at.scale->dtype == DType::u8 && at.scale->shape == Shape({p.shape[0], p.shape[1] / 32}),
               "[checkpoint] {} in {} is {} {} but must be U8 {} x {}", at.scale->name, snapshot.file_of(*at.scale), name_of(at.scale->dtype),
               to_string(at.scale->shape), p.shape[0], p.shape[1] / 32);
      continue;
    }
    K3_CHECK(is_padded_A_log(p, t) || squeezed(t.shape) == squeezed(p.shape), "[checkpoint] {} in {} is {} but this config needs {}", t.name, file,
             to_string(t.shape), to_string(p.shape));
    K3_CHECK(t.dtype == DType::f32 || t.dtype == DType::bf16 || t.dtype == DType::f16 || t.dtype == DType::f64,
             "[checkpoint] {} in {} is {}, which is no weight; F32, BF16, F16 and F64 are", t.name, file, name_of(t.dtype));
  }
  auto list = [](const std::vector<std::string>& names) {
    std::string text;
    for (size_t i = 0; i < names.size() && i < 10; ++i) text += (i ? ", " : "") + names[i];
    return names.size() > 10 ? text + ", ..." : text;
  };
  K3_CHECK(missing.empty(), "[checkpoint] {} lacks {} tensors that its config asks for: {}", snapshot.folder(), missing.size(), list(missing));
  std::vector<std::string> extra;
  for (const StoredTensor& t : snapshot.tensors())
    if (!used.count(&t) && !ignorable(c, t.name)) extra.push_back(t.name);
  K3_CHECK(extra.empty(), "[checkpoint] {} holds {} tensors that its config has no place for: {}", snapshot.folder(), extra.size(), list(extra));
  return all;
}

LoadedForm loaded_form(const Param& p, const StoredParam& at, const LoadOptions& o) {
  auto shape_only = [](DType dtype, const Shape& shape) { return Tensor(nullptr, dtype, shape, Device::null); };
  if (at.scale && !o.for_training && is_product_weight(p))
    return {shape_only(DType::u8, at.value->shape), shape_only(DType::u8, at.scale->shape), true};
  if (at.scale || o.for_training || p.role.kind == Role::Kind::vector || p.role.kind == Role::Kind::fixed)
    return {shape_only(DType::f32, p.shape), {}};
  const int64_t out = p.shape[0], in = p.shape[1];
  if (narrows(p, at.value->dtype, o.dense)) {
    if (o.dense == Dense::bf16) return {shape_only(DType::bf16, p.shape), {}};
    if (o.dense == Dense::q8) return {shape_only(DType::u8, p.shape), shape_only(DType::f32, {out, (in + kGroupQ8 - 1) / kGroupQ8})};
    return {shape_only(DType::u8, {out, in / 2}), shape_only(DType::u8, {out, in / kGroupMxfp4})};
  }
  const bool as_stored = at.value->dtype == DType::f32 || at.value->dtype == DType::bf16;
  return {shape_only(as_stored ? at.value->dtype : DType::f32, p.shape), {}, as_stored};
}

void load(Model& model, const Snapshot& snapshot, const LoadOptions& options) {
  K3_CHECK(!options.for_training || options.dense == Dense::as_stored, "[checkpoint] training takes weights as they are stored, not made narrow");
  snapshot.check_written();
  ParamSet& set = model.params();
  const std::vector<StoredParam> found = find_parameters(model, snapshot);
  std::unordered_set<const Param*> sourced;  // experts that a source brings when they are wanted
  for (int64_t l = 0; l < model.layers(); ++l)
    if (const ExpertWeights* w = expert_weights(model.ffn(l)); w && w->source)
      for (const auto* list : {&w->gate, &w->up, &w->down}) sourced.insert(list->begin(), list->end());
  if (options.for_training) set.allocate(Device::cpu);
  size_t next = 0;
  for (Param& p : set.all()) {
    const auto& [t, scale] = found[next++];
    if (sourced.count(&p)) continue;
    auto float_memory = [&] {
      if (!options.for_training) p.value = set.own(DType::f32, p.shape);
      return p.value.f32();
    };
    const Tensor stored = snapshot.view(*t);
    if (scale) {
      Param packed = p;
      packed.value = stored, packed.scale = snapshot.view(*scale);
      if (!options.for_training && is_product_weight(p)) {
        p.value = packed.value, p.scale = packed.scale;
      } else {
        check_scales(packed);
        widen(weight_of(packed), 0, p.shape[0], float_memory());
      }
      continue;
    }
    if (is_padded_A_log(p, *t)) {
      std::vector<float> all(size_t(stored.size()));
      to_float32(stored, all.data(), t->name);
      for (int64_t i = p.shape.size(); i < stored.size(); ++i)
        K3_CHECK(all[size_t(i)] == 0, "[checkpoint] {} in {} has {} values for {} heads; the rest must be zero but value {} is {}", t->name,
                 snapshot.file_of(*t), stored.size(), p.shape.size(), i, all[size_t(i)]);
      std::copy_n(all.begin(), p.shape.size(), float_memory());
      continue;
    }
    bool map = !options.for_training && p.role.kind != Role::Kind::vector && p.role.kind != Role::Kind::fixed &&
               (t->dtype == DType::f32 || t->dtype == DType::bf16);
    bool aligned = reinterpret_cast<uintptr_t>(stored.data()) % 4 == 0;
    if (narrows(p, t->dtype, options.dense))
      narrow(p, set, snapshot, *t, options.dense);
    else if (map && aligned)
      p.value = stored.reshape(p.shape);
    else
      to_float32(stored, float_memory(), t->name);
  }
  set.move_to(options.device, options.bf16_products && !options.for_training);
  model.bf16_products = options.bf16_products;
}

void save(const Model& model, const std::string& folder, uint64_t shard_bytes, bool with_mtp) {
  Config c = model.config();
  const std::string mtp = "model.layers." + std::to_string(c.num_hidden_layers) + ".";
  if (!with_mtp) c.num_nextn_predict_layers = 0;
  std::filesystem::create_directories(folder);
  std::vector<NamedTensor> tensors;
  std::vector<std::vector<float>> padded;  // A_log as the releases store it
  padded.reserve(model.params().all().size());
  for (const Param& p : model.params().all()) {
    if (!with_mtp && p.name.starts_with(mtp)) continue;
    K3_CHECK(p.scale.empty(), "[checkpoint] {} is in codes and scales, which can't be saved; load for training first", p.name);
    if (p.catch_up) p.catch_up(nullptr, p.value.rows());
    Tensor value = p.value;
    if (p.name.ends_with(".A_log")) {
      if (c.nested()) {
        auto& v = padded.emplace_back(size_t(std::max(p.shape.size(), c.kda_head_dim)), 0.0f);
        std::copy_n(HostCopy(p.value).f32(), p.shape.size(), v.begin());
        value = Tensor(v.data(), DType::f32, {int64_t(v.size())});
      } else {
        value = p.value.reshape({1, 1, p.shape.size(), 1});
      }
    }
    tensors.push_back({c.prefix() + p.name, value});
  }
  write_snapshot(folder, tensors, shard_bytes);
  write_file(folder + "/config.json", c.to_json().dump(2) + "\n");
}

}  // namespace k3

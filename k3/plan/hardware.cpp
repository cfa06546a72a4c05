#include "k3/plan/hardware.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "k3/core/error.h"
#include "k3/core/file.h"
#include "k3/core/nearest.h"
#include "k3/plan/architecture.h"

namespace k3::plan {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

json read_json(const std::string& path) {
  json j = json::parse(read_file(path), nullptr, false);
  K3_CHECK(!j.is_discarded() && j.is_object(), "[hardware] {} is not a JSON object", path);
  return j;
}

// Takes numbers out of an object by name and complains about what is left over or missing.
class Reader {
 public:
  Reader(json object, std::string where) : object_(std::move(object)), where_(std::move(where)) {
    K3_CHECK(object_.is_object(), "[hardware] {} must be an object", where_);
  }
  double number(const std::string& key, double otherwise) {
    known_.push_back(key);
    if (!object_.contains(key)) return otherwise;
    json v = object_[key];
    object_.erase(key);
    K3_CHECK(v.is_number(), "[hardware] {}: {} must be a number, not {}", where_, key, v.dump());
    K3_CHECK(v.get<double>() >= 0, "[hardware] {}: {} is {} but cannot be negative", where_, key, v.dump());
    return v.get<double>();
  }
  double number(const std::string& key) {
    K3_CHECK(object_.contains(key), "[hardware] {} lacks {}", where_, key);
    return number(key, 0);
  }
  std::string text(const std::string& key) {
    known_.push_back(key);
    std::string s = object_.contains(key) && object_[key].is_string() ? object_[key].get<std::string>() : "";
    object_.erase(key);
    return s;
  }
  Reader object(const std::string& key) {
    known_.push_back(key);
    K3_CHECK(object_.contains(key), "[hardware] {} lacks {}", where_, key);
    Reader r(object_[key], where_ + ": " + key);
    object_.erase(key);
    return r;
  }
  bool has(const std::string& key) const { return object_.contains(key); }
  void done() {
    if (!object_.empty())
      fail("[hardware] {}: unknown key '{}'; the nearest known one is '{}'", where_, object_.begin().key(), nearest(object_.begin().key(), known_));
  }

 private:
  json object_;
  std::string where_;
  std::vector<std::string> known_;
};

constexpr double us = 1e-6;

Efficiency::Experts read_experts(Reader r) {
  Efficiency::Experts e;
  e.tau = r.number("tau_us") * us;
  e.hbm_ep = r.number("hbm"), e.hbm_tp = r.number("hbm_tp", e.hbm_ep), e.hbm_tp16 = r.number("hbm_tp16", e.hbm_tp);
  e.flops_ep = r.number("flops"), e.flops_tp = r.number("flops_tp", e.flops_ep);
  e.math = r.text("math");
  r.done();
  return e;
}

Efficiency read_efficiency(const json& j, const std::string& where) {
  Efficiency e;
  Reader r(j, where);
  e.source = r.text("source");
  Reader g = r.object("gemm");
  e.gemm = {g.number("tau_us") * us, g.number("tau_standalone_us") * us, g.number("hbm"), g.number("flops")};
  g.done();
  Reader x = r.object("experts");
  e.w4 = read_experts(x.object("w4")), e.fp8 = read_experts(x.object("fp8")), e.bf16 = read_experts(x.object("bf16"));
  x.done();
  Reader kd = r.object("kda_decode");
  e.kda_decode = {kd.number("tau_us") * us, kd.number("hbm"), kd.number("token_us") * us};
  kd.done();
  Reader kp = r.object("kda_prefill");
  e.kda_prefill = {kp.number("tau_us") * us, kp.number("chunk_us") * us, kp.number("tflops") * 1e12};
  kp.done();
  Reader md = r.object("mla_decode");
  e.mla_decode = {md.number("tau_us") * us, md.number("hbm"), md.number("flops")};
  md.done();
  Reader mp = r.object("mla_prefill");
  e.mla_prefill = {mp.number("tau_us") * us, mp.number("flops")};
  mp.done();
  Reader ar = r.object("all_reduce");
  e.all_reduce = {ar.number("small_tau_us") * us, ar.number("small_link"), ar.number("large_tau_us") * us, ar.number("large_link"),
                  ar.number("limit_bytes")};
  ar.done();
  Reader aa = r.object("all_to_all");
  e.all_to_all = {aa.number("decode_tau_us") * us, aa.number("decode_net"), aa.number("prefill_tau_us") * us, aa.number("prefill_net"),
                  aa.number("prefill_link")};
  aa.done();
  e.rest = r.number("rest_us") * us, e.host = r.number("host_ms", 0) * 1e-3;
  r.done();
  return e;
}

}  // namespace

std::vector<std::string> hardware_keys() {
  std::vector<std::string> keys;
  for (const auto& entry : fs::directory_iterator(configs_folder() + "/hardware"))
    if (entry.path().extension() == ".json") keys.push_back(entry.path().stem().string());
  std::sort(keys.begin(), keys.end());
  return keys;
}

double Hardware::peak(const std::string& math) const {
  if (math == "fp4" && fp4 > 0) return fp4;
  if (math != "bf16" && fp8 > 0) return fp8;
  return bf16;
}

Hardware load_hardware(const std::string& what) {
  std::error_code none;
  std::string path = what;
  if (!fs::is_regular_file(path, none)) path = configs_folder() + "/hardware/" + what + ".json";
  K3_CHECK(fs::is_regular_file(path, none), "[hardware] '{}' is neither a known machine nor a file; the nearest known one is '{}'", what,
           nearest(what, hardware_keys()));
  Reader r(read_json(path), path);
  Hardware h;
  h.key = fs::path(path).stem().string(), h.name = r.text("name"), h.kind = r.text("kind"), h.note = r.text("note");
  r.text("measured");
  h.memory = r.number("memory_gb") * 1e9, h.hbm = r.number("hbm_tb_s") * 1e12;
  h.bf16 = r.number("bf16_tflops") * 1e12, h.fp8 = r.number("fp8_tflops", 0) * 1e12, h.fp4 = r.number("fp4_tflops", 0) * 1e12;
  h.link = r.number("link_gb_s", 0) * 1e9, h.net = r.number("net_gb_s", 0) * 1e9, h.disk = r.number("disk_gb_s", 0) * 1e9;
  h.link_domain = int64_t(r.number("link_domain", 1));
  double kda = r.number("kda_prefill_tflops", 0) * 1e12;
  r.number("processors", 0);
  K3_CHECK(h.memory > 0 && h.hbm > 0 && h.bf16 > 0 && h.link_domain > 0,
           "[hardware] {}: memory_gb, hbm_tb_s, bf16_tflops and link_domain must be above 0", path);
  if (r.has("efficiency_constants")) {
    json whole = read_json(path);
    h.efficiency = read_efficiency(whole["efficiency_constants"], path + ": efficiency_constants");
    h.efficiency.name = h.key;
    r.object("efficiency_constants");
  } else {
    std::string name = r.text("efficiency");
    std::string file = configs_folder() + "/hardware/efficiency/" + name + ".json";
    K3_CHECK(fs::is_regular_file(file, none), "[hardware] {}: efficiency '{}' has no file {}", path, name, file);
    h.efficiency = read_efficiency(read_json(file), file);
    h.efficiency.name = name;
  }
  r.done();
  if (kda > 0) h.efficiency.kda_prefill.flops = kda;
  return h;
}

}  // namespace k3::plan

#include "k3/train/options.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "k3/core/error.h"
#include "k3/core/nearest.h"

namespace k3 {

using nlohmann::json;

namespace {

enum OnResume { must_stay, may_change };

// Every key once.
template <class O, class F>
void each_key(O& o, F f) {
  f("tokenizer", o.tokenizer, must_stay), f("document_separator", o.document_separator, must_stay), f("held_out", o.held_out, must_stay);
  f("sequence_length", o.sequence_length, must_stay), f("batch_tokens", o.batch_tokens, must_stay);
  f("micro_batch_tokens", o.micro_batch_tokens, may_change), f("steps", o.steps, must_stay), f("seed", o.seed, must_stay);
  f("recompute", o.recompute, may_change), f("learning_rate", o.learning_rate, must_stay);
  f("min_learning_rate_ratio", o.min_learning_rate_ratio, must_stay), f("warmup_ratio", o.warmup_ratio, must_stay);
  f("weight_decay", o.weight_decay, must_stay), f("gradient_clip", o.gradient_clip, must_stay), f("optimizer", o.optimizer, must_stay);
  f("muon_momentum", o.muon_momentum, must_stay), f("muon_nesterov", o.muon_nesterov, must_stay), f("adam_beta1", o.adam_beta1, must_stay);
  f("adam_beta2", o.adam_beta2, must_stay), f("adam_eps", o.adam_eps, must_stay), f("qk_clip_tau", o.qk_clip_tau, must_stay);
  f("balance", o.balance, must_stay), f("balance_bins", o.balance_bins, must_stay), f("balance_sign_step", o.balance_sign_step, must_stay);
  f("balance_ema", o.balance_ema, must_stay);
  f("log_every", o.log_every, may_change), f("eval_every", o.eval_every, may_change), f("save_every", o.save_every, may_change);
  f("eval_tokens", o.eval_tokens, may_change);
  f("mtp_loss_weight", o.mtp_loss_weight, must_stay), f("mtp_keep", o.mtp_keep, may_change);
}

void read(const std::string& key, const json& value, std::string& to) {
  K3_CHECK(value.is_string(), "[config] {} must be text, not {}", key, value.dump());
  to = value;
}
void read(const std::string& key, const json& value, int64_t& to) {
  K3_CHECK(value.is_number_integer(), "[config] {} must be a whole number, not {}", key, value.dump());
  K3_CHECK(!value.is_number_unsigned() || value.get<uint64_t>() <= uint64_t(std::numeric_limits<int64_t>::max()),
           "[config] {} is {}, which does not fit into 64 bits", key, value.dump());
  to = value;
}
void read(const std::string& key, const json& value, double& to) {
  K3_CHECK(value.is_number(), "[config] {} must be a number, not {}", key, value.dump());
  to = value;
}
void read(const std::string& key, const json& value, bool& to) {
  K3_CHECK(value.is_boolean(), "[config] {} must be true or false, not {}", key, value.dump());
  to = value;
}

[[noreturn]] void unknown_key(const std::string& key, const std::string& where, bool of_the_model_too) {
  auto known = TrainOptions::keys();
  if (of_the_model_too)
    for (auto& k : Config::keys()) known.push_back(k);
  fail("[config] unknown key '{}'{}; the nearest known one is '{}'", key, where, nearest(key, known));
}

template <class V>
void assign(TrainOptions& o, const std::string& key, const V& value_for) {
  bool found = false;
  each_key(o, [&](const char* name, auto& member, OnResume) {
    if (key == name) read(key, value_for(member), member), found = true;
  });
  if (!found) unknown_key(key, " in train", false);
}

}  // namespace

std::vector<std::string> TrainOptions::keys() {
  std::vector<std::string> names;
  TrainOptions o;
  each_key(o, [&](const char* name, auto&, OnResume) { names.push_back(name); });
  return names;
}

bool TrainOptions::is_key(const std::string& key) {
  auto all = keys();
  return std::find(all.begin(), all.end(), key) != all.end();
}

void TrainOptions::set(const std::string& key, const std::string& value) {
  assign(*this, key, [&](const auto& member) -> json {
    if constexpr (std::is_same_v<std::decay_t<decltype(member)>, std::string>) return value;  // "%" or "007" is text as it stands
    json v = json::parse(value, nullptr, false);
    return v.is_discarded() ? json(value) : v;
  });
}

TrainOptions TrainOptions::parse(const json& object) {
  K3_CHECK(object.is_object(), "[config] train must be an object");
  TrainOptions o;
  for (const auto& [key, value] : object.items()) assign(o, key, [&](const auto&) { return value; });
  return o;
}

json TrainOptions::to_json() const {
  json j = json::object();
  each_key(*this, [&](const char* name, const auto& member, OnResume) { j[name] = member; });
  return j;
}

void TrainOptions::finish() {
  auto at_least = [](const char* key, int64_t value, int64_t least) {
    K3_CHECK(value >= least, "[config] {} is {} but must be at least {}", key, value, least);
  };
  auto between = [](const char* key, double value, double low, double high) {
    K3_CHECK(value >= low && value <= high, "[config] {} is {} but must lie between {} and {}", key, value, low, high);
  };
  auto one_of = [](const char* key, const std::string& value, std::vector<std::string> known) {
    std::string list;
    for (auto& k : known) list += (list.empty() ? "" : ", ") + k;
    K3_CHECK(std::find(known.begin(), known.end(), value) != known.end(), "[config] {} is '{}', but {} are known; did you mean '{}'?", key, value,
             list, nearest(value, known));
  };
  at_least("sequence_length", sequence_length, 1), at_least("batch_tokens", batch_tokens, 1), at_least("steps", steps, 1);
  at_least("log_every", log_every, 1), at_least("eval_every", eval_every, 1), at_least("save_every", save_every, 1);
  at_least("eval_tokens", eval_tokens, 0), at_least("micro_batch_tokens", micro_batch_tokens, 0), at_least("seed", seed, 0);
  between("balance_bins", double(balance_bins), 2, 1000000);
  K3_CHECK(batch_tokens % sequence_length == 0, "[config] batch_tokens {} must be a multiple of sequence_length {}; the nearest is {}", batch_tokens,
           sequence_length, std::max<int64_t>(1, (batch_tokens + sequence_length / 2) / sequence_length) * sequence_length);
  if (micro_batch_tokens == 0) micro_batch_tokens = batch_tokens;
  micro_batch_tokens = std::min(micro_batch_tokens, batch_tokens);
  K3_CHECK(micro_batch_tokens % sequence_length == 0, "[config] micro_batch_tokens {} must be a multiple of sequence_length {}", micro_batch_tokens,
           sequence_length);
  between("held_out", held_out, 0, 0.9), between("min_learning_rate_ratio", min_learning_rate_ratio, 0, 1),
      between("warmup_ratio", warmup_ratio, 0, 1);
  between("learning_rate", learning_rate, 0, 10), between("weight_decay", weight_decay, 0, 10), between("muon_momentum", muon_momentum, 0, 0.9999);
  between("adam_beta1", adam_beta1, 0, 0.9999), between("adam_beta2", adam_beta2, 0, 0.99999), between("adam_eps", adam_eps, 1e-30, 1);
  between("gradient_clip", gradient_clip, 0, 1e9), between("qk_clip_tau", qk_clip_tau, 0, 1e9), between("balance_sign_step", balance_sign_step, 0, 1);
  between("balance_ema", balance_ema, 0, 0.999), between("mtp_loss_weight", mtp_loss_weight, 0, 100);
  one_of("optimizer", optimizer, {"muon_per_head", "muon", "adamw"});
  one_of("balance", balance, {"quantile", "quantile_exact", "sign", "none"});
  K3_CHECK(document_separator.find('\n') == std::string::npos, "[config] document_separator must be one line without its end");
}

OptionChanges changes(const TrainOptions& before, const TrainOptions& now) {
  OptionChanges c;
  json a = before.to_json(), b = now.to_json();
  each_key(now, [&](const char* name, const auto&, OnResume rule) {
    if (a[name] == b[name]) return;
    (rule == may_change ? c.allowed : c.refused).push_back(fmt::format("{} was {}, is {}", name, a[name].dump(), b[name].dump()));
  });
  return c;
}

RunConfig load_run_config(const std::string& path, const std::vector<std::string>& assignments) {
  json j = read_config_file(path);
  RunConfig run;
  if (j.contains("train")) run.train = TrainOptions::parse(j["train"]), j.erase("train");
  for (const auto& [key, value] : j.items()) {
    K3_CHECK(!TrainOptions::is_key(key), "[config] {} belongs into the \"train\" object of {}", key, path);
    run.given.push_back(key);
  }
  if (j.contains("text_config") && j["text_config"].is_object())
    for (const auto& [key, value] : j["text_config"].items()) run.given.push_back(key);
  run.model = Config::parse(j);
  for (const std::string& a : assignments) {
    size_t eq = a.find('=');
    K3_CHECK(eq != std::string::npos && eq > 0, "[config] '{}' is not of the form key=value", a);
    std::string key = a.substr(0, eq);
    if (TrainOptions::is_key(key)) {
      run.train.set(key, a.substr(eq + 1));
    } else if (Config::is_key(key) || Config::is_key("linear_attn_config." + key)) {
      run.model.set(a);
      run.given.push_back(key);
    } else {
      unknown_key(key, "", true);
    }
  }
  run.train.finish();
  return run;
}

}  // namespace k3

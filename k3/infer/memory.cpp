#include "k3/infer/memory.h"

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>

#include "k3/core/error.h"
#include "k3/core/file.h"
#include "k3/core/plain_read.h"
#include "k3/core/progress.h"
#include "k3/model/loading.h"
#include "k3/ops/attention/cache.h"
#include "k3/ops/loss/loss.h"

namespace k3 {

namespace fs = std::filesystem;

namespace {

constexpr double kHeadroom = 0.1;          // of what is available, left to others under "auto"
constexpr uint64_t kMappedRow = 64 << 10;  // pages that come along when a row of a mapped table is read

uint64_t resident(const Param& p, const StoredParam& at, const LoadOptions& options) {
  const LoadedForm form = loaded_form(p, at, options);
  return form.value.bytes() + form.scale.bytes();
}

// Peak of one step's arena on the null device, with `context` tokens read before in pieces of at_once.
uint64_t scratch_of(Model& model, const std::vector<StoredParam>& found, const MemoryRequest& r) {
  std::vector<std::pair<Tensor, Tensor>> before;
  size_t next = 0;
  for (Param& p : model.params().all()) {  // shapes and types only
    before.emplace_back(p.value, p.scale);
    const LoadedForm form = loaded_form(p, found[next++], r.load);
    p.value = form.value, p.scale = form.scale;
  }
  Arena arena(0, Device::null);
  Context c{.device = Device::null, .arena = &arena};
  c.deterministic = r.deterministic;
  std::unique_ptr<ModelState> state;
  if (!r.loss) state = std::make_unique<ModelState>(model.new_state(r.sequences, Device::null, r.deterministic));
  auto step = [&](int64_t tokens) {
    arena.rewind(0);
    arena.reset_peak();
    Batch batch = Batch::of_lengths(std::vector<int64_t>(size_t(r.sequences), tokens));
    for (int64_t s = 0; state && s < r.sequences; ++s) batch.slots.push_back(int32_t(s));
    Tensor ids = arena.lend(DType::i32, {batch.tokens()}), targets = arena.lend(DType::i32, {batch.tokens()});
    Var h = model.forward(c, ids, batch, state.get());
    if (r.loss)
      cross_entropy(h, model.lm_head(), targets, 0);
    else
      logits(Var(c, h.value().row_range(0, std::min<int64_t>(1, h.rows()))), model.lm_head());
    return uint64_t(arena.peak());
  };
  const int64_t last = std::max<int64_t>(1, std::min(r.at_once / r.sequences, r.context));
  if (!r.loss && r.context > last) step(r.context - last);
  uint64_t most = step(last);
  if (!r.loss) most = std::max(most, step(1));
  next = 0;
  for (Param& p : model.params().all()) p.value = before[next].first, p.scale = before[next].second, ++next;
  return most;
}

}  // namespace

uint64_t parse_size(const std::string& text) {
  size_t used = 0;
  double n = -1;
  try {
    n = std::stod(text, &used);
  } catch (const std::exception&) {}
  std::string unit;
  for (char ch : text.substr(used))
    if (!std::isspace(static_cast<unsigned char>(ch))) unit += char(std::tolower(static_cast<unsigned char>(ch)));
  double scale = unit.empty() || unit == "b" ? 1 : 0;
  constexpr char kPrefix[] = "kmgt";
  for (int i = 0; i < 4; ++i) {
    const std::string p(1, kPrefix[i]);
    if (unit == p || unit == p + "i" || unit == p + "ib") scale = std::exp2(10 * (i + 1));
    if (unit == p + "b") scale = std::pow(1000.0, i + 1);
  }
  K3_CHECK(used > 0 && scale > 0 && n > 0 && n * scale < 1e18, "[memory] '{}' is no size; write 8GiB, 500MB, a number of bytes, or auto", text);
  return uint64_t(n * scale);
}

double memory_read_rate(uint64_t bytes) {
  PlainRead plain(bytes);
  const double first = plain.rate();
  return std::max(first, plain.rate());
}

uint64_t state_bytes(const Model& model, const MemoryRequest& r) {
  if (r.loss) return 0;
  const ModelState state = model.new_state(r.sequences, Device::null, r.deterministic);
  const int64_t block = TokenCache::kBlockTokens, tokens = (r.context + block - 1) / block * block;
  return uint64_t((r.sequences + r.marks) * state.bytes_per_slot() + r.sequences * tokens * state.bytes_per_token());
}

MemoryPlan plan_memory(Model& model, const std::vector<StoredParam>& found, const ExpertCache* cache, std::span<const MemoryRequest> wishes,
                       size_t& chosen) {
  std::vector<std::optional<MemoryPlan>> plans;
  std::string fault;
  for (size_t i = 0; i < wishes.size(); ++i) {
    plans.emplace_back();
    try {
      plans.back() = plan_memory(model, found, cache, wishes[i]);
    } catch (const Error& e) {
      fault = e.what();
      continue;
    }
    const MemoryPlan& p = *plans.back();
    chosen = i;
    if (p.fits() || wishes.size() == 1 || p.states <= (p.budget - (p.fixed() - p.states)) / 4) return p;
  }
  for (chosen = 0; chosen < plans.size(); ++chosen)
    if (plans[chosen]) return *plans[chosen];
  throw Error(fault);
}

MemoryPlan plan_memory(Model& model, const std::vector<StoredParam>& found, const ExpertCache* cache, const MemoryRequest& r) {
  MemoryPlan plan;
  const Config& c = model.config();
  plan.automatic = r.budget == "auto";
  plan.program = resident_memory();
  const uint64_t available = available_memory();
  plan.available = plan.program + available;
  plan.context = r.loss ? 0 : r.context * r.sequences, plan.deterministic = r.deterministic;
  plan.budget = plan.automatic ? plan.program + uint64_t(double(available) * (1 - kHeadroom)) : parse_size(r.budget);
  size_t next = 0;
  uint64_t expert_bytes = 0;
  for (const Param& p : model.params().all()) {
    const StoredParam& at = found[next++];
    if (is_routed_expert(p.name))
      expert_bytes += resident(p, at, r.load);
    else if (p.name == "model.embed_tokens.weight")
      plan.embedding = std::min<uint64_t>(resident(p, at, r.load), uint64_t(r.loss ? c.vocab_size : r.sequences * r.context) * kMappedRow);
    else
      plan.resident += resident(p, at, r.load);
  }
  plan.states = state_bytes(model, r);
  plan.scratch = scratch_of(model, found, r);
  if (cache) {
    plan.experts = cache->experts(), plan.expert = cache->slot_bytes(), plan.top_k = c.num_experts_per_token;
    for (int64_t l = 0; l < model.layers(); ++l) plan.moe_layers += expert_weights(model.ffn(l)) != nullptr;
    const uint64_t left = plan.budget - std::min(plan.budget, plan.fixed());
    plan.slots = expert_bytes <= left ? plan.experts : std::min<int64_t>(plan.experts, int64_t(left / plan.expert));
  }
  const uint64_t least = plan.fixed() + uint64_t(std::min(plan.top_k, plan.experts)) * plan.expert;
  K3_CHECK(plan.fixed() <= plan.budget && plan.slots >= std::min(plan.top_k, plan.experts),
           "[memory] {} is too little{}: {} of weights that every token needs, {} for states of {} tokens, {} of scratch, {} for the program and {} "
           "experts at once make {}. Give --memory {}B or more, or ask for a shorter context or smaller --prefill-chunk",
           size_text(double(plan.budget)), plan.automatic ? " (what is available here)" : "", size_text(double(plan.resident + plan.embedding)),
           size_text(double(plan.states)), r.context * r.sequences, size_text(double(plan.scratch)), size_text(double(plan.program)),
           std::min(plan.top_k, plan.experts), size_text(double(least)), least);
  return plan;
}

double MemoryPlan::seconds_a_token() const {
  if (memory_rate <= 0) return 0;
  const double chosen = double(top_k * moe_layers), there = experts ? double(slots) / double(experts) : 1;
  double s = (double(resident) + chosen * double(expert)) / memory_rate;
  if (!fits() && disk_rate > 0) s += chosen * (1 - there) * double(expert) / disk_rate;
  return s;
}

std::string MemoryPlan::text() const {
  auto size = [](uint64_t n) { return size_text(double(n)); };
  const std::string limit = fmt::format("{}{}", size(budget), automatic ? " (auto: what is available here, less a tenth)" : "");
  const std::string beyond = total() <= available
                                 ? ""
                                 : fmt::format(
                                       "  warning: that is more than the {} available here; pages will be pushed out and read again from the disk. "
                                       "--memory auto would take {}\n",
                                       size(available), size(program + uint64_t(double(available - program) * (1 - kHeadroom))));
  const std::string tokens = context ? fmt::format(" of {} tokens{}", context, deterministic ? "" : " (absorbed)") : "";
  if (fits())
    return fmt::format("memory: {} of {}: weights {}, states{} {}, scratch {}; everything stays in memory\n{}", size(total()), limit,
                       size(resident + embedding + uint64_t(slots) * expert), tokens, size(states), size(scratch), beyond);
  std::string t = fmt::format("memory plan, budget {}\n", limit);
  auto line = [&](const char* what, uint64_t bytes, const std::string& note) { t += fmt::format("  {:<18}{:>10}  {}\n", what, size(bytes), note); };
  line("program", program, "now, with the snapshot's index");
  line("resident", resident, "attention, router, shared and dense weights, head");
  line("embedding", embedding, "the rows that are read");
  line("states", states, tokens.empty() ? "none" : tokens.substr(1));
  line("scratch", scratch, "of a step");
  line("experts in memory", uint64_t(slots) * expert, fmt::format("{} of {}, {} each", slots, experts, size(expert)));
  line("together", total(), "");
  line("experts on disk", uint64_t(experts - slots) * expert, "read when they are wanted");
  if (memory_rate > 0 && disk_rate > 0)
    t += fmt::format(
        "  estimate: {:.3g} tokens/s in decode, if all experts were equally likely ({:.1f} % in memory); measured: memory {:.1f} GB/s, disk {:.2f} "
        "GB/s\n",
        1 / seconds_a_token(), 100.0 * double(slots) / double(experts), memory_rate * 1e-9, disk_rate * 1e-9);
  return t + beyond;
}

}  // namespace k3

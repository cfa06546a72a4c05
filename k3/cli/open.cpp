#include "k3/cli/open.h"

#include <fmt/core.h>

#include <algorithm>

#include "k3/cli/status_line.h"
#include "k3/core/error.h"
#include "k3/model/loading.h"

namespace k3 {

void add_memory_flags(CLI::App* command, MemoryFlags& flags) {
  command->add_option("--memory", flags.budget, "the most the program may take (8GiB, 500MB, auto); experts beyond it are read from disk when wanted")
      ->capture_default_str();
  command->add_flag("--trust-scales", flags.trust_scales,
                    "do not read all scales of experts on disk (1/17 of them) before the first token: a damaged one is then found when it is used");
}

namespace {

// The request that was chosen is not the first: what it is, and why.
std::string choice_text(const Model& model, const MemoryRequest& first, const MemoryRequest& chosen) {
  return fmt::format("context: {} tokens{}; {}{} would take {} (--context and --fast choose otherwise)\n", chosen.context,
                     chosen.deterministic ? "" : " with absorbed attention, whose results are equal to rounding", first.context,
                     first.deterministic && !chosen.deterministic ? " in the exact form" : "", size_text(double(state_bytes(model, first))));
}

}  // namespace

void PartsReport::add_flag(CLI::App* command) {
  command->add_flag("--parts", wanted_, "after an answer: time and bytes of a token by part of the model, beside a plain read of memory");
}

void PartsReport::print() {
  if (!wanted_ || clock_.steps() == 0) return;
  const double limit = memory_read_rate(uint64_t(256) << 20);
  fmt::print(stderr, "[a token, of {}; a plain read makes {:.1f} GB/s]\n{}", clock_.steps(), limit * 1e-9, part_table(clock_, limit));
}

OpenedModel::OpenedModel(const std::string& folder, Config config, std::vector<MemoryRequest> wishes, const LoadOptions& options)
    : snapshot_(folder), model_(std::move(config)), request_(wishes.at(0)) {
  if (options.device == Device::cuda) {
    K3_CHECK(request_.budget == "auto", "[memory] experts are read from disk on the CPU only; leave out --memory or --device cuda");
    load(model_, snapshot_, options);
    return;
  }
  for (MemoryRequest& r : wishes) r.load = options;
  const std::vector<StoredParam> found = find_parameters(model_, snapshot_);
  snapshot_.check_written();
  if (model_.config().num_experts) cache_ = std::make_unique<ExpertCache>(model_, snapshot_, found);
  size_t chosen = 0;
  plan_ = plan_memory(model_, found, cache_.get(), wishes, chosen);
  request_ = wishes[chosen];
  if (plan_.fits()) {
    cache_.reset();
  } else {
    constexpr uint64_t kProbe = 128 << 20;  // experts are read anyway: the first ones say how fast
    cache_->allocate({.slots = plan_.slots});
    const double seconds = cache_->fill(kProbe);
    plan_.disk_rate = double(cache_->counts().bytes) / seconds,
    plan_.memory_rate = memory_read_rate(std::clamp<uint64_t>(plan_.resident, 32 << 20, 512 << 20));
    seen_ = cache_->counts();
  }
  if (chosen > 0) fmt::print(stderr, "{}", choice_text(model_, wishes[0], request_));
  if (!plan_.fits() || plan_.total() > (uint64_t(1) << 30) || request_.budget != "auto") fmt::print(stderr, "{}", plan_.text());
  StatusLine status;
  if (cache_ && !request_.trust_scales) cache_->check_scales(status.of("checking the scales of experts", Progress::bytes));
  load(model_, snapshot_, options);
  std::vector<Tensor> mapped;
  size_t next = 0;
  for (const Param& p : model_.params().all()) {
    const StoredParam& at = found[next++];
    if (p.name == "model.embed_tokens.weight") continue;
    if (at.value && p.value.has_data() && snapshot_.view(*at.value).data() == p.value.data()) mapped.push_back(p.value);
    if (at.scale && p.scale.has_data() && snapshot_.view(*at.scale).data() == p.scale.data()) mapped.push_back(p.scale);
  }
  read_in(mapped, status.of("loading", Progress::bytes));
  check_all_scales(model_, snapshot_, found);
}

std::string OpenedModel::report(double seconds) {
  if (!cache_) return "";
  const ExpertCache::Counts now = cache_->counts(), n = now - seen_;
  seen_ = now;
  const double waited = seconds > 0 ? std::min(1.0, n.waited / seconds) : 0;
  return fmt::format(", disk {} ({:.2f} GB/s{}), {:.1f} % of {} experts in memory{}, bound by {} (waited {:.0f} %)", size_text(double(n.bytes)),
                     seconds > 0 ? double(n.bytes) / seconds * 1e-9 : 0.0, cache_->direct() ? "" : ", page cache included",
                     n.wanted ? 100.0 * double(n.hits) / double(n.wanted) : 0.0, n.wanted,
                     n.ahead ? fmt::format(", {} of {} read ahead were used", n.ahead_used, n.ahead) : "",
                     waited > 0.5 ? "the disk" : "memory and cores", 100 * waited);
}

void OpenedModel::print_peak() const {
  if (!cache_) return;
  fmt::print(stderr, "[memory: {} at its highest, {} planned, {} allowed; a token repeats {:.0f} % of the experts of the one before]\n",
             size_text(double(peak_resident_memory())), size_text(double(plan_.total())), size_text(double(plan_.budget)), 100 * cache_->repeats());
}

}  // namespace k3

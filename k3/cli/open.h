#pragma once
// A model opened for inference, as all commands do it: what must be in memory is there, and experts beyond the budget are read when wanted.
#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "k3/infer/memory.h"
#include "k3/infer/session.h"
#include "k3/infer/step_clock.h"
#include "k3/model/checkpoint.h"

namespace k3 {

struct MemoryFlags {
  std::string budget = "auto";
  bool trust_scales = false;
};
void add_memory_flags(CLI::App* command, MemoryFlags& flags);  // --memory SIZE|auto, --trust-scales

// --parts: after an answer, what a token of it read and how fast, part by part, beside a plain read of memory.
class PartsReport {
 public:
  void add_flag(CLI::App* command);
  void listen(SessionOptions& options) {
    if (wanted_) options.listen = clock_.listener();
  }
  void begin() { clock_.clear(); }  // of the answer: the prompt is read
  void print();                     // nothing when it was not asked for, or no token was decoded

 private:
  bool wanted_ = false;
  StepClock clock_;
};

class OpenedModel {
 public:
  // Checks every header, prints the plan, then reads the resident weights, with progress; all to standard error.
  OpenedModel(const std::string& folder, Config config, MemoryRequest request, const LoadOptions& options = {})
      : OpenedModel(folder, std::move(config), std::vector<MemoryRequest>{std::move(request)}, options) {}
  // Of several requests the first that has room (plan_memory); request() says which.
  OpenedModel(const std::string& folder, Config config, std::vector<MemoryRequest> wishes, const LoadOptions& options = {});
  Model& model() { return model_; }
  const Snapshot& snapshot() const { return snapshot_; }
  const MemoryPlan& plan() const { return plan_; }
  const MemoryRequest& request() const { return request_; }

  // What happened since the last call, if experts were read: " | disk 12.3 GB, 41.0 % hits, waited 80 % for the disk". `seconds`: of what.
  std::string report(double seconds);
  void print_peak() const;  // memory at its highest, beside the plan; nothing when everything was in memory

 private:
  Snapshot snapshot_;
  Model model_;
  std::unique_ptr<ExpertCache> cache_;
  MemoryRequest request_;
  MemoryPlan plan_;
  ExpertCache::Counts seen_;
};

}  // namespace k3

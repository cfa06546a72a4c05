#pragma once
// RunFolder: what a run leaves on disk, whole at every moment, also under kill -9.
//
//   OUT/step-000400/        a complete snapshot (config.json, model.safetensors, tokenizer files), and what going on needs:
//                           optimizer.safetensors (moments), training.json (step, options, which data)
//   OUT/LATEST              the name of the step folder in force (model/checkpoint.h: resolve_snapshot)
//   OUT/tokens.bin          the data;  metrics.jsonl one line a step;  report.html the curves
//
// A step folder is written as step-000400.part, flushed, then renamed; LATEST follows. A .part is therefore half-written (or half-removed)
// and never read. The newest two step folders are kept.
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace k3 {

class RunFolder {
 public:
  explicit RunFolder(const std::string& path);  // created where it is missing; only one run may hold it at a time
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string file(const char* name) const { return path_ + "/" + name; }
  std::vector<std::string> remove_parts();  // names of half-written folders and files, now gone
  // `write` fills the folder it is given. Nothing older is touched before the new one is complete.
  void save(int64_t step, const std::function<void(const std::string& folder)>& write);

 private:
  std::string path_;
  int lock_ = -1;
};

std::string step_name(int64_t step);  // step-000400
// The step folder in force: what LATEST names, or the newest complete one when a kill came before LATEST.
std::optional<std::string> newest_step(const std::string& out);

// One JSON object a line. Opened for appending after the lines of steps beyond `last_step`, and a line cut by a kill, were dropped.
class Metrics {
 public:
  Metrics(const std::string& path, int64_t last_step);
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;
  void add(const std::string& json);

 private:
  std::string path_;
  int fd_ = -1;
};

}  // namespace k3

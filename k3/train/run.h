#pragma once
// A training run from start or from its newest checkpoint to its last step. It prints nothing: what happens goes to RunEvents.
//
//   train(request, {.line = print, .progress = show, .stop = asked});
//
// Going on gives the same bits as never having stopped. What must not have changed (data, model, options that shape the course) is
// compared first, and the difference is named.
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "k3/core/device.h"
#include "k3/tokenizer/tokenizer.h"
#include "k3/train/corpus.h"
#include "k3/train/options.h"
#include "k3/train/run_folder.h"

namespace k3 {

struct RunRequest {
  std::string config;                    // a config file; may be empty when a run goes on
  std::vector<std::string> assignments;  // key=value
  std::vector<std::string> data;         // files and folders; may be empty when a run goes on: its tokens.bin holds all it needs
  std::string out;
  enum class Mode { start, resume, resume_or_start } mode = Mode::start;
  double calibration_seconds = 0.2;  // spent on finding what this machine's matrix product reaches
  Device device = Device::cpu;
  bool bf16_products = false;  // on a GPU
};

struct RunEvents {
  std::function<void(const std::string&)> line;      // worth keeping
  std::function<void(const std::string&)> progress;  // worth showing now and then
  std::function<bool()> stop;                        // asked after each step: true saves and ends the run
};

void train(const RunRequest& request, const RunEvents& events);

// What training.json of a step folder says.
struct Training {
  int64_t step = 0, updates = 0, skipped = 0;
  TrainOptions options;
  uint64_t data_checksum = 0;
  static std::optional<Training> read(const std::string& step_folder);  // nothing when the folder has none
  void write(const std::string& step_folder) const;
};

// "bytes", "bpe:4096" (learnt from the documents) or a folder.
Tokenizer make_tokenizer(const std::string& choice, std::vector<Source> sources, const std::string& separator, const RunEvents& events);

}  // namespace k3

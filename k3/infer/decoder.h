#pragma once
// Decoder: several sequences of one model, one token each a step, on a GPU that is never waited for.
//
//   Decoder d(model, state, {});
//   d.begin({{.slot = 0, .sample = o}, {.slot = 3, .sample = o}});
//   d.draw(logits);                      // the first tokens, from the logits (2, V) that prefill left
//   d.step();                            // reads them and draws the next ones; and so on
//   int32_t id = d.result(0, row);       // waits until that draw has been made; later steps may be on their way
//
// A step is the model's forward, the head and the draw, on one stream. Ids, slots and positions lie on the device, where the last kernel counts them
// on, so all steps are the same launches: the first of a batch size goes launch by launch, the others as one graph. Row counts are rounded up to
// those of rows_of(); the rows in excess are filler. A row's bits depend on its own sequence alone.
//
// In bfloat16 (Model::bf16_products) with a state that is not deterministic the forward is FusedStep's where that serves the model.
//
// Results of the last kResults steps are kept. Errors: no GPU model; rows without slots or with the same; slots whose layers disagree on what they
// have read; results too old.
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "k3/core/gpu.h"
#include "k3/infer/fused_step.h"
#include "k3/model/model.h"
#include "k3/ops/sample/sample.h"
#include "k3/ops/sample/sample_cuda.h"

namespace k3 {

struct DecoderOptions {
  bool captured = true;  // false: launch by launch, always
  bool deterministic = true;
};

struct DecodeRow {
  int32_t slot;  // -1: filler
  SampleOptions sample;
  int32_t id = -1;  // the token to read first; not needed before draw()
};

class Decoder {
 public:
  static constexpr int64_t kResults = 256;

  Decoder(Model& model, ModelState& state, const DecoderOptions& options);
  Decoder(const Decoder&) = delete;
  ~Decoder();
  // Why this model can't be decoded so; empty when it can.
  static std::string why_not(const Model& model, const DecoderOptions& options);
  static int64_t rows_of(int64_t rows);  // 1, 2, 4, 8, then multiples of 8

  void begin(std::span<const DecodeRow> rows);
  void draw(const Tensor& logits);  // (rows of begin(), vocabulary) on the device
  void step();
  // The n-th draw since begin(). Error when its logits were broken, as sample() says it.
  int32_t result(int64_t n, int64_t row) const;
  int64_t drawn() const { return drawn_; }
  const Tensor& logits() const { return now_->logits; }  // of the last step: (rows_of(rows), vocabulary) on the device; downloading waits

  bool fused() const { return fused_ != nullptr; }
  int64_t kernels() const;  // launches of a captured step of the present size; 0 before there is one
  Arena& arena() { return arena_; }

 private:
  // What one number of rows needs, made at its first use.
  struct Size {
    int64_t rows = 0;
    Buffer control;                         // on the device: DeviceStep's lists, options and counters
    cuda::SampleResult* results = nullptr;  // (kResults, rows), the host's memory
    DeviceStep step;
    bool has_run = false;
    gpu::Graph graph;
    Tensor logits;
  };
  Size& size_of(int64_t rows);
  void forward();
  void sample(const Tensor& logits, bool has_read);

  Model& model_;
  ModelState& state_;
  DecoderOptions options_;
  Arena arena_;
  std::unique_ptr<FusedStep> fused_;
  std::vector<DecodeRow> rows_;
  std::map<int64_t, Size> sizes_;
  Size* now_ = nullptr;
  int64_t drawn_ = 0;
};

}  // namespace k3

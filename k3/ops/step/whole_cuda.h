#pragma once
// All of a step's layers in one kernel, for up to kStampedRows rows: a block a multiprocessor, the same phases that are launched one by one else,
// from a list in device memory. A vector that one phase makes and another reads is stamped (step.cuh): 8 bytes an element, a float and the step's
// number, and who reads an element waits for it alone; so there is no barrier between blocks. Each such vector is written once a step and lies in
// memory where nothing else ever is. The arithmetic is that of the launches, to the bit.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "k3/ops/step/experts_cuda.h"
#include "k3/ops/step/kda_cuda.h"
#include "k3/ops/step/latent_cuda.h"
#include "k3/ops/step/product_cuda.h"

namespace k3::cuda {

constexpr int kStampedRows = 2;  // of more, launches are faster

struct StepBegin {  // x (rows, width) = rows of the table; NaN for negative ids
  int rows, width;
  const int32_t* ids;
  const void* table;  // (vocabulary, width)
  bool bf16;          // else float32
  float* x;
};
struct StepPhase {
  enum class Kind : int { begin, input, product, kda, query, attend, values, first, second };
  Kind kind;
  int tasks, turn;  // block b begins with task (b + turn) % blocks: phases in a row are begun by different blocks
  alignas(16) unsigned char args[1280];
};
static_assert(sizeof(StepPhase) % 16 == 0);

class StepList {
 public:
  // Null, or what can't be served.
  const char* begin(const StepBegin&);
  const char* input(const StepInput&, int rows, float* to, bool plain);  // as step_input; plain: the next kernel's
  const char* product(const StepProductArgs&);
  const char* kda(const StepKdaArgs&);
  const char* latent(const StepLatentArgs&);
  const char* experts(const StepExpertsArgs&);
  const std::vector<StepPhase>& phases() const { return phases_; }

 private:
  friend const char* step_whole(const StepList&, const void*, uint32_t*, void*);
  template <class Args>
  void add(StepPhase::Kind kind, int tasks, size_t shared, const Args& args);
  std::vector<StepPhase> phases_;
  size_t shared_ = 0;
  int begun_ = 0, dim_ = 32;
  bool codes_ = false;
};
bool whole_fits();  // whether this card holds all blocks at once, without which they would wait for each other for ever
// `phases`: the list's, on the device; `counters`: two, zero before the first step, this state's own.
const char* step_whole(const StepList& list, const void* phases, uint32_t* counters, void* stream);

}  // namespace k3::cuda

#pragma once
// What a decode step costs on a GPU: the time of steps that follow each other without waiting, launch by launch and as a graph, and the launches of
// one.
#include "k3/infer/decoder.h"

namespace k3 {

struct DecodeTiming {
  int64_t rows = 0, context = 0, kernels = 0;
  double captured_seconds = 0, eager_seconds = 0;  // a step
};
// `rows` sequences with `context` tokens read; medians of five runs of `steps` steps. Greedy. The model must be on a GPU.
DecodeTiming time_decode(Model& model, int64_t rows, int64_t context, int64_t steps);

}  // namespace k3

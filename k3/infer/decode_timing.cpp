#include "k3/infer/decode_timing.h"

#include <algorithm>
#include <chrono>

#include "k3/core/error.h"

namespace k3 {

DecodeTiming time_decode(Model& model, int64_t rows, int64_t context, int64_t steps) {
  K3_CHECK(rows >= 1 && context >= 1 && steps >= 1, "[decode] {} rows, {} tokens and {} steps must all be 1 or more", rows, context, steps);
  const Device device = model.params().device();
  DecodeTiming out{rows, context};
  for (bool captured : {false, true}) {
    ModelState state = model.new_state(rows, device, true);
    Arena arena(size_t(64) << 30, device);
    for (int64_t slot = 0; slot < rows; ++slot)
      for (int64_t at = 0; at < context; at += 1024) {
        std::vector<int32_t> ids;
        for (int64_t i = at; i < std::min(context, at + 1024); ++i) ids.push_back(int32_t((slot * 7919 + i * 104729) % model.config().vocab_size));
        Context c;
        c.device = device, c.arena = &arena;
        arena.rewind(0);
        Batch b = Batch::one(int64_t(ids.size()));
        b.slots = {int32_t(slot)};
        model.forward(c, Tensor(ids.data(), DType::i32, {int64_t(ids.size())}), b, &state);
      }
    Decoder d(model, state, {.captured = captured});
    std::vector<DecodeRow> list;
    for (int64_t slot = 0; slot < rows; ++slot) list.push_back({.slot = int32_t(slot), .sample = {}, .id = 1});
    d.begin(list);
    for (int i = 0; i < 3; ++i) d.step();
    gpu::synchronize();
    std::vector<double> runs;
    for (int run = 0; run < 5; ++run) {
      const auto start = std::chrono::steady_clock::now();
      for (int64_t i = 0; i < steps; ++i) d.step();
      d.result(d.drawn() - 1, 0);
      gpu::synchronize();
      runs.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / double(steps));
    }
    std::sort(runs.begin(), runs.end());
    (captured ? out.captured_seconds : out.eager_seconds) = runs[2];
    if (captured) out.kernels = d.kernels();
  }
  return out;
}

}  // namespace k3

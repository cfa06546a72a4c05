// k3 bench decode --device cuda: steps of decode for several sequences, captured and launch by launch, beside what reading their bytes takes.
#include <fmt/core.h>

#include <chrono>
#include <nlohmann/json.hpp>

#include "k3/cli/bench.h"
#include "k3/cli/bench_ops.h"
#include "k3/core/error.h"
#include "k3/core/gpu.h"
#include "k3/core/kernel_times.h"
#include "k3/core/rng.h"
#include "k3/infer/decoder.h"
#include "k3/model/loading.h"
#include "k3/ops/linear/weight_product.h"

namespace k3 {

namespace {

struct StepTime {
  int64_t rows = 0, launches = 0;
  bool fused = false;
  double captured = 0, eager = 0;         // seconds a step
  double gaps = -1;                       // share of a captured step; below 0: not known
  std::map<std::string, double> kernels;  // seconds a step that each puts the end off
  double bytes = 0;
};

// What a step must read at least: every weight once (of the routed experts those that `rows` even choices reach), an embedding a row, and each
// sequence's state.
double bytes_of_step(Model& model, const ModelState& state, int64_t rows, int64_t context) {
  const Config& c = model.config();
  const double reached = c.num_experts ? 1 - std::pow(1 - double(c.num_experts_per_token) / double(c.num_experts), double(rows)) : 0;
  double n = double(rows) * (double(state.bytes_per_slot()) + double(context) * double(state.bytes_per_token()));
  for (const Param& p : model.params().all()) {
    const bool embedding = p.name == "model.embed_tokens.weight";
    if (embedding) n += double(rows * c.hidden_size) * double(bytes_of(p.value.dtype()));
    if (!embedding || &p == &model.lm_head()) n += stored_bytes(p) * (is_routed_expert(p.name) ? reached : 1);
  }
  return n;
}

StepTime time_steps(Model& model, int64_t rows, int64_t context, int64_t steps) {
  const bool fused = FusedStep::why_not(model).empty();
  const Device device = model.params().device();
  ModelState state = model.new_state(rows, device, !fused);
  {
    Arena arena(size_t(64) << 30, device);
    for (int64_t slot = 0; slot < rows; ++slot)
      for (int64_t at = 0; at < context; at += 1024) {
        std::vector<int32_t> ids;
        for (int64_t i = at; i < std::min(context, at + 1024); ++i)
          ids.push_back(int32_t(Rng{1, uint64_t(slot)}.below(uint64_t(model.config().vocab_size), uint64_t(i))));
        Context c;
        c.device = device, c.arena = &arena, c.deterministic = !fused;
        arena.rewind(0);
        Batch b = Batch::one(int64_t(ids.size()));
        b.slots = {int32_t(slot)};
        model.forward(c, Tensor(ids.data(), DType::i32, {int64_t(ids.size())}), b, &state);
      }
  }
  std::vector<DecodeRow> list;
  for (int64_t slot = 0; slot < rows; ++slot) list.push_back({.slot = int32_t(slot), .sample = {}, .id = 1});
  StepTime t{.rows = rows, .fused = fused};
  for (bool captured : {false, true}) {
    Decoder d(model, state, {.captured = captured, .deterministic = !fused});
    d.begin(list);
    for (int i = 0; i < 3; ++i) d.step();
    gpu::synchronize();
    std::vector<double> runs;
    for (int run = 0; run < 5; ++run) {
      const auto start = std::chrono::steady_clock::now();
      for (int64_t i = 0; i < steps; ++i) d.step();
      gpu::synchronize();
      runs.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / double(steps));
    }
    d.result(d.drawn() - 1, 0);  // an Error when the numbers broke down
    (captured ? t.captured : t.eager) = median(runs);
    if (!captured) continue;
    t.launches = d.kernels(), t.bytes = bytes_of_step(model, state, rows, context);
    if (KernelTimes times; times.why_not().empty()) {
      constexpr int kSteps = 8;
      times.begin();
      for (int i = 0; i < kSteps; ++i) d.step();
      gpu::synchronize();
      std::vector<KernelTimes::Kernel> all = times.end();
      const size_t each = all.size() / kSteps;
      if (each == size_t(t.launches)) {
        t.gaps = 0;
        for (int i = 0; i < kSteps; ++i)  // within steps: between them the host may be behind
          t.gaps += gap_share({all.begin() + ptrdiff_t(size_t(i) * each), all.begin() + ptrdiff_t(size_t(i + 1) * each)}) / kSteps;
        double end = all[0].begin;  // kernels overlap: what counts is from the last end before to a kernel's own
        for (const auto& k : all) t.kernels[k.name] += std::max(0.0, k.end - end) / kSteps, end = std::max(end, k.end);
      }
    }
  }
  return t;
}

}  // namespace

void bench_decode_on_gpu(Model& model, const std::string& what, const GpuDecodeFlags& f) {
  const std::string why = Decoder::why_not(model, {.deterministic = !FusedStep::why_not(model).empty()});
  K3_CHECK(why.empty(), "[bench] this model is not decoded by captured steps: {}", why);
  const double rate = gpu_rates().bytes;
  nlohmann::ordered_json lines = nlohmann::ordered_json::array();
  if (!f.json)
    fmt::print(
        "{}, {}, {}; {} tokens of context, {} steps, medians of 5; a copy moves {:.2f} TB/s\n{:>5} {:>16} {:>9} {:>10} {:>9} {:>6} {:>9} {:>9} "
        "{:>6}\n",
        what, gpu_name(), model.bf16_products ? "bfloat16" : "float32", f.context, f.steps, rate * 1e-12, "rows", "form", "us", "uncaptured",
        "launches", "gaps", "MB", "floor us", "share");
  for (int64_t rows : f.rows) {
    const StepTime t = time_steps(model, rows, f.context, f.steps);
    const double floor = t.bytes / rate;
    const char* form = t.fused ? "fused" : "as the model is";
    if (!f.json) {
      const std::string gaps = t.gaps < 0 ? "?" : fmt::format("{:.1f} %", 100 * t.gaps);
      fmt::print("{:>5} {:>16} {:>9.1f} {:>10.1f} {:>9} {:>6} {:>9.1f} {:>9.1f} {:>4.0f} %\n", rows, form, 1e6 * t.captured, 1e6 * t.eager,
                 t.launches, gaps, 1e-6 * t.bytes, 1e6 * floor, 100 * floor / t.captured);
    }
    nlohmann::ordered_json j = {{"rows", rows},
                                {"context", f.context},
                                {"form", form},
                                {"seconds_a_step", t.captured},
                                {"seconds_a_step_uncaptured", t.eager},
                                {"launches", t.launches},
                                {"gaps", t.gaps < 0 ? nlohmann::ordered_json() : nlohmann::ordered_json(t.gaps)},
                                {"bytes", t.bytes},
                                {"bytes_a_second_of_a_copy", rate},
                                {"floor_seconds", floor},
                                {"share_of_floor", floor / t.captured}};
    for (const auto& [name, seconds] : t.kernels) j["kernels"][name] = seconds;
    lines.push_back(j);
    std::fflush(stdout);
  }
  if (f.json)
    fmt::print(
        "{}\n",
        nlohmann::ordered_json{{"model", what}, {"gpu", gpu_name()}, {"products", model.bf16_products ? "bf16" : "f32"}, {"steps", lines}}.dump(2));
}

}  // namespace k3

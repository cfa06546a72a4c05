#include <fmt/core.h>

#include <algorithm>
#include <filesystem>

#include "k3/cli/commands.h"
#include "k3/cli/load_flags.h"
#include "k3/cli/open.h"
#include "k3/core/error.h"
#include "k3/infer/parity.h"

namespace k3 {

namespace {

struct VerifyFlags {
  std::string model, golden, gradients_file, record;
  bool gradients = false;
  ParityOptions options;
  LoadOptions load;
  MemoryFlags memory;
};

int print(const ParityReport& report, bool limits) {
  int bad = 0;
  for (const ParityRow& r : report.rows) {
    fmt::print("{}  {:<72} relative {:9.2e}{}  worst {:9.2e}{}{}\n", r.good() ? "ok  " : "FAIL", r.name, r.relative,
               limits ? fmt::format(" of {:8.2e}", r.limit) : "", r.worst, r.at >= 0 ? fmt::format(" at {}", r.at) : "",
               r.note.empty() ? "" : "  " + r.note);
    bad += !r.good();
  }
  return bad;
}

void run(const VerifyFlags& f) {
  namespace fs = std::filesystem;
  for (auto [name, limit] : {std::pair{"--rtol", f.options.rtol}, {"--gradient-rtol", f.options.gradient_rtol}})
    K3_CHECK(limit > 0 && limit <= 1, "[verify] {} is {} but must be above 0 and at most 1", name, limit);
  std::string folder = resolve_snapshot(f.model);
  Config config = Config::load(folder);
  config.finish();
  std::string golden = f.golden.empty() ? f.model + "/golden.safetensors" : f.golden;
  K3_CHECK(fs::exists(golden), "[verify] {} is not there; name the recording with --golden FILE", golden);
  Snapshot recording(golden);
  const StoredTensor* ids = recording.find("input_ids");
  K3_CHECK(ids && ids->shape.rank == 2, "[verify] {} has no input_ids of rows and tokens", golden);
  MemoryRequest memory{.budget = f.memory.budget,
                       .sequences = ids->shape[0],
                       .context = ids->shape[1],
                       .at_once = ids->shape.size(),
                       .trust_scales = f.memory.trust_scales};
  K3_CHECK(!f.gradients || f.memory.budget == "auto", "[verify] gradients need every weight in float32; leave out --memory");
  std::unique_ptr<OpenedModel> opened;
  std::unique_ptr<Model> trained;
  if (f.gradients) {
    trained = std::make_unique<Model>(config);
    load(*trained, Snapshot(folder), f.load);
  } else {
    opened = std::make_unique<OpenedModel>(folder, config, memory, f.load);
  }
  Model& model = opened ? opened->model() : *trained;
  if (!f.record.empty()) {
    record(model, recording.view(*ids), f.record);
    fmt::print("recorded {}\n", f.record);
    return;
  }
  std::unique_ptr<Snapshot> slopes;
  if (f.gradients) {
    std::string file = f.gradients_file.empty() ? f.model + "/grads.safetensors" : f.gradients_file;
    K3_CHECK(fs::exists(file), "[verify] {} is not there; name the recorded gradients with --gradients-file FILE", file);
    slopes = std::make_unique<Snapshot>(file);
  }
  ParityOptions options = f.options;
  if (f.load.bf16_products) {
    Model exact(config);
    load(exact, Snapshot(folder), {.for_training = true});
    allow_bf16(exact, recording, slopes.get(), options);
    fmt::print(
        "limits: {:g} times what rounding every matrix to bfloat16 moves the tensor, in float32 on the CPU; logits {:.2e}, greedy within {:.2g}\n",
        kBf16Factor, std::max(options.rtol, options.limits["logits"]), options.greedy_gap);
  }
  ParityReport forward = compare_forward(model, recording, options);
  int bad = print(forward, f.load.bf16_products);
  if (!forward.ties.empty()) {
    fmt::print("{} router choices are nearly tied (margin below {:g}); another rounding may choose otherwise{}\n", forward.ties.size(), f.options.tie,
               forward.good ? "" : "; try --force-routing");
    for (size_t i = 0; i < std::min<size_t>(10, forward.ties.size()); ++i) fmt::print("      {}\n", forward.ties[i]);
  }
  size_t rows = forward.rows.size();
  if (f.gradients) {
    ParityReport g = compare_gradients(model, recording, *slopes, options);
    bad += print(g, f.load.bf16_products);
    rows += g.rows.size();
    auto worst = std::max_element(g.rows.begin(), g.rows.end(), [](auto& a, auto& b) { return a.relative < b.relative; });
    if (worst != g.rows.end()) fmt::print("largest relative error of a gradient: {:.2e} ({})\n", worst->relative, worst->name);
  }
  if (opened) opened->print_peak();
  fmt::print("{} of {} tensors within their limits\n", rows - size_t(bad), rows);
  K3_CHECK(bad == 0, "[verify] {} of {} tensors are beyond their limits (--rtol {:g}{})", bad, rows, f.options.rtol,
           f.gradients ? fmt::format(", --gradient-rtol {:g}", f.options.gradient_rtol) : "");
}

}  // namespace

void add_verify(CLI::App& app) {
  CLI::App* c = app.add_subcommand("verify", "compare a model, tensor by tensor, with what another implementation recorded");
  c->footer("Example:\n  k3 verify golden/kimi-k3-a --gradients --rtol 1e-5");
  auto f = std::make_shared<VerifyFlags>();
  c->add_option("model", f->model, "snapshot folder")->required();
  c->add_option("--golden", f->golden, "recorded tensors (default: MODEL/golden.safetensors)");
  auto* gradients = c->add_flag("--gradients", f->gradients, "compare gradients too");
  c->add_option("--gradients-file", f->gradients_file, "recorded gradients (default: MODEL/grads.safetensors)")->needs(gradients);
  auto* rtol = c->add_option("--rtol", f->options.rtol, "limit of the relative L2 error")->capture_default_str();
  c->add_option("--gradient-rtol", f->options.gradient_rtol, "the same for gradients")->needs(gradients)->capture_default_str();
  auto* force = c->add_flag("--force-routing", f->options.force_routing, "use the recorded expert choices");
  auto* record = c->add_option("--record", f->record, "write what this program computes for the recorded input_ids, and stop");
  for (CLI::Option* unused : {gradients, rtol, force}) record->excludes(unused);
  add_device(c, f->load);
  add_memory_flags(c, f->memory);
  add_dense(*c, f->load);
  c->callback([f] {
    f->load.for_training = f->gradients;
    run(*f);
  });
}

}  // namespace k3

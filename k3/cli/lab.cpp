#include <fmt/core.h>

#include <atomic>
#include <csignal>

#include "k3/cli/commands.h"
#include "k3/cli/status_line.h"
#include "k3/lab/runner.h"

namespace k3 {

namespace {

std::atomic<bool> g_stop{false};

void run_lab(const lab::Request& request) {
  std::signal(SIGINT, [](int) { g_stop = true, std::signal(SIGINT, SIG_DFL); });  // the second one ends at once
  std::signal(SIGTERM, [](int) { g_stop = true; });
  StatusLine status;
  lab::run(request, {.line = [&](const std::string& text) { status.line(text); },
                     .progress = [&](const std::string& text) { status.say([&] { return text; }); },
                     .stop = [] { return g_stop.load(); }});
}

}  // namespace

void add_lab(CLI::App& app) {
  CLI::App* c = app.add_subcommand("lab", "compare each choice of K3 with what it replaced: runs, numbers, a page with plots");
  c->require_subcommand(1);
  c->fallthrough();
  CLI::App* list = c->add_subcommand("list", "the experiments and their questions");
  list->callback([] {
    for (const lab::Experiment& e : lab::experiments()) fmt::print("{:<12} {}\n", e.name, e.question);
  });
  CLI::App* run = c->add_subcommand("run", "run experiments; finished runs in --out are kept");
  run->footer(
      "Examples:\n  k3 lab run balance outliers --quick --out lab\n  k3 lab run all --seeds 3 --out lab\n"
      "Ctrl-C ends; the same command goes on. Each experiment leaves results.json, table.txt and report.html in OUT/NAME.");
  auto r = std::make_shared<lab::Request>();
  run->add_option("names", r->names, "experiments, or all")->required();
  run->add_flag("--quick", r->setting.quick, "smaller sizes, to see whether it works");
  run->add_option("--seeds", r->setting.seeds, "runs of each arm")->capture_default_str();
  run->add_option("--out", r->out, "folder for results")->required();
  add_device(run, r->setting.device, r->setting.bf16);
  run->callback([=] { run_lab(*r); });
}

}  // namespace k3

#include <fmt/core.h>

#include <atomic>
#include <csignal>

#include "k3/cli/commands.h"
#include "k3/cli/status_line.h"
#include "k3/train/run.h"

namespace k3 {

namespace {

std::atomic<bool> g_asked_to_stop{false};

void run(const RunRequest& request) {
  StatusLine status;
  std::signal(SIGINT, [](int) { g_asked_to_stop = true, std::signal(SIGINT, SIG_DFL); });  // the second one ends at once
  std::signal(SIGTERM, [](int) { g_asked_to_stop = true; });
  train(request, {.line = [&](const std::string& text) { status.line(text); },
                  .progress = [&](const std::string& text) { status.say([&] { return text; }); },
                  .stop = [] { return g_asked_to_stop.load(); }});
}

}  // namespace

void add_train(CLI::App& app) {
  CLI::App* c = app.add_subcommand("train", "learn from text, from scratch or from where a run stopped");
  c->footer(
      "Examples:\n  k3 train configs/demo.json --data book.txt letters/ --out runs/mine\n"
      "  k3 train configs/demo.json --data book.txt --out runs/small --set hidden_size=128 --set steps=200\n"
      "  k3 train --out runs/mine --resume\n"
      "Ctrl-C saves and ends. The newest checkpoint, metrics.jsonl and report.html are in --out.");
  auto r = std::make_shared<RunRequest>();
  auto resume = std::make_shared<bool>(false), either = std::make_shared<bool>(false);
  c->add_option("config", r->config, "config file: the model's keys, and those of training in \"train\"; not needed with --resume");
  c->add_option("--data", r->data, "files and folders to learn from, any bytes; not needed with --resume");
  c->add_option("--out", r->out, "folder for checkpoints and curves")->required();
  c->add_option("--set", r->assignments, "key=value, a key of the config or of its train object; may be given several times")->take_all();
  add_device(c, r->device, r->bf16_products);
  auto* flag = c->add_flag("--resume", *resume, "go on from the newest checkpoint in --out");
  c->add_flag("--resume-or-start", *either, "the same if there is one, otherwise start")->excludes(flag);
  c->callback([=] {
    r->mode = *resume ? RunRequest::Mode::resume : *either ? RunRequest::Mode::resume_or_start : RunRequest::Mode::start;
    run(*r);
  });
}

}  // namespace k3

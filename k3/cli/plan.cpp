#include <fmt/core.h>
#include <fmt/ranges.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "k3/cli/commands.h"
#include "k3/core/error.h"
#include "k3/core/file.h"
#include "k3/plan/check.h"
#include "k3/plan/measure.h"
#include "k3/plan/notes.h"
#include "k3/plan/plan.h"
#include "k3/plan/report.h"

namespace k3 {

namespace {

using namespace k3::plan;

struct Flags {
  std::vector<std::string> models, sets, explain;
  std::string on = "h200", html, goal = "throughput", out;
  Deployment deployment;
  Question question;
  int64_t most_gpus = 64;
  bool json = false, check = false, measure = false, no_count = false, snapshot_state = false, show_notes = false;
  std::string sweep;
};

// A model, and optionally its own variant: "k3" or "k3:mixers=mla:experts_format=fp8".
Architecture model_of(const std::string& text, const std::vector<std::string>& sets) {
  std::vector<std::string> parts;
  for (size_t at = 0; at <= text.size();) {
    size_t end = std::min(text.find(':', at), text.size());
    parts.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  std::vector<std::string> all = sets;
  all.insert(all.end(), parts.begin() + 1, parts.end());
  return load_architecture(parts[0], all);
}

void print_plan(const Sections& s, const Architecture& a, const Flags& f) {
  if (!f.explain.empty()) {
    for (const std::string& key : f.explain) fmt::print("{}", explain(s, key));
    return;
  }
  if (f.json) {
    fmt::print("{}\n", to_json(s).dump(1));
    return;
  }
  for (const std::string& note : a.notes) fmt::print("note: {}\n", note);
  fmt::print("{}", table(s));
}

void run_sweep(const Architecture& a, const Hardware& h, const Deployment& d, const Flags& f) {
  const bool batch = f.sweep == "batch";
  K3_CHECK(batch || f.sweep == "context", "[plan] --sweep {}: batch and context are known", f.sweep);
  const Memory m = memory_of(a, h, d);
  fmt::print("{:>10} {:>12} {:>14} {:>12} {:>12} {:>12}\n", f.sweep, "TPOT", "token/s", "HBM B", "FLOP/B", "fits");
  for (double x = batch ? 1 : 1024; x <= (batch ? 4096 : 1048576); x *= 2) {
    double b = batch ? x : f.question.batch, c = batch ? f.question.context : x;
    Work w{Regime::decode, b, c, f.question.width, f.question.replay};
    double t = step_time(a, h, d, w).seconds();
    Five v = five(a, d, w);
    fmt::print("{:>10.0f} {:>12} {:>14} {:>12} {:>12} {:>12}\n", x, show(t, "s"), show(double(d.dp) * b / t, ""), show(v.hbm(), ""),
               show(v.intensity(), ""), m.sequences(c) >= b ? "yes" : "no");
  }
}

// What each form of the command listens to. A flag that would change nothing is refused: nobody should believe that it did.
struct Form {
  std::string name;
  std::set<std::string> flags;
};
std::set<std::string> operator+(std::set<std::string> a, const std::set<std::string>& b) {
  a.insert(b.begin(), b.end());
  return a;
}
Form form_of(const Flags& f) {
  const std::set<std::string> model = {"model", "--set", "--on"}, layout = {"--gpus", "--tp", "--dp", "--ep"},
                              serving = {"--context", "--kv-bytes",     "--state-bytes", "--slots", "--rho",
                                         "--balance", "--shard-latent", "--two-batches", "--dcp"},
                              steps = {"--batch", "--draft-width", "--accepted", "--draft-ms", "--snapshot-state"},
                              training = {"--train", "--sequence", "--micro-batch", "--step-tokens", "--mfu"}, output = {"--json", "--html"};
  const std::string verb = f.models.empty() ? "" : f.models[0];
  if (f.measure) return {"--measure", {"--measure", "--out"}};
  if (f.check) return {"--check", {"--check"}};
  if (verb == "notes") return {"notes", {"model"}};
  if (verb == "fit") {
    Form fit = {"fit", model + serving + std::set<std::string>{"--goal", "--most-gpus"}};
    fit.flags.erase("--dcp");
    return fit;
  }
  if (verb == "compare") return {"compare", model + layout + output + (f.question.train ? training : serving + steps)};
  if (!f.sweep.empty()) {
    Form sweep = {"--sweep " + f.sweep, model + layout + serving + steps + std::set<std::string>{"--sweep"}};
    for (const char* unused : {"--accepted", "--draft-ms"}) sweep.flags.erase(unused);
    sweep.flags.erase("--" + f.sweep);
    return sweep;
  }
  const std::set<std::string> detail = {"--explain", "--no-count"};
  if (f.question.train) return {"--train", model + layout + training + output + detail};
  return {"the plan of one model", model + layout + serving + steps + output + detail};
}

void run(const Flags& given, const CLI::App& command) {
  Flags f = given;
  const Form form = form_of(f);
  K3_CHECK(form.name != "fit" || command.count("--gpus") == 0,
           "[plan] fit searches over the number of GPUs; bound it with --most-gpus in place of --gpus");
  for (const CLI::Option* o : command.get_options())
    K3_CHECK(o->count() == 0 || form.flags.count(o->get_name()), "[plan] {} has no effect on {}; leave it out", o->get_name(), form.name);
  K3_CHECK(!(f.json && !f.explain.empty()), "[plan] --json and --explain are two outputs; choose one");
  if (f.measure) {
    std::string text = measure_this_machine();
    if (f.out.empty())
      fmt::print("{}", text);
    else
      write_file(f.out, text), fmt::print("wrote {}; use it with --on {}\n", f.out, f.out);
    return;
  }
  if (f.check) {
    fmt::print("Published measurements (predictions are estimates; constants in configs/hardware/efficiency)\n\n{}\n", table(published_targets()));
    fmt::print("This machine\n\n{}", table(machine_targets()));
    return;
  }
  std::string verb = f.models.empty() ? "" : f.models[0];
  if (verb == "notes") {
    K3_CHECK(f.models.size() == 1, "[plan] notes takes no model");
    fmt::print("{}", table(notes()));
    return;
  }
  if (verb == "compare" || verb == "fit")
    f.models.erase(f.models.begin());
  else
    verb = "";
  K3_CHECK(!f.models.empty(), "[plan] name a model: {}, a config file or a snapshot folder", fmt::join(shipped_models(), ", "));
  K3_CHECK(verb == "compare" || f.models.size() == 1, "[plan] one model, please; to see several: k3 plan compare {}", fmt::join(f.models, " "));
  const Hardware h = load_hardware(f.on);
  f.question.count = !f.no_count;
  f.question.replay = !f.snapshot_state;
  if (verb == "compare") {
    std::vector<std::string> names;
    std::vector<Sections> plans;
    std::vector<ReportModel> report;
    for (const std::string& m : f.models) {
      Architecture a = model_of(m, f.sets);
      Deployment d = resolve(a, f.deployment);
      Question q = f.question;
      q.count = false;
      names.push_back(a.name), plans.push_back(plan::plan(a, h, d, q)), report.push_back({a, d, plans.back()});
    }
    if (f.json) {
      nlohmann::json all = nlohmann::json::object();
      for (size_t i = 0; i < plans.size(); ++i) all[names[i]] = to_json(plans[i]);
      fmt::print("{}\n", all.dump(1));
    } else {
      for (const ReportModel& m : report)
        for (const std::string& note : m.architecture.notes) fmt::print("note: {}: {}\n", m.architecture.name, note);
      fmt::print("{}", compare_table(names, plans));
      for (size_t i = 1; i < report.size(); ++i) {
        double x = decode_crossover(report[0].architecture, report[i].architecture),
               y = prefill_crossover(report[0].architecture, report[i].architecture);
        if (!std::isnan(x)) fmt::print("\ndecode FLOPs of {} and {} are equal at {:.0f} tokens of context\n", names[0], names[i], x);
        if (!std::isnan(y)) fmt::print("prefill FLOPs are equal at a prompt of {:.0f} tokens\n", y);
      }
    }
    if (!f.html.empty()) write_file(f.html, html_report(report, h, f.question));
    return;
  }
  const Architecture a = model_of(f.models[0], f.sets);
  if (verb == "fit") {
    Goal goal = f.goal == "latency" ? Goal::latency : f.goal == "context" ? Goal::context : Goal::throughput;
    auto list = fit(a, h, f.most_gpus, f.question.context, goal, f.deployment);
    const int64_t fewest = fewest_gpus(a, h, 4096, f.question.context, f.deployment);
    K3_CHECK(!list.empty(), "[plan] {} with one sequence of {:.0f} tokens does not fit on {} x {}; {}", a.name, f.question.context, f.most_gpus,
             h.name, fewest ? fmt::format("the fewest that work: {}", fewest) : "no number of them does");
    fmt::print("{} on {}, context {:.0f}: {} layouts fit, at least {} GPUs; best for {} first (estimates)\n", a.name, h.name, f.question.context,
               list.size(), fewest, f.goal);
    fmt::print("{:>5} {:<34} {:>7} {:>11} {:>11} {:>13} {:>11} {:>12}\n", "GPUs", "layout", "batch", "TPOT", "TTFT", "token/s/GPU", "sequences",
               "longest");
    for (size_t i = 0; i < list.size() && i < 16; ++i) {
      const Fit& x = list[i];
      fmt::print("{:>5} {:<34} {:>7.0f} {:>11} {:>11} {:>13} {:>11.0f} {:>12}\n", x.deployment.gpus, to_string(x.deployment), x.batch,
                 show(x.tpot, "s"), show(x.ttft, "s"), show(x.throughput, ""), x.sequences, show(x.longest_context, ""));
    }
    return;
  }
  const Deployment d = resolve(a, f.deployment);
  if (!f.sweep.empty()) return run_sweep(a, h, d, f);
  Sections s = plan::plan(a, h, d, f.question);
  print_plan(s, a, f);
  if (!f.html.empty()) {
    write_file(f.html, html_report({{a, d, s}}, h, f.question));
    if (!f.json && f.explain.empty()) fmt::print("\nwrote {}\n", f.html);
  }
}

}  // namespace

void add_plan(CLI::App& app) {
  auto f = std::make_shared<Flags>();
  CLI::App* c = app.add_subcommand("plan", "what a model costs: FLOPs, bytes, network, memory, time; estimates before anything is built");
  c->add_option("model", f->models,
                "MODEL, or: compare MODEL MODEL ..., fit MODEL, notes. A shipped name, config file or snapshot folder; MODEL:key=value is a variant");
  c->add_option("--on", f->on, "hardware: a name in configs/hardware, or a file")->capture_default_str();
  c->add_option("--set", f->sets, "key=value of the model's config; also experts_format, trunk_format");
  c->add_option("--gpus", f->deployment.gpus, "how many");
  c->add_option("--tp", f->deployment.tp, "tensor-parallel ranks of an attention group");
  c->add_option("--dp", f->deployment.dp, "attention groups");
  c->add_option("--ep", f->deployment.ep, "ranks that share the experts; 1: each expert sliced over TP");
  c->add_option("--dcp", f->deployment.dcp, "ranks that share one token cache");
  c->add_option("--batch", f->question.batch, "sequences of one attention group")->capture_default_str();
  c->add_option("--context", f->question.context, "tokens cached in decode; the prompt of a prefill")->capture_default_str();
  c->add_option("--kv-bytes", f->deployment.kv_bytes, "a cached number")->capture_default_str();
  c->add_option("--state-bytes", f->deployment.state_bytes, "a number of the KDA state")->capture_default_str();
  c->add_option("--slots", f->deployment.slots, "state slots a sequence takes (prefix snapshots)")->capture_default_str();
  c->add_option("--rho", f->deployment.rho, "1: tokens choose experts independently; 0.55: real text")->capture_default_str();
  c->add_option("--balance", f->deployment.balance, "busiest rank over the mean, routed experts")->capture_default_str();
  c->add_flag("--shard-latent", f->deployment.shard_latent, "split the latent pair over TP");
  c->add_flag("--two-batches", f->deployment.two_batches, "interleave two micro-batches: all-to-all behind computation");
  c->add_option("--draft-width", f->question.width, "tokens verified a step: drafted + 1")->capture_default_str();
  c->add_option("--accepted", f->question.accepted, "mean accepted tokens a step")->capture_default_str();
  c->add_option_function<double>(
      "--draft-ms", [f](double ms) { f->question.draft = ms * 1e-3; }, "time of the draft model a step");
  c->add_flag("--snapshot-state", f->snapshot_state, "verification writes the state once a token instead of replaying");
  c->add_flag("--train", f->question.train, "training: FLOPs, memory, traffic, time of a step");
  c->add_option("--sequence", f->question.sequence, "training: tokens of a sequence")->capture_default_str();
  c->add_option("--micro-batch", f->question.micro_batch, "training: sequences of a micro-batch")->capture_default_str();
  c->add_option("--step-tokens", f->question.tokens_a_step, "training: tokens of a step")->capture_default_str();
  c->add_option("--mfu", f->question.mfu, "training: share of the peak that is reached")->capture_default_str();
  c->add_flag("--no-count", f->no_count, "closed forms only; don't run the model's code on the null device");
  c->add_option("--goal", f->goal, "fit: latency, throughput or context")
      ->check(CLI::IsMember({"latency", "throughput", "context"}))
      ->capture_default_str();
  c->add_option("--most-gpus", f->most_gpus, "fit: search up to this many")->capture_default_str();
  c->add_option("--sweep", f->sweep, "a table over batch or context");
  c->add_flag("--json", f->json, "numbers with unit, kind and formula");
  c->add_option("--html", f->html, "write a report with charts to this file");
  c->add_option("--explain", f->explain, "the formula of a number, by its key");
  c->add_flag("--check", f->check, "predicted against measured: published figures, and this machine (best with --threads 1 when it is busy)");
  c->add_flag("--measure", f->measure, "measure this machine; prints a hardware file");
  c->add_option("--out", f->out, "--measure: where to");
  c->footer("Example: k3 plan k3 --on b300 --gpus 8 --batch 16 --context 8192 --html report.html");
  c->callback([f, c] { run(*f, *c); });
}

}  // namespace k3

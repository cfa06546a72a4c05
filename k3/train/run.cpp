#include "k3/train/run.h"

#include <charconv>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "k3/core/error.h"
#include "k3/core/thousands.h"
#include "k3/core/file.h"
#include "k3/core/memory.h"
#include "k3/core/progress.h"
#include "k3/model/checkpoint.h"
#include "k3/model/init.h"
#include "k3/tokenizer/learn.h"
#include "k3/train/eval.h"
#include "k3/train/peak.h"
#include "k3/train/report.h"
#include "k3/train/trainer.h"

namespace k3 {

namespace fs = std::filesystem;
using nlohmann::json;
using Clock = std::chrono::steady_clock;

namespace {

constexpr int kMostSkippedInARow = 20;

double seconds_since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

// The model keys in which two configs differ.
std::vector<std::string> differences(const Config& before, const Config& now) {
  json a = before.to_json().flatten(), b = now.to_json().flatten();
  std::vector<std::string> list;
  auto name = [](const std::string& pointer) { return pointer.starts_with("/text_config/") ? pointer.substr(13) : pointer.substr(1); };
  for (const auto& [key, value] : a.items())
    if (!b.contains(key) || b[key] != value)
      list.push_back(fmt::format("{} was {}, is {}", name(key), value.dump(), b.contains(key) ? b[key].dump() : "absent"));
  for (const auto& [key, value] : b.items())
    if (!a.contains(key)) list.push_back(fmt::format("{} was absent, is {}", name(key), value.dump()));
  return list;
}

std::string joined(const std::vector<std::string>& parts) {
  std::string text;
  for (size_t i = 0; i < parts.size() && i < 4; ++i) text += (i ? "; " : "") + parts[i];
  return parts.size() > 4 ? text + "; ..." : text;
}

// The tokenizer decides what the config didn't say: vocabulary and special ids.
void fit_to_tokenizer(RunConfig& run, const Tokenizer& t) {
  auto given = [&](const char* key) { return std::find(run.given.begin(), run.given.end(), key) != run.given.end(); };
  Config& c = run.model;
  if (!given("vocab_size")) c.vocab_size = t.vocabulary();
  if (!given("bos_token_id")) c.bos_token_id = t.bos();
  if (!given("eos_token_id")) c.eos_token_id = {t.eos()};
  if (!given("pad_token_id")) c.pad_token_id = t.pad();
  K3_CHECK(c.vocab_size >= t.vocabulary(), "[config] vocab_size is {} but the tokenizer has {} ids; leave vocab_size out to follow the tokenizer",
           c.vocab_size, t.vocabulary());
  c.finish();
}

BytesDone reading(const RunEvents& events, const char* what) {
  return [&events, work = Progress(what, Progress::bytes)](uint64_t done, uint64_t of) {
    if (events.progress) events.progress(work.text(done, of));
  };
}

// Where the run's data comes from, checked against the run that goes on.
TokenFile open_data(const RunRequest& request, const std::string& path, const std::optional<Training>& before, const TrainOptions& options,
                    const std::vector<Source>& sources, const Tokenizer& tokenizer, const RunEvents& events) {
  if (!before) {
    Prepared p = prepare_token_file(path, sources, options.document_separator, tokenizer, reading(events, "tokenising"));
    if (p.reused) events.line(fmt::format("data: {} is up to date and used again", path));
    return std::move(p.file);
  }
  std::optional<TokenFile> file;
  std::string problem = "it is not there";
  try {
    file.emplace(path);
    if (file->checksum() != before->data_checksum) file.reset(), problem = "it was made from other data";
  } catch (const Error& e) { problem = e.what(); }
  if (file) {
    const std::string changed = sources.empty() ? "" : difference(*file, sources);
    K3_CHECK(changed.empty(),
             "[train] the data changed since this run began: {}; put it back, leave out --data to go on with the tokens kept in {}, "
             "or start a new run with another --out",
             changed, path);
    return std::move(*file);
  }
  K3_CHECK(!sources.empty(), "[train] {} cannot be used: {}; name the data again with --data, and it will be made anew", path, problem);
  const std::string trial = path + ".part";  // beside it: what is there stays until the new one is known to be right
  write_token_file(trial, sources, options.document_separator, tokenizer, reading(events, "tokenising"));
  const bool same = TokenFile(trial).checksum() == before->data_checksum;
  if (same)
    fs::rename(trial, path);
  else
    fs::remove(trial);
  K3_CHECK(same, "[train] {} in {} is not the data that this run began with; name the right files, or start a new run with another --out",
           request.data[0], path);
  events.line(fmt::format("data: {} made anew from the same data", path));
  return TokenFile(path);
}

// Refuses a run that would be killed for its memory: the same code on the null device says what it needs.
void check_memory(const RunConfig& run, const TokenFile& data, const std::vector<int64_t>& documents, const Tokenizer& tokenizer) {
  const double available = double(available_memory()), gb = 1e-9;
  auto refuse = [&](const std::string& what, double needed) {
    K3_CHECK(needed <= available,
             "[train] {} {:.2f} GB, but {:.2f} GB are available here; make the model smaller (hidden_size {}, num_hidden_layers {}, num_experts {}, "
             "vocab_size {}) or a step (micro_batch_tokens {}; recompute=true)",
             what, needed * gb, available * gb, run.model.hidden_size, run.model.num_hidden_layers, run.model.num_experts, run.model.vocab_size,
             run.train.micro_batch_tokens);
  };
  Model model(run.model, true);
  double weights = 0, gradients = 0;
  for (const Param& p : model.params().all()) {
    double bytes = 4;
    for (int i = 0; i < p.shape.rank; ++i) bytes *= double(p.shape[i]);
    weights += bytes, gradients += p.role.kind == Role::Kind::fixed ? 0 : bytes;
  }
  // What follows counts in whole numbers, so what is far too large is refused before: a moment of each weight, a row of each token.
  refuse("weights, gradients and moments need at least", weights + 2 * gradients);
  refuse("the rows of a micro-batch need at least", 4.0 * double(run.model.hidden_size) * double(run.train.micro_batch_tokens));
  model.params().allocate(Device::null);
  Trainer trainer(model, data, documents, tokenizer, run.train);
  double moments = 0;
  for (const NamedTensor& t : trainer.optimizer().moments()) moments += double(t.value.bytes());
  Sampler sampler(data, documents, uint64_t(run.train.seed), run.train.sequence_length);
  const double step = double(trainer.forecast(sampler.tokens(0, run.train.micro_batch_tokens).batch).bytes);
  refuse(fmt::format("{:.2f} GB of weights, {:.2f} of gradients, {:.2f} of moments and {:.2f} of a step make", weights * gb, gradients * gb,
                     moments * gb, step * gb),
         weights + gradients + moments + step);
}

}  // namespace

std::optional<Training> Training::read(const std::string& folder) {
  const std::string path = folder + "/training.json";
  if (!fs::exists(path)) return std::nullopt;
  json j = json::parse(read_file(path), nullptr, false);
  K3_CHECK(j.is_object() && j.contains("step") && j.contains("options") && j.contains("data"),
           "[train] {} is damaged; go on from another step folder by writing its name into LATEST", path);
  Training t;
  t.step = j["step"], t.updates = j["updates"], t.skipped = j["skipped"];
  t.options = TrainOptions::parse(j["options"]);
  t.options.finish();
  t.data_checksum = j["data"]["checksum"];
  return t;
}

void Training::write(const std::string& folder) const {
  json j = {{"step", step}, {"updates", updates}, {"skipped", skipped}, {"options", options.to_json()}, {"data", {{"checksum", data_checksum}}}};
  write_file(folder + "/training.json", j.dump(2) + "\n");
}

Tokenizer make_tokenizer(const std::string& choice, std::vector<Source> sources, const std::string& separator, const RunEvents& events) {
  if (choice == "bytes") return Tokenizer::bytes();
  if (!choice.starts_with("bpe:")) return Tokenizer::load(choice);
  int32_t ranks = 0;
  const char *first = choice.data() + 4, *last = choice.data() + choice.size();
  K3_CHECK(std::from_chars(first, last, ranks).ptr == last && ranks >= 256 && ranks <= 1000000,
           "[config] tokenizer is '{}', but after bpe: comes how many tokens to learn, from 256 to 1000000", choice);
  uint64_t total = 0;
  for (const Source& s : sources) total += s.bytes;
  auto done = reading(events, "learning the tokenizer");
  return learn(ranks, [&](const AddText& add) { read_documents(sources, separator, {add, [] {}, [&](uint64_t n) { done(n, total); }}); });
}

void train(const RunRequest& request, const RunEvents& events) {
  // 1. What is asked, and whether it fits what is there. Nothing is written before that is known.
  const std::optional<std::string> newest = newest_step(request.out);
  using Mode = RunRequest::Mode;
  K3_CHECK(request.mode != Mode::start || !newest, "[train] {} holds a run already; add --resume to go on with it, or choose another --out",
           request.out);
  K3_CHECK(request.mode != Mode::resume || newest, "[train] {} holds no checkpoint to go on from; start without --resume", request.out);
  K3_CHECK(newest || !request.config.empty(), "[train] a new run needs a config file");
  std::optional<RunConfig> asked;
  if (!request.config.empty()) asked = load_run_config(request.config, request.assignments);
  std::vector<Source> sources;
  if (!newest || !request.data.empty()) sources = list_sources(request.data, request.out);

  // 2. The run: its folder, tokenizer, config and data.
  RunFolder folder(request.out);
  for (const std::string& part : folder.remove_parts())
    events.line(fmt::format("{} was left half-written by a run that was stopped; it is ignored and removed", part));
  std::optional<Training> before;
  if (newest) {
    before = Training::read(*newest);
    K3_CHECK(before, "[train] {} has no training.json, so nothing says how to go on; write the name of another step folder into {}", *newest,
             folder.file("LATEST"));
    if (!asked) {
      asked.emplace();
      asked->model = Config::load(*newest), asked->train = before->options;
      asked->given = Config::keys();
      for (const std::string& a : request.assignments) {
        const size_t eq = a.find('=');
        K3_CHECK(eq != std::string::npos, "[config] '{}' is not of the form key=value", a);
        if (TrainOptions::is_key(a.substr(0, eq)))
          asked->train.set(a.substr(0, eq), a.substr(eq + 1));
        else
          asked->model.set(a);
      }
      asked->train.finish();
    }
  }
  RunConfig& run = *asked;
  const TrainOptions& options = run.train;
  if (before) {
    OptionChanges c = changes(before->options, options);
    K3_CHECK(c.refused.empty(), "[train] the run in {} cannot go on with other options: {}; put them back or choose another --out", request.out,
             joined(c.refused));
    for (const std::string& s : c.allowed)
      events.line("changed: " + s + (s.starts_with("micro_batch_tokens") ? "; sums round differently from here on" : ""));
  }
  const Tokenizer tokenizer = newest ? Tokenizer::load(*newest) : make_tokenizer(options.tokenizer, sources, options.document_separator, events);
  fit_to_tokenizer(run, tokenizer);
  if (newest) {
    Config old = Config::load(*newest);
    old.finish();
    auto d = differences(old, run.model);
    K3_CHECK(d.empty(), "[train] the run in {} is of another model: {}; put it back or choose another --out", request.out, joined(d));
  }
  TokenFile data = open_data(request, folder.file("tokens.bin"), before, options, sources, tokenizer, events);
  data.check_tokenizer(tokenizer);
  Split split = split_documents(data, options.held_out);
  K3_CHECK(!split.train.empty(), "[data] all {} documents of {} are held out, so none is left to learn from; give more documents or set held_out=0",
           data.documents(), data.path());
  if (request.device == Device::cpu) check_memory(run, data, split.train, tokenizer);

  // 3. The model, and where it stands.
  Model model(run.model, true);
  model.bf16_products = request.bf16_products;
  if (newest) {
    Snapshot snapshot(*newest);
    load(model, snapshot, {.for_training = true, .device = request.device, .bf16_products = request.bf16_products});
  } else {
    model.params().allocate(Device::cpu);
    initialize(model, uint64_t(options.seed));
    model.params().move_to(request.device);
  }
  Trainer trainer(model, data, split.train, tokenizer, options);
  Training state = before.value_or(Training{});
  state.options = options, state.data_checksum = data.checksum();
  if (newest) {
    trainer.optimizer().load_moments(Snapshot(*newest + "/optimizer.safetensors"));
    trainer.optimizer().updates = state.updates;
    trainer.set_steps_done(state.step);
  }
  int64_t held_tokens = 0;
  for (int64_t d : split.held_out) held_tokens += data.length(d);
  events.line(fmt::format("model: {} parameters in {} layers", thousands(model.params().count()), run.model.num_hidden_layers));
  events.line(fmt::format("data: {} documents, {} tokens; {} documents with {} tokens are held out; {:.2f} passes over the rest",
                          thousands(data.documents()), thousands(data.tokens()), thousands(int64_t(split.held_out.size())), thousands(held_tokens),
                          double(options.steps) * double(options.batch_tokens) / double(trainer.epoch_tokens())));
  if (split.held_out.empty() && options.held_out > 0)
    events.line("data: no document happened to be held out, so there is no evaluation; give more documents, or a document_separator");
  std::string optimizer_split = trainer.optimizer().split();
  for (size_t at = 0; at < optimizer_split.size();) {
    size_t end = optimizer_split.find('\n', at);
    events.line("optimizer: " + optimizer_split.substr(at, end - at));
    at = end + 1;
  }
  const double peak = measured_peak_flops(request.calibration_seconds, request.device, request.bf16_products);
  events.line(fmt::format("machine: {:.1f} GFLOP/s in a plain matrix product", peak / 1e9));
  if (newest) events.line(fmt::format("going on from step {} of {}", state.step, options.steps));

  auto save_state = [&] {
    state.step = trainer.steps_done(), state.updates = trainer.optimizer().updates;
    folder.save(state.step, [&](const std::string& f) {
      save(model, f);
      tokenizer.save(f);
      write_safetensors(f + "/optimizer.safetensors", trainer.optimizer().moments());
      state.write(f);
    });
  };
  const std::string title = fmt::format("{}: {} layers, {} parameters", fs::path(request.out).lexically_normal().filename().string(),
                                        run.model.num_hidden_layers, thousands(model.params().count()));
  auto report = [&] { write_report(folder.file("metrics.jsonl"), folder.file("report.html"), title); };

  // 4. The loop.
  Metrics metrics(folder.file("metrics.jsonl"), state.step);
  const auto start = Clock::now();
  const int64_t first = trainer.steps_done();
  int skipped_in_a_row = 0;
  auto time_left = [&] {
    int64_t done = trainer.steps_done() - first;
    return done ? duration_text(seconds_since(start) / double(done) * double(options.steps - trainer.steps_done())) : std::string("?");
  };
  trainer.on_micro_batch = [&](int64_t done, int64_t of) {
    if (events.progress)
      events.progress(fmt::format("step {}/{}, micro-batch {}/{}, {} left", trainer.steps_done() + 1, options.steps, done, of, time_left()));
  };
  int64_t saved = newest ? state.step : -1;
  bool stopping = false;
  while (trainer.steps_done() < options.steps && !stopping) {
    const int64_t step = trainer.steps_done() + 1;
    const bool last = step == options.steps, log = last || step == first + 1 || step % options.log_every == 0;
    StepReport r = trainer.step(log);
    const double rate = double(r.tokens) / r.seconds, share = r.flops / r.seconds / peak;
    json m = {{"step", step},
              {"tokens_seen", step * options.batch_tokens},
              {"loss", r.loss},
              {"bits_per_byte", r.bits_per_byte},
              {"gradient_norm", r.gradient_norm},
              {"learning_rate", r.learning_rate},
              {"seconds", r.seconds},
              {"tokens_per_second", rate},
              {"share_of_peak", share},
              {"clipped_heads", r.clipped_heads}};
    if (model.has_mtp()) m["mtp_loss"] = r.mtp_loss;
    double fullest = 0;
    for (size_t i = 0; i < r.load.size(); ++i) {
      m["load"].push_back({{"layer", trainer.moe_layers()[i]}, {"max_over_mean", r.load[i]}});
      fullest = std::max(fullest, r.load[i]);
    }
    for (const GateHealth& g : r.gates) m["gates"].push_back({{"layer", g.layer}, {"keep", g.keep}, {"open", g.open}});
    if (step == first + 1)
      events.line(fmt::format("memory: a step was planned to take {:.1f} MB beside weights and moments, and took {:.1f} MB",
                              double(r.forecast_bytes) / 1e6, double(r.peak_bytes) / 1e6));
    if (!r.bad.empty()) {
      ++state.skipped, ++skipped_in_a_row;
      m["skipped"] = r.bad;
      events.line(fmt::format("step {} skipped: the gradient of {} is not finite ({} skipped so far)", step, r.bad, state.skipped));
      K3_CHECK(skipped_in_a_row < kMostSkippedInARow,
               "[train] {} steps in a row had gradients that are not finite (first in {}); go on from an earlier "
               "step folder (write its name into LATEST) or start again with a lower learning_rate",
               skipped_in_a_row, r.bad);
    } else {
      skipped_in_a_row = 0;
    }
    stopping = events.stop && events.stop();
    std::string held;
    if (!split.held_out.empty() && (last || step % options.eval_every == 0)) {
      Evaluation e = evaluate(model, data, split.held_out, tokenizer, {options.sequence_length, options.micro_batch_tokens, options.eval_tokens},
                              [&](int64_t done, int64_t of) {
                                if (events.progress) events.progress(fmt::format("step {}, held out: {} of {} tokens", step, done, of));
                              });
      m["held_out_loss"] = e.loss, m["held_out_bits_per_byte"] = e.bits_per_byte;
      held = fmt::format(" | held out {:.4f}, {:.4f} bits/byte", e.loss, e.bits_per_byte);
    }
    metrics.add(m.dump());
    if (log || !held.empty())
      events.line(
          fmt::format("step {}/{} | loss {:.4f} | {:.4f} bits/byte{} | norm {:.3f} | lr {:.2e} | {} tokens/s | {:.0f}% of peak{}{} | {} left{}", step,
                      options.steps, r.loss, r.bits_per_byte, model.has_mtp() ? fmt::format(" | after next {:.4f}", r.mtp_loss) : "", r.gradient_norm,
                      r.learning_rate, thousands(int64_t(rate)), 100 * share, r.load.empty() ? "" : fmt::format(" | load {:.2f}", fullest),
                      r.clipped_heads ? fmt::format(" | clipped {}", r.clipped_heads) : "", time_left(), held));
    if (last || stopping || step % options.save_every == 0) save_state(), saved = step;
    if (!held.empty() || last || stopping) report();
  }
  if (saved != trainer.steps_done()) save_state(), saved = trainer.steps_done();
  K3_CHECK(trainer.steps_done() < options.steps || trainer.optimizer().updates > 0,
           "[train] all {} steps were skipped, for gradients that are not finite, so nothing was learnt; start again with another --out and a "
           "smaller initializer_range or learning_rate",
           options.steps);
  if (model.has_mtp() && !options.mtp_keep && trainer.steps_done() == options.steps) {
    const std::string path = folder.file("final"), part = path + ".part";
    fs::remove_all(part);
    save(model, part, uint64_t(4) << 30, false);
    tokenizer.save(part);
    fs::remove_all(path);
    fs::rename(part, path);
    events.line(fmt::format("without the layer of multi-token prediction: {}", path));
  }
  if (trainer.steps_done() == first) report();
  if (stopping && trainer.steps_done() < options.steps)
    events.line(fmt::format("stopped after step {} of {}; go on with --resume", trainer.steps_done(), options.steps));
  else
    events.line(
        fmt::format("done: step {} in {}; curves in {}", trainer.steps_done(), folder.file(step_name(saved).c_str()), folder.file("report.html")));
}

}  // namespace k3

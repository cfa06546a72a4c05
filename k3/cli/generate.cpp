#include <fmt/core.h>

#include <iostream>
#include <iterator>

#include "k3/cli/commands.h"
#include "k3/cli/load_flags.h"
#include "k3/cli/open.h"
#include "k3/cli/status_line.h"
#include "k3/core/error.h"
#include "k3/core/file.h"
#include "k3/infer/generate.h"
#include "k3/tokenizer/stop_ids.h"

namespace k3 {

namespace {

struct GenerateFlags {
  std::string model, prompt, prompt_file;
  bool has_prompt = false, fast = false, ignore_eos = false;
  int samples = 1;
  int64_t chunk = 256;
  GenerateOptions options;
  LoadOptions load;
  MemoryFlags memory;
  PartsReport parts;
};

void run(GenerateFlags& f) {
  check(f.options.sample);  // before anything is loaded or printed
  for (const std::string& s : f.options.stop) K3_CHECK(!s.empty(), "[generate] --stop is empty; leave it out, or give at least one character");
  std::string folder = resolve_snapshot(f.model);
  Config config = Config::load(folder);
  config.finish();
  const Tokenizer tokenizer = Tokenizer::load(folder);  // before the weights: its faults are found at once
  K3_CHECK(tokenizer.vocabulary() <= config.vocab_size, "[generate] the tokenizer has {} ids but the model only {}", tokenizer.vocabulary(),
           config.vocab_size);
  std::string prompt = f.prompt;
  if (!f.prompt_file.empty()) prompt = f.prompt_file == "-" ? std::string(std::istreambuf_iterator<char>(std::cin), {}) : read_file(f.prompt_file);
  std::vector<int32_t> ids = tokenizer.encode(prompt);
  if (ids.empty()) ids = {tokenizer.bos()};  // an empty prompt: whatever follows a beginning
  if (!f.ignore_eos)
    for (const StopId& s : stop_ids(folder, tokenizer)) f.options.stop_ids.push_back(s.id);
  OpenedModel opened(folder, config,
                     {.budget = f.memory.budget,
                      .context = int64_t(ids.size()) + f.options.max_tokens,
                      .at_once = f.chunk,
                      .deterministic = !f.fast,
                      .trust_scales = f.memory.trust_scales},
                     f.load);
  auto rate = [](double n, double seconds) { return seconds > 0 ? n / seconds : 0.0; };
  for (int n = 0; n < f.samples; ++n) {
    SessionOptions how{.prefill_chunk = f.chunk, .deterministic = !f.fast};
    f.parts.listen(how);
    Session session(opened.model(), how);
    if (f.samples > 1) fmt::print("{}--- {}\n", n ? "\n" : "", n + 1);
    fmt::print("{}", prompt);
    std::fflush(stdout);
    StatusLine status;
    auto reading = status.of("reading the prompt", Progress::tokens);
    Generated g = generate(
        session, tokenizer, ids, f.options,
        [](const std::string& text) {
          std::fwrite(text.data(), 1, text.size(), stdout);
          std::fflush(stdout);
          return true;
        },
        [&](int64_t done) {
          reading(uint64_t(done), ids.size());
          if (done == int64_t(ids.size())) status.clear(), f.parts.begin();
        });
    fmt::print("\n");
    fmt::print(stderr, "[{} prompt tokens in {:.2f} s ({:.1f} tokens/s), {} tokens at {:.2f} tokens/s{}, {}{}]\n", g.prompt_tokens, g.prefill_seconds,
               rate(double(g.prompt_tokens), g.prefill_seconds), g.ids.size(), rate(double(g.ids.size()), g.decode_seconds), session.how(),
               g.finish == "stop" ? "stopped by itself" : "stopped by --max-tokens", opened.report(g.prefill_seconds + g.decode_seconds));
    f.parts.print();
    ++f.options.sample.seed;
  }
  opened.print_peak();
}

}  // namespace

void add_generate(CLI::App& app) {
  CLI::App* c = app.add_subcommand("generate", "continue a text");
  c->footer("Example:\n  k3 generate runs/demo --prompt \"A man walks into\" --temperature 0.8 --max-tokens 200");
  auto f = std::make_shared<GenerateFlags>();
  c->add_option("model", f->model, "snapshot folder, or what k3 train wrote")->required();
  auto* prompt = c->add_option("--prompt", f->prompt, "text to continue");
  c->add_option("--prompt-file", f->prompt_file, "the same from a file (- for standard input)")->excludes(prompt)->check([](const std::string& path) {
    return path.empty() ? std::string("--prompt-file is empty; name a file, or - for standard input") : "";
  });
  c->add_option("--max-tokens", f->options.max_tokens, "at most this many")->check(CLI::NonNegativeNumber)->capture_default_str();
  c->add_option("--temperature", f->options.sample.temperature, "0: always the most probable token")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  c->add_option("--top-k", f->options.sample.top_k, "draw from the k most probable (0: all)")->check(CLI::NonNegativeNumber)->capture_default_str();
  c->add_option("--top-p", f->options.sample.top_p, "draw from the most probable that make up this share")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  c->add_option("--min-p", f->options.sample.min_p, "drop what is less probable than this share of the best")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  c->add_option("--seed", f->options.sample.seed, "the same seed gives the same text")->capture_default_str();
  c->add_option("--samples", f->samples, "how many continuations; seeds count up")->check(CLI::Range(1, 10000))->capture_default_str();
  c->add_option("--stop", f->options.stop, "end before this string (may be given several times)")->type_size(1)->allow_extra_args(false);
  c->add_flag("--ignore-eos", f->ignore_eos, "go on past end tokens");
  c->add_flag("--show-specials", f->options.show_specials, "print special tokens by name");
  add_prefill_chunk(*c, f->chunk, f->load);
  add_dense(*c, f->load);
  c->add_flag("--fast", f->fast, "absorbed attention in decode: a smaller cache, results equal to rounding in place of to the bit");
  add_device(c, f->load);
  add_memory_flags(c, f->memory);
  f->parts.add_flag(c);
  c->callback([f] { run(*f); });
}

}  // namespace k3

#include "k3/model/fabricate.h"

#include <fmt/core.h>

#include <nlohmann/json.hpp>

#include "k3/cli/commands.h"
#include "k3/cli/status_line.h"
#include "k3/core/file.h"
#include "k3/tokenizer/tokenizer.h"

namespace k3 {

namespace {

// A vocabulary of the size asked: the bytes, then words of letters, shorter ones first, so that each is reached by merges.
std::vector<std::string> vocabulary(int64_t n) {
  std::vector<std::string> all, shorter = {" "};
  for (int b = 0; b < 256; ++b) all.push_back(std::string(1, char(b)));
  for (char c = 'a'; c <= 'z'; ++c) shorter.push_back(std::string(1, c));
  while (true) {
    std::vector<std::string> longer;
    for (const std::string& s : shorter)
      for (char c = 'a'; c <= 'z'; ++c) {
        if (int64_t(all.size()) >= n) return all;
        longer.push_back(s + c);
        all.push_back(longer.back());
      }
    shorter = std::move(longer);
  }
}

// Kimi-Linear's names of the specials (model.md 7.3), counted from the first.
std::string kimi_linear_specials(int32_t first) {
  static constexpr std::pair<int, const char*> kNames[] = {{0, "[BOS]"},
                                                           {1, "[EOS]"},
                                                           {2, "<|im_end|>"},
                                                           {3, "<|im_user|>"},
                                                           {4, "<|im_assistant|>"},
                                                           {6, "<|start_header_id|>"},
                                                           {7, "<|end_header_id|>"},
                                                           {9, "[EOT]"},
                                                           {10, "<|im_system|>"},
                                                           {11, "<|tool_calls_section_begin|>"},
                                                           {12, "<|tool_calls_section_end|>"},
                                                           {13, "<|tool_call_begin|>"},
                                                           {14, "<|tool_call_argument_begin|>"},
                                                           {15, "<|tool_call_end|>"},
                                                           {17, "<|im_middle|>"},
                                                           {254, "[UNK]"},
                                                           {255, "[PAD]"}};
  nlohmann::ordered_json config;
  for (const auto& [place, name] : kNames) config["added_tokens_decoder"][std::to_string(first + place)] = {{"content", name}, {"special", true}};
  config["bos_token"] = "[BOS]", config["eos_token"] = "[EOS]", config["pad_token"] = "[PAD]", config["unk_token"] = "[UNK]";
  return config.dump(2) + "\n";
}

struct FabricateFlags {
  std::string config, out;
  FabricateOptions options;
};

void run(const FabricateFlags& f) {
  const double start = seconds_now();
  StatusLine status;
  const Fabricated made = fabricate(f.config, f.out, f.options, status.of("writing", Progress::bytes));
  status.clear();
  const double seconds = seconds_now() - start;
  const Config c = Config::load(f.out);
  const int64_t ranks = c.vocab_size - Tokenizer::kSpecials;
  if (ranks >= 256) {
    Tokenizer(vocabulary(ranks)).save(f.out);
    if (!c.nested()) write_file(f.out + "/tokenizer_config.json", kimi_linear_specials(int32_t(ranks)));
  }
  fmt::print("{} tensors, {} bytes in {} shards{}, {:.1f} s ({:.2f} GB/s)\n", made.tensors, made.bytes, made.shards,
             f.options.headers_only ? " (headers only)" : "", seconds, f.options.headers_only ? 0.0 : double(made.bytes) * 1e-9 / seconds);
  if (ranks < 256)
    fmt::print("no tokenizer: a vocabulary of {} has no room for 256 bytes and {} specials\n", c.vocab_size, int(Tokenizer::kSpecials));
}

}  // namespace

void add_fabricate(CLI::App& app) {
  CLI::App* c = app.add_subcommand("fabricate", "write a random snapshot in exactly the published layout");
  c->footer("Example:\n  k3 fabricate configs/k3.json --out k3-cut --layers 4 --experts 32");
  auto f = std::make_shared<FabricateFlags>();
  c->add_option("config", f->config, "config.json, or a folder that holds one")->required();
  c->add_option("--out", f->out, "new folder")->required();
  c->add_option("--layers", f->options.layers, "only the first so many layers")->check(CLI::Range(1, 4096));
  c->add_option("--experts", f->options.experts, "only so many experts a layer")->check(CLI::Range(1, 1 << 16));
  c->add_option("--experts-as", f->options.experts_as, "write the routed experts as bf16 or mxfp4, whatever the config says")
      ->check(CLI::IsMember({"bf16", "mxfp4"}));
  c->add_flag("--headers-only", f->options.headers_only, "headers, and files of the right size with nothing in them: takes no space");
  c->add_option("--seed", f->options.seed, "the same seed writes the same bytes")->capture_default_str();
  c->callback([f] { run(*f); });
}

}  // namespace k3

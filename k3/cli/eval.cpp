#include <fmt/core.h>
#include <unistd.h>

#include <filesystem>
#include <optional>

#include "k3/cli/commands.h"
#include "k3/cli/load_flags.h"
#include "k3/cli/open.h"
#include "k3/cli/status_line.h"
#include "k3/core/error.h"
#include "k3/train/eval.h"
#include "k3/train/run.h"

namespace k3 {

namespace {

namespace fs = std::filesystem;

struct EvalFlags {
  std::string model, separator;
  std::vector<std::string> data;
  bool held_out = false, has_separator = false;
  int64_t sequence_length = 0, tokens_at_once = 4096;
  LoadOptions load;
  MemoryFlags memory;
};

// The token file of the data, below the temporary folder only as long as it takes to open it.
TokenFile tokenise(const std::vector<std::string>& data, const std::string& separator, const Tokenizer& tokenizer) {
  const std::string path = fs::temp_directory_path() / fmt::format("k3-eval-{}.tokens", getpid());
  struct Remove {
    const std::string& path;
    ~Remove() { unlink(path.c_str()); }
  } remove{path};
  write_token_file(path, list_sources(data), separator, tokenizer);
  return TokenFile(path);
}

void run(const EvalFlags& f) {
  const std::string folder = resolve_snapshot(f.model);
  const std::optional<Training> training = Training::read(folder);
  Config config = Config::load(folder);
  config.finish();
  const Tokenizer tokenizer = Tokenizer::load(folder);
  const std::string separator = f.has_separator || !training ? f.separator : training->options.document_separator;
  const std::string own = (fs::path(folder) / ".." / "tokens.bin").lexically_normal().string();
  K3_CHECK(!f.data.empty() || (training && fs::exists(own)), "[eval] no data given; name files or folders with --data");
  TokenFile file = f.data.empty() ? TokenFile(own) : tokenise(f.data, separator, tokenizer);
  file.check_tokenizer(tokenizer);
  std::vector<int64_t> documents;
  if (f.held_out || f.data.empty()) {
    K3_CHECK(training, "[eval] {} does not say what was held out (it has no training.json); leave out --held-out", folder);
    documents = split_documents(file, training->options.held_out).held_out;
    K3_CHECK(!documents.empty(), "[eval] none of the {} documents is held out", file.documents());
  } else {
    for (int64_t d = 0; d < file.documents(); ++d) documents.push_back(d);
  }
  EvalOptions options{.sequence_length = f.sequence_length ? f.sequence_length
                                         : training        ? training->options.sequence_length
                                                           : 2048,
                      .tokens_at_once = f.tokens_at_once};
  OpenedModel opened(folder, config,
                     {.budget = f.memory.budget,
                      .context = std::max(options.tokens_at_once, options.sequence_length),
                      .at_once = std::max(options.tokens_at_once, options.sequence_length),
                      .loss = true,
                      .trust_scales = f.memory.trust_scales},
                     f.load);
  StatusLine status;
  const Evaluation e = evaluate(opened.model(), file, documents, tokenizer, options, status.of(folder, Progress::tokens));
  status.clear();
  fmt::print("{} | loss {:.6f} nats a token | {:.6f} bits per byte | {} tokens for {} bytes in {} documents, pieces of at most {} tokens\n", folder,
             e.loss, e.bits_per_byte, e.tokens, e.bytes, documents.size(), options.sequence_length);
  opened.print_peak();
}

}  // namespace

void add_eval(CLI::App& app) {
  CLI::App* c = app.add_subcommand("eval", "loss and bits per byte of a model on text");
  c->footer("Examples:\n  k3 eval runs/demo --data book.txt\n  k3 eval runs/demo            the documents that the run held out");
  auto f = std::make_shared<EvalFlags>();
  c->add_option("model", f->model, "snapshot folder, or what k3 train wrote")->required();
  c->add_option("--data", f->data, "files and folders; left out, what the run itself held out");
  c->add_flag("--held-out", f->held_out, "of --data only the documents that training on them would hold out");
  auto* separator = c->add_option("--separator", f->separator, "a line that ends a document (default: as in training, or none)");
  c->add_option("--sequence-length", f->sequence_length, "longest piece in tokens (default: as in training, or 2048)")->check(CLI::PositiveNumber);
  c->add_option("--tokens-at-once", f->tokens_at_once, "bounds memory; results are the same")->check(CLI::PositiveNumber)->capture_default_str();
  add_device(c, f->load);
  add_dense(*c, f->load);
  add_memory_flags(c, f->memory);
  c->callback([f, separator] {
    f->has_separator = separator->count() > 0;
    run(*f);
  });
}

}  // namespace k3

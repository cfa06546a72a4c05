// k3 tokenize: what a text becomes.
#include <cstdio>
#include <iostream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "k3/cli/commands.h"
#include "k3/core/error.h"
#include "k3/core/file.h"
#include "k3/model/checkpoint.h"
#include "k3/tokenizer/pieces.h"
#include "k3/tokenizer/tokenizer.h"

namespace k3 {
namespace {

struct Options {
  std::string model, text, file, decode;
  bool has_text = false, ids = false, pieces = false, has_decode = false;
};

std::vector<int32_t> parse_ids(const std::string& list) {
  std::vector<int32_t> ids;
  for (size_t at = 0; (at = list.find_first_not_of(" ,\n\t[]", at)) != list.npos;) {
    const size_t end = std::min(list.find_first_of(" ,\n\t[]", at), list.size());
    const std::string word = list.substr(at, end - at);
    size_t used = 0;
    long long id = -1;
    try {
      id = std::stoll(word, &used);
    } catch (const std::exception&) {}
    K3_CHECK(used == word.size() && id >= 0 && id <= INT32_MAX, "[tokenize] --decode takes ids, and {} is none", word);
    ids.push_back(int32_t(id));
    at = end;
  }
  return ids;
}

void show_pieces(const Tokenizer& tokenizer, std::string_view text) {
  for (Pieces p(text); p.next();) {
    std::string labels, ids;
    for (const int32_t id : tokenizer.encode(p.piece())) {
      labels += (labels.empty() ? "" : "|") + tokenizer.label(id);
      ids += (ids.empty() ? "" : " ") + std::to_string(id);
    }
    fmt::print("{}\t{}\n", labels, ids);
  }
}

// A folder with tokenizer files, or what k3 train wrote.
std::string folder_of(const std::string& model) { return std::filesystem::exists(model + "/tiktoken.model") ? model : resolve_snapshot(model); }

void tokenize(const Options& o) {
  const Tokenizer tokenizer = o.model == "bytes" ? Tokenizer::bytes() : Tokenizer::load(folder_of(o.model));
  if (o.has_decode) {
    const std::string text = tokenizer.decode(parse_ids(o.decode), true);
    std::fwrite(text.data(), 1, text.size(), stdout);
    fmt::print("\n");
    return;
  }
  std::string text = o.text;
  if (!o.file.empty())
    text = read_file(o.file);
  else if (!o.has_text)
    text.assign(std::istreambuf_iterator<char>(std::cin), {});
  if (o.pieces) return show_pieces(tokenizer, text);
  const std::vector<int32_t> ids = tokenizer.encode(text);
  if (o.ids) {
    std::string line;
    for (const int32_t id : ids) line += std::to_string(id) + ' ';
    if (!line.empty()) line.back() = '\n';
    std::fwrite(line.data(), 1, line.size(), stdout);
  } else {
    fmt::print("{} tokens, {} bytes, {:.2f} bytes per token; vocabulary {}, hash {:016x}\n", ids.size(), text.size(),
               ids.empty() ? 0.0 : double(text.size()) / double(ids.size()), tokenizer.vocabulary(), tokenizer.hash());
  }
}

}  // namespace

void add_tokenize(CLI::App& app) {
  auto o = std::make_shared<Options>();
  CLI::App* c = app.add_subcommand("tokenize", "show what a text becomes: tokens, ids, pieces");
  c->add_option("model", o->model, "Folder with tiktoken.model and tokenizer_config.json, what k3 train wrote, or the word bytes")->required();
  CLI::Option* text = c->add_option("--text", o->text, "The text; without --text and --file it is read from standard input");
  CLI::Option* file = c->add_option("--file", o->file, "A file with the text")->excludes(text);
  CLI::Option* ids = c->add_flag("--ids", o->ids, "Print the ids");
  CLI::Option* pieces =
      c->add_flag("--pieces", o->pieces, "Print a line for each piece that the text is cut into: its tokens and their ids")->excludes(ids);
  CLI::Option* decode = c->add_option("--decode", o->decode, "Print the text of these ids, specials included");
  for (CLI::Option* other : {text, file, ids, pieces}) decode->excludes(other);
  c->callback([o, text, decode] {
    o->has_text = text->count() > 0;
    o->has_decode = decode->count() > 0;
    tokenize(*o);
  });
}

}  // namespace k3

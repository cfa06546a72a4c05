#include <fmt/core.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <iostream>
#include <optional>

#include "k3/cli/commands.h"
#include "k3/cli/load_flags.h"
#include "k3/cli/open.h"
#include "k3/cli/status_line.h"
#include "k3/core/error.h"
#include "k3/core/nearest.h"
#include "k3/infer/chat_session.h"
#include "k3/tokenizer/stop_ids.h"

namespace k3 {

namespace {

// Ctrl-C: during an answer it ends the answer; at the prompt it says how to leave.
std::atomic<bool> answering{false}, stop_wanted{false};
void on_interrupt(int) {
  if (answering) {
    stop_wanted = true;
    return;
  }
  constexpr char hint[] = "\n(/quit or Ctrl-D leaves)\n> ";
  [[maybe_unused]] ssize_t n = ::write(STDERR_FILENO, hint, sizeof hint - 1);
}

constexpr char kHelp[] =
    "/regenerate      the last answer again, with another seed\n"
    "/edit TEXT       TEXT in place of the last question; only that turn is read again\n"
    "/reset           forget the conversation\n"
    "/help            this list\n"
    "/quit            leave (also Ctrl-D)\n"
    "Ctrl-C           ends the answer, not the program\n"
    "//TEXT           a message that begins with /\n";

struct ChatFlags {
  std::string model, thinking = "on";
  int64_t context = 0;  // 0: as much as there is good room for
  ChatSettings settings{.generate = {.sample = {.temperature = 1.0f, .top_p = 0.95f}, .max_tokens = 4096}};
  bool fast = false, has_system = false, wants_thought = false;
  LoadOptions load;
  MemoryFlags memory;
  PartsReport parts;
};

// What an answer says, as it comes: thoughts dimmed on a terminal and left out of a pipe, which holds answers alone.
class Screen {
 public:
  Screen() : terminal_(isatty(STDOUT_FILENO)) {}
  bool show(const Reply& delta) {
    if (!delta.reasoning.empty() && terminal_) put("\033[2m" + delta.reasoning + "\033[0m"), thought_ = true;
    if (!delta.content.empty()) {
      if (thought_) put("\n\n"), thought_ = false;
      put(delta.content);
    }
    for (const ReplyCall& c : delta.calls) put((c.name.empty() ? "" : "\n" + c.name + " ") + c.arguments);
    return !stop_wanted;
  }
  void end() { put("\n"), thought_ = false; }

 private:
  static void put(const std::string& text) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
  }
  bool terminal_, thought_ = false;
};

// Long conversations in the exact form where there is room for them; then with absorbed attention, whose cache is an order of magnitude smaller.
std::vector<MemoryRequest> wishes(const ChatFlags& f) {
  const std::vector<int64_t> contexts = f.context ? std::vector<int64_t>{f.context} : std::vector<int64_t>{8192, 4096, 2048, 1024};
  std::vector<MemoryRequest> all;
  for (bool deterministic : {true, false})
    for (int64_t context : contexts)
      if (!deterministic || (!f.fast && (f.context || context >= 4096)))
        all.push_back({.budget = f.memory.budget,
                       .marks = 1,
                       .context = context,
                       .at_once = f.settings.session.prefill_chunk,
                       .deterministic = deterministic,
                       .trust_scales = f.memory.trust_scales});
  return all;
}

void print_speed(const ChatTurn& t, int64_t context, const char* how, const std::string& experts) {
  auto rate = [](double n, double seconds) { return seconds > 0 ? n / seconds : 0.0; };
  const Generated& g = t.generated;
  fmt::print(stderr, "[read {} of {} tokens, {:.1f} tokens/s; wrote {}, {:.1f} tokens/s{}{}{}]\n", g.prompt_tokens, t.context,
             rate(double(g.prompt_tokens), g.prefill_seconds), g.ids.size(), rate(double(g.ids.size()), g.decode_seconds), how,
             t.interrupted                                                 ? "; stopped by you"
             : g.finish != "length"                                        ? ""
             : context > 0 && t.context + int64_t(g.ids.size()) >= context ? fmt::format("; the context of {} tokens is full", context)
                                                                           : "; stopped by --max-tokens",
             experts);
}

void run(ChatFlags& f) {
  check(f.settings.generate.sample);  // before anything is loaded
  const std::string folder = resolve_snapshot(f.model);
  Config config = Config::load(folder);
  config.finish();
  const Tokenizer tokenizer = Tokenizer::load(folder);  // before the weights: its faults are found at once
  K3_CHECK(tokenizer.vocabulary() <= config.vocab_size, "[chat] the tokenizer has {} ids but the model only {}", tokenizer.vocabulary(),
           config.vocab_size);
  const ChatFormat format = chat_format(tokenizer);
  K3_CHECK(format == ChatFormat::xtml || !f.wants_thought,
           "[chat] --thinking and --effort are Kimi-K3's; {} has Kimi-Linear's format, so leave them out", folder);
  for (const StopId& s : stop_ids(folder, tokenizer)) f.settings.generate.stop_ids.push_back(s.id);
  if (!f.has_system && format == ChatFormat::kimi_linear) f.settings.system = "You are a helpful assistant provided by Moonshot-AI.";
  f.settings.chat.thinking = f.thinking == "on" && format == ChatFormat::xtml;

  OpenedModel opened(folder, config, wishes(f), f.load);
  const bool planned = f.load.device == Device::cpu;  // elsewhere memory is not
  f.settings.session.deterministic = opened.request().deterministic;
  if (planned) f.settings.context = opened.request().context;
  f.parts.listen(f.settings.session);
  ChatSession chat(opened.model(), tokenizer, f.settings);

  struct sigaction action {};
  action.sa_handler = on_interrupt;
  action.sa_flags = SA_RESTART;
  sigaction(SIGINT, &action, nullptr);

  const bool asks = isatty(STDIN_FILENO);
  if (asks)
    fmt::print(stderr, "{} layers, {} format; /help lists the commands\n", config.num_hidden_layers,
               format == ChatFormat::xtml ? "K3" : "Kimi-Linear");
  Screen screen;
  std::optional<StatusLine> status;
  std::function<void(uint64_t, uint64_t)> reading;
  auto on_delta = [&](const Reply& delta) { return screen.show(delta); };
  auto on_read = [&](int64_t done, int64_t total) {
    reading(uint64_t(done), uint64_t(total));
    if (done == total) status->clear(), f.parts.begin();
    return !stop_wanted;
  };
  auto answered = [&](auto ask) {
    stop_wanted = false, answering = true;
    status.emplace(), reading = status->of("reading", Progress::tokens);
    const ChatTurn t = ask();
    answering = false;
    screen.end();
    print_speed(t, f.settings.context, chat.session().how(), opened.report(t.generated.prefill_seconds + t.generated.decode_seconds));
    f.parts.print();
  };
  auto next = [&](std::string& line) {
    if (asks) fmt::print(stderr, "> ");
    return bool(std::getline(std::cin, line));
  };
  for (std::string line; next(line);) {
    const std::string word = line.substr(0, line.find(' ')), rest = line.size() > word.size() ? line.substr(word.size() + 1) : "";
    try {
      if (line.empty()) continue;
      if (line[0] != '/' || line.starts_with("//"))
        answered([&] { return chat.ask(line[0] == '/' ? line.substr(1) : line, on_delta, on_read); });
      else if (word == "/quit")
        break;
      else if (word == "/help")
        fmt::print(stderr, "{}", kHelp);
      else if (word == "/reset")
        chat.reset();
      else if (word == "/regenerate")
        answered([&] { return chat.regenerate(on_delta, on_read); });
      else if (word == "/edit" && !rest.empty())
        answered([&] { return chat.edit(rest, on_delta, on_read); });
      else
        fail("[chat] {}", word == "/edit" ? "/edit needs the text that takes the question's place: /edit TEXT"
                                          : fmt::format("there is no {}; the nearest is {} (/help lists all)", word,
                                                        nearest(word, {"/quit", "/help", "/reset", "/regenerate", "/edit"})));
    } catch (const Error& e) {
      answering = false;
      if (!asks) throw;
      fmt::print(stderr, "{}\n", e.what());
    }
  }
  if (asks) fmt::print(stderr, "\n");
  opened.print_peak();
}

}  // namespace

void add_chat(CLI::App& app) {
  CLI::App* c = app.add_subcommand("chat", "talk with a model");
  c->footer("Example:\n  k3 chat Kimi-Linear-48B-A3B-Instruct\n  echo \"What is a state?\" | k3 chat k3 --thinking off --temperature 0");
  auto f = std::make_shared<ChatFlags>();
  c->add_option("model", f->model, "snapshot folder, or what k3 train wrote")->required();
  auto* system = c->add_option("--system", f->settings.system, "said to the model before the first message");
  auto* thinking =
      c->add_option("--thinking", f->thinking, "K3: the model thinks before it answers")->check(CLI::IsMember({"on", "off"}))->capture_default_str();
  auto* effort = c->add_option("--effort", f->settings.chat.effort, "K3: how much it thinks")
                     ->check(CLI::IsMember({"low", "high", "max"}))
                     ->capture_default_str();
  c->add_option("--max-tokens", f->settings.generate.max_tokens, "of an answer, thoughts included")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  c->add_option("--temperature", f->settings.generate.sample.temperature, "0: always the most probable token")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  c->add_option("--top-p", f->settings.generate.sample.top_p, "draw from the most probable that make up this share")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  c->add_option("--seed", f->settings.generate.sample.seed, "the same seed gives the same answers")->capture_default_str();
  add_prefill_chunk(*c, f->settings.session.prefill_chunk, f->load);
  add_dense(*c, f->load);
  add_device(c, f->load);
  c->add_flag("--fast", f->fast, "absorbed attention in decode: a smaller cache, results equal to rounding in place of to the bit");
  c->add_option("--context", f->context, "the most tokens of a conversation, which memory is planned for (8192, or fewer where they do not fit)")
      ->check(CLI::PositiveNumber);
  add_memory_flags(c, f->memory);
  f->parts.add_flag(c);
  c->callback([f, system, thinking, effort] {
    f->has_system = system->count() > 0, f->wants_thought = thinking->count() + effort->count() > 0;
    run(*f);
  });
}

}  // namespace k3

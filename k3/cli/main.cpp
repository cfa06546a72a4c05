// k3: train, run and plan language models of the Kimi K3 family.
#include <fmt/core.h>
#include <unistd.h>

#include <cstdlib>
#include <new>

#include "k3/cli/commands.h"
#include "k3/core/error.h"
#include "k3/core/file.h"
#include "k3/core/gpu.h"
#include "k3/core/isa.h"
#include "k3/core/nearest.h"
#include "k3/core/threads.h"

namespace {

// CLI11 lists what it doesn't know; say what was probably meant.
std::string with_suggestion(const CLI::App& app, const CLI::ParseError& e, int argc, char** argv) {
  std::vector<std::string> known;
  for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (argc > 1 && sub->get_name() == argv[1]) {
      known.clear();
      int at = 2;
      for (const CLI::App* next = sub; next && at <= argc; ++at) {  // k3 lab run
        sub = next, next = nullptr;
        for (const CLI::App* below : sub->get_subcommands([](const CLI::App*) { return true; }))
          if (at < argc && below->get_name() == argv[at]) next = below;
      }
      for (const CLI::Option* o : app.get_options())
        for (const std::string& n : o->get_lnames()) known.push_back("--" + n);
      for (const CLI::Option* o : sub->get_options())
        for (const std::string& n : o->get_lnames()) known.push_back("--" + n);
      for (int i = at - 1; i < argc; ++i) {
        std::string word = std::string(argv[i]).substr(0, std::string(argv[i]).find('='));
        if (word.starts_with("--") && std::find(known.begin(), known.end(), word) == known.end())
          return fmt::format("unknown flag {}; the nearest known one is {}", word, k3::nearest(word, known));
      }
      const std::string text = e.what();
      const size_t range = text.find(" not in range "), largest = text.find("17976931");  // the largest double, spelled out
      return range < largest && largest != text.npos ? text.substr(0, range) + " is not a number that is allowed here" : text;
    }
    known.push_back(sub->get_name());
  }
  if (argc > 1 && argv[1][0] != '-') return fmt::format("unknown command '{}'; the nearest known one is '{}'", argv[1], k3::nearest(argv[1], known));
  return e.what();
}

// OpenMP reads when it is loaded how long a waiting thread spins before it sleeps. Its own choice, milliseconds, is ruinous as soon as another
// program wants the core (docs/log.md), so the program starts itself once more with a short one, unless the user chose.
void start_with_short_spins(char** argv) {
  if (std::getenv("GOMP_SPINCOUNT") || std::getenv("OMP_WAIT_POLICY")) return;
  setenv("GOMP_SPINCOUNT", "1000", 1);
  execv("/proc/self/exe", argv);  // where there is no such file: as it was
}

}  // namespace

void k3::add_device(CLI::App* command, Device& device, bool& bf16) {
  auto* option = command
                     ->add_option_function<std::string>(
                         "--device",
                         [&device](const std::string& name) {
                           device = name == "cuda" ? Device::cuda : Device::cpu;
                           if (device == Device::cuda) gpu::require();
                         },
                         "where to compute: cpu or cuda")
                     ->check(CLI::IsMember({"cpu", "cuda"}))
                     ->default_str("cpu");
  command->add_flag("--bf16", bf16, "with --device cuda: matrix products in bfloat16 on the tensor cores; sums and all else stay float32")
      ->needs(option);
}

int main(int argc, char** argv) {
  start_with_short_spins(argv);
  k3::explain_lost_pages();
  CLI::App app{"k3: train, run and plan language models of the Kimi K3 family"};
  app.require_subcommand(1);
  app.set_version_flag("--version", "k3 0.1");
  int threads = 0;
  std::string isa;
  app.add_option("--threads", threads, "threads to use (results are the same at any number)")->check(CLI::Range(1, 1024));
  app.add_option("--isa", isa, "force an instruction set")->check(CLI::IsMember({"plain", "avx2", "avx512"}));
  app.fallthrough();
  app.parse_complete_callback([&] {
    if (threads) k3::set_thread_count(threads);
    if (!isa.empty()) k3::cpu::force_isa(isa == "plain" ? k3::cpu::Isa::plain : isa == "avx2" ? k3::cpu::Isa::avx2 : k3::cpu::Isa::avx512);
  });
  k3::add_train(app), k3::add_generate(app), k3::add_eval(app), k3::add_inspect(app), k3::add_verify(app), k3::add_tokenize(app), k3::add_plan(app);
  k3::add_fabricate(app), k3::add_chat(app), k3::add_lab(app), k3::add_bench(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& e) {  // --help, --version
    return app.exit(e);
  } catch (const CLI::ParseError& e) {
    fmt::print(stderr, "k3: {} (see k3 {}--help)\n", with_suggestion(app, e, argc, argv),
               argc > 1 && argv[1][0] != '-' ? std::string(argv[1]) + " " : "");
    return 2;
  } catch (const k3::Error& e) {
    fmt::print(stderr, "k3: {}\n", e.what());
    return 1;
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "k3: out of memory; use a smaller model, batch or context\n");
    return 1;
  } catch (const std::exception& e) {
    fmt::print(stderr, "k3: {}\n", e.what());
    return 1;
  }
  if (std::fflush(stdout) != 0 || std::ferror(stdout)) {
    fmt::print(stderr, "k3: standard output could not be written in full; free some space or write elsewhere\n");
    return 1;
  }
  return 0;
}

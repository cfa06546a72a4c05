// k3 bench decode: a token's time and bytes by part of the model, beside a plain read of memory; and prefill beside oneDNN's bfloat16 product.
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <oneapi/dnnl/dnnl.hpp>

#include "k3/cli/bench.h"
#include "k3/cli/load_flags.h"
#include "k3/cli/open.h"
#include "k3/core/error.h"
#include "k3/core/file.h"
#include "k3/core/isa.h"
#include "k3/core/plain_read.h"
#include "k3/core/progress.h"
#include "k3/core/rng.h"
#include "k3/core/threads.h"
#include "k3/infer/session.h"
#include "k3/infer/step_clock.h"
#include "k3/model/fabricate.h"

namespace k3 {

namespace {

namespace fs = std::filesystem;

struct DecodeFlags {
  std::string model, config, svg;
  FabricateOptions fabricated;
  int64_t tokens = 64, context = 512;
  bool fast = false, json = false;
  LoadOptions load;
  MemoryFlags memory;
  std::vector<int64_t> rows;
};

template <class F>
double seconds(F f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// A snapshot of our own in the folder for temporary files, gone when this is.
class Temporary {
 public:
  Temporary(const std::string& config, FabricateOptions options) : path_(fs::temp_directory_path() / fmt::format("k3-bench-{}", getpid())) {
    const uint64_t room = std::min(fs::space(fs::temp_directory_path()).available, available_memory() / 4 * 3);
    if (options.layers == 0) options.layers = layers_in(room, config, options);
    const uint64_t bytes = bytes_of(config, options);
    K3_CHECK(bytes <= room, "[bench] {} layers of {} are {}, but there is room for {} (three quarters of the free memory, and the disk of {})",
             options.layers, config, size_text(double(bytes)), size_text(double(room)), fs::temp_directory_path().string());
    fmt::print(stderr, "fabricating {} layers, {}\n", options.layers, size_text(double(bytes)));
    try {
      fabricate(config, path_, options);
    } catch (...) {
      fs::remove_all(path_);
      throw;
    }
  }
  ~Temporary() { remove(); }
  Temporary(const Temporary&) = delete;
  Temporary& operator=(const Temporary&) = delete;
  std::string path() const { return path_; }
  void remove() {  // what is mapped stays readable
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }

 private:
  static uint64_t bytes_of(const std::string& config, const FabricateOptions& options) {
    uint64_t bytes = 0;
    for (const LayoutShard& s : published_layout(fabricated_config(config, options), false))
      for (const LayoutTensor& t : s.tensors) bytes += t.bytes();
    return bytes;
  }
  static int64_t layers_in(uint64_t room, const std::string& config, FabricateOptions options) {
    const int64_t all = fabricated_config(config, options).num_hidden_layers;
    for (options.layers = 1; options.layers < all; ++options.layers) {
      FabricateOptions more = options;
      if (++more.layers; bytes_of(config, more) > room) break;
    }
    return options.layers;
  }
  std::string path_;
};

// oneDNN's bfloat16 product x W^T with float32 results and its weights in the layout that it likes best: FLOPs a second.
double onednn_bf16(int64_t m, int64_t n, int64_t k) {
  using dnnl::memory;
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  const auto bf16 = memory::data_type::bf16;
  dnnl::matmul::desc shapes(memory::desc({m, k}, bf16, memory::format_tag::ab), memory::desc({k, n}, bf16, memory::format_tag::any),
                            memory::desc({m, n}, memory::data_type::f32, memory::format_tag::ab));
  dnnl::matmul::primitive_desc d(shapes, engine);
  dnnl::matmul product(d);
  memory x(d.src_desc(), engine), w(d.weights_desc(), engine), y(d.dst_desc(), engine);
  for (memory* t : {&x, &w}) std::memset(t->get_data_handle(), 0x3c, t->get_desc().get_size());
  std::vector<double> times;
  for (int i = 0; i < 9; ++i)
    times.push_back(seconds([&] {
      product.execute(stream, {{DNNL_ARG_SRC, x}, {DNNL_ARG_WEIGHTS, w}, {DNNL_ARG_DST, y}});
      stream.wait();
    }));
  return 2.0 * double(m) * double(n) * double(k) / median(times);
}

struct DecodeResult {
  std::string what;
  StepClock decode;
  int64_t tokens, context;
  double plain_read, prefill, dense_rate, peer_rate;
  std::string peer;
};

nlohmann::ordered_json to_json(const DecodeResult& r) {
  nlohmann::ordered_json parts;
  auto part = [&](const PartTime& p) {
    return nlohmann::ordered_json{{"seconds_a_token", p.seconds / double(r.tokens)},
                                  {"bytes_a_token", p.held / double(r.tokens)},
                                  {"bytes_a_second", p.bytes_a_second()},
                                  {"share_of_plain_read", p.bytes_a_second() / r.plain_read}};
  };
  for (const PartTime& p : r.decode.parts()) parts[std::string(p.name)] = part(p);
  const PartTime all = r.decode.total();
  parts["together"] = part(all);
  return {{"model", r.what},
          {"threads", thread_count()},
          {"isa", cpu::name_of(cpu::isa())},
          {"plain_read_bytes_a_second", r.plain_read},
          {"decode", {{"tokens", r.tokens}, {"context", r.context}, {"tokens_a_second", double(r.tokens) / all.seconds}, {"parts", parts}}},
          {"prefill",
           {{"tokens", r.context},
            {"tokens_a_second", r.prefill},
            {"dense_flops_a_second", r.dense_rate},
            {"onednn_bf16_flops_a_second", r.peer_rate},
            {"share", r.dense_rate / r.peer_rate}}}};
}

// A token as a row of blocks: as wide as its part takes time, as high as it reads bytes a second, so the area is what it reads.
std::string picture(const DecodeResult& r) {
  constexpr double kLeft = 60, kWidth = 820, kTop = 64, kHeight = 300;
  static constexpr const char* kColours[] = {"#3566a8", "#c2642d", "#4d8f5b", "#7a5aa6", "#8a8a8a"};
  const PartTime all = r.decode.total();
  const double ms = all.seconds * 1e3 / double(r.tokens), base = kTop + kHeight;
  double tallest = r.plain_read;  // small parts may come from the cache
  for (const PartTime& p : r.decode.parts()) tallest = std::max(tallest, std::min(p.bytes_a_second(), 1.3 * r.plain_read));
  auto y = [&](double rate) { return base - kHeight * std::min(rate, tallest) / tallest; };
  std::string s = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 900 470\" font-family=\"sans-serif\" font-size=\"13\">\n"
      "<rect width=\"900\" height=\"470\" fill=\"white\"/>\n<text x=\"{}\" y=\"24\" font-size=\"16\">{}</text>\n"
      "<text x=\"{}\" y=\"44\" fill=\"#555\">a token of decode: {:.2f} ms, {:.1f} MB; width is time, height is GB/s, area is bytes</text>\n",
      kLeft, r.what, kLeft, ms, all.held * 1e-6 / double(r.tokens));
  double x = kLeft, legend = kLeft;
  for (size_t i = 0; i < r.decode.parts().size(); ++i) {
    const PartTime& p = r.decode.parts()[i];
    if (p.seconds <= 0) continue;
    const double width = kWidth * p.seconds / all.seconds, top = y(p.bytes_a_second());
    s += fmt::format("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"{}\"/>\n", x, top, width, base - top, kColours[i]);
    s += fmt::format(
        "<rect x=\"{:.1f}\" y=\"{}\" width=\"12\" height=\"12\" fill=\"{}\"/><text x=\"{:.1f}\" y=\"{}\">{}</text>"
        "<text x=\"{:.1f}\" y=\"{}\" fill=\"#555\">{:.2f} ms, {:.1f} MB</text><text x=\"{:.1f}\" y=\"{}\" fill=\"#555\">{:.1f} GB/s, {:.0f} "
        "%</text>\n",
        legend, base + 36, kColours[i], legend + 18, base + 47, p.name, legend + 18, base + 65, p.seconds * 1e3 / double(r.tokens),
        p.held * 1e-6 / double(r.tokens), legend + 18, base + 83, p.bytes_a_second() * 1e-9, 100 * p.bytes_a_second() / r.plain_read);
    x += width, legend += 168;
  }
  s += fmt::format(
      "<line x1=\"{0}\" x2=\"{1}\" y1=\"{2:.1f}\" y2=\"{2:.1f}\" stroke=\"black\" stroke-dasharray=\"5 4\"/>"
      "<text x=\"{1}\" y=\"{3:.1f}\" text-anchor=\"end\">plain read {4:.1f} GB/s</text>\n",
      kLeft, kLeft + kWidth, y(r.plain_read), y(r.plain_read) - 5, r.plain_read * 1e-9);
  s += fmt::format("<line x1=\"{0}\" x2=\"{1}\" y1=\"{2}\" y2=\"{2}\" stroke=\"black\"/>\n", kLeft, kLeft + kWidth, base);
  for (int i = 0; i <= 4; ++i)
    s += fmt::format("<text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\" fill=\"#555\">{:.0f}</text>\n", kLeft - 6, y(r.plain_read * i / 4) + 4,
                     r.plain_read * i / 4e9);
  return s + "</svg>\n";
}

void run(const DecodeFlags& f) {
  K3_CHECK(f.model.empty() != f.config.empty(), "[bench] name a snapshot's folder, or a config with --config FILE to make one of random weights");
  const bool gpu = f.load.device == Device::cuda;
  K3_CHECK(!f.load.bf16_products || gpu, "[bench] --bf16 is for --device cuda");
  K3_CHECK(f.rows.empty() || gpu, "[bench] --rows is for --device cuda: on the CPU one sequence is timed");
  K3_CHECK(!gpu || (f.svg.empty() && !f.fast),
           "[bench] --svg and --fast are for the CPU: on the GPU a step is timed as a whole, in its fastest form");
  std::unique_ptr<AtomicFile> drawing;  // a place that cannot be written to is found before a minute of work
  if (!f.svg.empty()) drawing = std::make_unique<AtomicFile>(f.svg);
  std::unique_ptr<Temporary> temporary;
  if (!f.config.empty()) temporary = std::make_unique<Temporary>(f.config, f.fabricated);
  const std::string folder = temporary ? temporary->path() : resolve_snapshot(f.model);
  Config config = Config::load(folder);
  config.finish();
  OpenedModel opened(folder, config,
                     {.budget = f.memory.budget,
                      .context = f.context + f.tokens,
                      .at_once = f.context,
                      .deterministic = !f.fast,
                      .trust_scales = f.memory.trust_scales},
                     f.load);
  if (temporary) temporary->remove();
  if (f.load.device == Device::cuda) {
    GpuDecodeFlags g{.context = f.context, .steps = f.tokens, .json = f.json};
    if (!f.rows.empty()) g.rows = f.rows;
    return bench_decode_on_gpu(opened.model(), f.config.empty() ? f.model : f.config, g);
  }

  DecodeResult r{.tokens = f.tokens, .context = f.context};
  r.what = fmt::format("{}, {} layers, hidden {}{}, {} threads", f.config.empty() ? f.model : f.config, config.num_hidden_layers, config.hidden_size,
                       config.quantization.empty() ? "" : ", experts in MXFP4", thread_count());
  StepClock clock;
  Session session(opened.model(), {.prefill_chunk = f.context, .deterministic = !f.fast, .listen = clock.listener()});
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < f.context + f.tokens; ++i) ids.push_back(int32_t(Rng{1, 1}.below(uint64_t(config.vocab_size), uint64_t(i))));
  const std::span<const int32_t> prompt(ids.data(), size_t(f.context));

  session.read(prompt);  // the first use of everything
  session.reset();
  clock.clear();
  session.read(prompt);
  const PartTime prefill = clock.total();
  const int64_t n = config.kda_num_heads * config.kda_head_dim;
  r.prefill = double(f.context) / prefill.seconds, r.dense_rate = prefill.dense_flops / prefill.dense_seconds;
  r.peer_rate = onednn_bf16(f.context, n, config.hidden_size), r.peer = fmt::format("{} x {} x {}", f.context, n, config.hidden_size);

  PlainRead plain(uint64_t(512) << 20);
  plain.rate();
  std::vector<double> rates;
  clock.clear();
  for (int64_t i = 0; i < f.tokens; ++i) {
    if (i % std::max<int64_t>(1, f.tokens / 8) == 0) rates.push_back(plain.rate());  // between tokens: the same minutes of the same machine
    session.read({ids.data() + f.context + i, 1});
  }
  r.plain_read = median(rates), r.decode = clock;

  if (drawing) drawing->write(picture(r)), drawing->commit();
  if (f.json) return fmt::print("{}\n", to_json(r).dump(2));
  fmt::print("{}, {}\n", r.what, cpu::name_of(cpu::isa()));
  const double all = r.decode.total().seconds;
  fmt::print("decode: {} tokens at {} of context, {:.2f} tokens/s; a plain read makes {:.1f} GB/s (from {:.1f} to {:.1f} between tokens)\n", f.tokens,
             f.context, double(f.tokens) / all, r.plain_read * 1e-9, *std::min_element(rates.begin(), rates.end()) * 1e-9,
             *std::max_element(rates.begin(), rates.end()) * 1e-9);
  fmt::print("{}", part_table(r.decode, r.plain_read));
  fmt::print("prefill: {} tokens at {:.1f} tokens/s; products with dense weights {:.0f} GFLOP/s, {:.0f} % of oneDNN's in bf16 ({:.0f} at {})\n",
             f.context, r.prefill, r.dense_rate * 1e-9, 100 * r.dense_rate / r.peer_rate, r.peer_rate * 1e-9, r.peer);
  if (std::string s = opened.report(all); !s.empty()) fmt::print("{}\n", s.substr(2));
  if (!f.svg.empty()) fmt::print("wrote {}\n", f.svg);
}

}  // namespace

void add_bench_decode(CLI::App& bench) {
  CLI::App* c = bench.add_subcommand("decode", "a token's time and bytes by part of the model, beside a plain read of memory");
  c->footer(
      "Examples:\n  k3 bench decode Kimi-Linear-48B-A3B-Instruct\n"
      "  k3 bench decode --config configs/kimi-linear-48b.json --experts-as mxfp4 --svg decode.svg\n"
      "  k3 bench decode --config configs/k3-0.4b.json --device cuda --bf16 --context 256");
  auto f = std::make_shared<DecodeFlags>();
  c->add_option("model", f->model, "snapshot folder");
  auto* config = c->add_option("--config", f->config, "in place of a snapshot: random weights for this config.json, as many layers as fit");
  c->add_option("--layers", f->fabricated.layers, "of --config, so many layers")->check(CLI::Range(1, 4096))->needs(config);
  c->add_option("--experts", f->fabricated.experts, "of --config, so many experts a layer")->check(CLI::Range(1, 1 << 16))->needs(config);
  c->add_option("--experts-as", f->fabricated.experts_as, "of --config, its experts as bf16 or mxfp4")
      ->check(CLI::IsMember({"bf16", "mxfp4"}))
      ->needs(config);
  c->add_option("--tokens", f->tokens, "tokens of decode to time")->check(CLI::Range(1, 1 << 20))->capture_default_str();
  c->add_option("--context", f->context, "tokens read before, at once: the prefill that is timed")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  c->add_flag("--fast", f->fast, "absorbed attention in decode");
  c->add_flag("--json", f->json, "print JSON");
  c->add_option("--svg", f->svg, "draw it: time, rate and bytes of each part");
  add_device(c, f->load);
  c->add_option("--rows", f->rows, "with --device cuda: numbers of sequences that decode together (1, 8 and 33)")->check(CLI::Range(1, 4096));
  add_dense(*c, f->load);
  add_memory_flags(c, f->memory);
  c->callback([f] { run(*f); });
}

}  // namespace k3

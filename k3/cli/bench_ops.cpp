// k3 bench ops: each operator through the model's own calls, forward and backward, beside what its FLOPs and bytes cannot take less than.
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <memory>
#include <nlohmann/json.hpp>

#include "k3/cli/bench.h"
#include "k3/cli/bench_ops.h"
#include "k3/cli/commands.h"
#include "k3/core/error.h"
#include "k3/core/file.h"
#include "k3/core/gpu.h"
#include "k3/core/rng.h"
#include "k3/core/threads.h"
#include "k3/ops/activation/activation.h"
#include "k3/ops/attention/attention.h"
#include "k3/ops/conv/conv.h"
#include "k3/ops/decay/decay.h"
#include "k3/ops/delta_rule/delta_rule.h"
#include "k3/ops/depth_mix/depth_mix.h"
#include "k3/ops/embedding/embedding.h"
#include "k3/ops/linear/linear.h"
#include "k3/ops/loss/loss.h"
#include "k3/ops/moe/moe.h"
#include "k3/ops/norm/norm.h"
#include "k3/ops/update/update.h"
#include "k3/plan/measure.h"
#include "k3/tape/tape.h"

namespace k3 {

double MachineRates::floor_us(const OpLine& l) const { return 1e6 * std::max(l.bytes / bytes, l.flops / (l.tensor_units ? tensor_flops : flops)); }
const char* MachineRates::bound(const OpLine& l) const {
  const double arithmetic = l.flops / (l.tensor_units ? tensor_flops : flops);
  return arithmetic < l.bytes / bytes ? "bytes" : l.tensor_units ? "tensor units" : "float32";
}

bool MachineRates::in_cache(const OpLine& l) const { return floor_us(l) > l.us && bound(l) == std::string_view("bytes"); }

bool OpTable::wants(std::string_view op) const { return op.find(only) != op.npos; }
void OpTable::add(const OpLine& l) {
  const double floor = rates.floor_us(l);
  fmt::print("{:<28} {:<52} {:>11.1f} {:>11.1f} {:>8}  {}{}\n", l.op, l.shape, l.us, floor,
             rates.in_cache(l) ? "in cache" : fmt::format("{:.0f} %", 100 * floor / l.us), rates.bound(l), l.note.empty() ? "" : "; " + l.note);
  std::fflush(stdout);
  lines.push_back(l);
}

namespace {

// Operators on one device in one precision of products. What a line needs lives until the line ends.
class Bench {
 public:
  Bench(OpTable& table, Device device, bool narrow) : table_(table), arena_(size_t(device == Device::cuda ? 96 : 8) << 30, device), narrow_(narrow) {
    c.device = device, c.arena = &arena_, c.bf16_products = narrow;
  }

  Tensor random(Shape s, double deviation = 1, double mean = 0) {
    const Rng rng{++seed_, 3};
    std::vector<float> some(size_t(std::min<int64_t>(s.size(), 1 << 16)));  // repeated: a product costs the same
    for (size_t i = 0; i < some.size(); ++i) some[i] = float(mean + deviation * rng.normal(i));
    Tensor t = arena_.lend(DType::f32, s);
    write(Tensor(t.data(), DType::f32, {int64_t(some.size())}, t.device()), some.data());
    for (int64_t have = int64_t(some.size()); have < t.size(); have *= 2)
      copy_values(Tensor(t.f32() + have, DType::f32, {std::min(have, t.size() - have)}, t.device()), t);
    return t;
  }
  Var input(Shape s, double deviation = 1, double mean = 0) {
    Var x(c, random(s, deviation, mean));
    x.grad();
    return x;
  }
  Param& weight(Shape s, double deviation = 0.03, double mean = 0) {
    Param& p = params_.emplace_back();
    p.value = random(s, deviation, mean), p.shape = s, p.grad = arena_.lend_zeroed(DType::f32, s);
    return p;
  }
  bool on_gpu() const { return c.device == Device::cuda; }
  bool wants(const std::string& op) const { return table_.wants(op); }

  // `forward` gives a Var: its time, and that of its backward.
  void both(const std::string& op, const std::string& shape, const std::function<Var()>& forward) {
    const size_t mark = arena_.mark();
    Cost costs[2];
    std::vector<double> times[2];
    Buffer dy;
    for (int run = -2; run < kRuns; ++run) {
      Tape tape;
      c.tape = &tape;
      Var y;
      c.on_cost = run == -2 ? count(costs[0]) : nullptr;
      const double f = seconds([&] { y = forward(); });
      if (run == -2) {
        dy = Buffer(y.value().bytes(), c.device);
        write(dy.view(DType::f32, y.value().shape()), std::vector<float>(size_t(y.size()), 0.01f).data());
      }
      copy_values(y.grad(), dy.view(DType::f32, y.value().shape()));
      c.on_cost = run == -2 ? count(costs[1]) : nullptr;
      const double b = seconds([&] { tape.run_backward(); });
      if (run >= 0) times[0].push_back(f), times[1].push_back(b);
      c.tape = nullptr;
      y = Var();
      arena_.rewind(mark);
    }
    c.on_cost = nullptr;
    add(op + " forward", shape, costs[0], times[0]), add(op + " backward", shape, costs[1], times[1]);
  }
  // `step` is one whole line.
  void whole(const std::string& op, const std::string& shape, const std::function<void()>& step, Cost known = {}) {
    const size_t mark = arena_.mark();
    Cost cost;
    std::vector<double> times;
    for (int run = -2; run < kRuns; ++run) {
      c.on_cost = run == -2 ? count(cost) : nullptr;
      const double t = seconds(step);
      if (run >= 0) times.push_back(t);
      arena_.rewind(mark);
    }
    c.on_cost = nullptr;
    add(op, shape, known.flops > 0 ? known : cost, times);
  }
  void end() { params_.clear(), arena_.rewind(0); }

  Context c;

 private:
  static constexpr int kRuns = 9;
  std::function<void(std::string_view, const Cost&)> count(Cost& into) {
    return [&into](std::string_view, const Cost& k) { into.flops += k.flops, into.bytes += k.bytes; };
  }
  double seconds(const std::function<void()>& f) const {
    if (on_gpu()) return gpu_seconds(f);
    const auto start = std::chrono::steady_clock::now();
    f();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  void add(const std::string& op, const std::string& shape, const Cost& cost, const std::vector<double>& times) {
    table_.add({op, shape + (on_gpu() ? narrow_ ? ", as --bf16" : ", float32" : ""), 1e6 * median(times), cost.bytes, cost.flops, narrow_});
  }
  OpTable& table_;
  Arena arena_;
  std::deque<Param> params_;
  uint64_t seed_ = 0;
  bool narrow_;
};

struct Gates {
  const char* name;
  double mean;
};
constexpr Gates kGates[] = {{"N(0,1)", 0}, {"slow", -4}};

void linears(Bench& b) {
  using Rows = std::array<int64_t, 3>;
  for (auto [n, in, out] : b.on_gpu() ? std::vector<Rows>{{8192, 7168, 12288}, {4096, 1024, 2048}, {1, 7168, 12288}}
                                      : std::vector<Rows>{{512, 512, 1024}, {1, 1024, 4096}}) {
    Var x = b.input({n, in});
    Param& w = b.weight({out, in});
    b.both("linear", fmt::format("T {}, {} -> {}", n, in, out), [&] { return linear(x, w); });
    b.end();
  }
}

// The convolution, the gate and the delta rule of one KDA layer, from its projections to the output norm.
void kda(Bench& b) {
  struct Size {
    int64_t tokens, heads, dim;
    bool bounded;
  };
  for (const Size& s :
       b.on_gpu() ? std::vector<Size>{{4096, 8, 32, false}, {4096, 16, 128, true}} : std::vector<Size>{{512, 4, 32, false}, {512, 4, 128, true}})
    for (const Gates& gates : kGates) {
      const int64_t width = s.heads * s.dim;
      const Batch batch = Batch::one(s.tokens);
      Var q = b.input({s.tokens, width}), k = b.input({s.tokens, width}), v = b.input({s.tokens, width}),
          z = b.input({s.tokens, width}, 1, gates.mean), beta = b.input({s.tokens, s.heads}), gate = b.input({s.tokens, width});
      Param &cq = b.weight({width, 4}, 0.4), &ck = b.weight({width, 4}, 0.4), &cv = b.weight({width, 4}, 0.4), &A = b.weight({s.heads}, 0.1),
            &bias = b.weight({width}, 0.1), &norm = b.weight({s.dim}, 0.1, 1);
      const std::string shape = fmt::format("T {}, {} heads of {}, {}, {}", s.tokens, s.heads, s.dim, s.bounded ? "bounded" : "softplus", gates.name);
      b.both("kda", shape, [&] {
        Var g = s.bounded ? bounded_decay(z, A, bias, s.heads, -5) : softplus_decay(z, A, bias, s.heads);
        const DeltaShape d{s.heads, s.dim, s.dim, float(1 / std::sqrt(double(s.dim))), s.bounded};
        Var o = delta_rule(l2_norm(conv_silu(q, cq, batch), s.dim), l2_norm(conv_silu(k, ck, batch), s.dim), conv_silu(v, cv, batch), g,
                           sigmoid(beta), d, batch, nullptr);
        return gated_rms_norm(o, gate, norm, 1e-5f);
      });
      b.end();
    }
}

void attention_lines(Bench& b) {
  struct Size {
    int64_t tokens, heads, nope, rope, value, rank;
  };
  for (const Size& s :
       b.on_gpu() ? std::vector<Size>{{4096, 16, 128, 64, 128, 512}, {4096, 8, 64, 32, 64, 256}} : std::vector<Size>{{512, 4, 64, 32, 64, 128}}) {
    const int64_t key = s.nope + s.rope;
    Var q = b.input({s.tokens, s.heads * key}), c = b.input({s.tokens, s.rank}), k_pe = b.input({s.tokens, s.rope});
    Param& kv_b = b.weight({s.heads * (s.nope + s.value), s.rank});
    b.both("mla", fmt::format("T {}, {} heads of {} / {}, rank {}", s.tokens, s.heads, key, s.value, s.rank), [&] {
      return mla_attention(q, c, k_pe, kv_b, {s.heads, s.nope, s.rope, s.value, s.rank, float(1 / std::sqrt(double(key)))}, Batch::one(s.tokens));
    });
    b.end();
  }
}

void mixture(Bench& b) {
  const int64_t tokens = b.on_gpu() ? 4096 : 256, E = 8, k = 2, l = b.on_gpu() ? 512 : 128, m = 256, d = b.on_gpu() ? 1024 : 256;
  Var x = b.input({tokens, d}), z = b.input({tokens, l});
  Param &gate = b.weight({E, d}), &bias = b.weight({E}, 0);
  bias.grad = Tensor();
  ExpertWeights w;
  for (int64_t e = 0; e < E; ++e) w.gate.push_back(&b.weight({m, l})), w.up.push_back(&b.weight({m, l})), w.down.push_back(&b.weight({l, m}));
  const std::string shape = fmt::format("T {}, 8 experts, top 2, {} x {}", tokens, l, m);
  Routing r;
  if (b.wants("route"))
    b.both("route", fmt::format("T {}, {} -> 8, top 2", tokens, d), [&] { return route(x, gate, bias, {.top_k = k}, Batch::one(tokens)).weights; });
  if (b.wants("experts")) {
    r = route(x, gate, bias, {.top_k = k}, Batch::one(tokens));
    r.weights.grad();
    b.both("experts", shape, [&] { return experts(z, r, w, {Activation::Kind::situ, 4, 25, 0}); });
  }
  r = {};
  b.end();
}

void rows(Bench& b) {
  using Sources = std::array<int64_t, 3>;
  if (b.wants("depth mix"))
    for (auto [n, count, d] : b.on_gpu() ? std::vector<Sources>{{4096, 3, 1024}, {8192, 9, 7168}} : std::vector<Sources>{{256, 3, 256}}) {
      std::vector<Var> sources;
      for (int64_t i = 0; i < count; ++i) sources.push_back(b.input({n, d}));
      Param &w = b.weight({d}, 0.1, 1), &query = b.weight({d});
      b.both("depth mix", fmt::format("T {}, {} sources, d {}", n, count, d), [&] { return depth_mix(sources, w, query, 1e-5f); });
      b.end();
    }
  using Rows = std::array<int64_t, 2>;
  if (b.wants("rms norm"))
    for (auto [n, d] : b.on_gpu() ? std::vector<Rows>{{4096, 1024}, {8192, 7168}} : std::vector<Rows>{{256, 256}}) {
      Var x = b.input({n, d});
      Param& w = b.weight({d}, 0.1, 1);
      b.both("rms norm", fmt::format("{} x {}", n, d), [&] { return rms_norm(x, w, 1e-5f); });
      b.end();
    }
  const auto wide = b.on_gpu() ? std::vector<Rows>{{4096, 2048}, {8192, 12288}} : std::vector<Rows>{{256, 512}};
  if (b.wants("situ"))
    for (auto [n, d] : wide) {
      Var g = b.input({n, d}), u = b.input({n, d});
      b.both("situ", fmt::format("{} x {}", n, d), [&] { return glu(g, u, {Activation::Kind::situ, 4, 25, 0}); });
      b.end();
    }
  if (b.wants("conv silu"))
    for (auto [n, d] : wide) {
      Var x = b.input({n, d});
      Param& w = b.weight({d, 4}, 0.4);
      b.both("conv silu", fmt::format("{} x {}", n, d), [&] { return conv_silu(x, w, Batch::one(n)); });
      b.end();
    }
}

void ends(Bench& b) {  // of the model and of the step
  const int64_t n = b.on_gpu() ? 4096 : 64, d = b.on_gpu() ? 1024 : 256, V = b.on_gpu() ? 163840 : 8192;
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < n; ++i) ids.push_back(int32_t(Rng{7, 7}.below(uint64_t(V), uint64_t(i))));
  const Tensor host(ids.data(), DType::i32, {n});
  if (b.wants("embedding")) {
    Param& table = b.weight({V, d});
    b.both("embedding", fmt::format("T {} of {} x {}", n, V, d), [&] { return embedding(b.c, host, table); });
    b.end();
  }
  if (b.wants("cross entropy")) {
    Var x = b.input({n, d});
    Param& head = b.weight({V, d});
    // Logits and two gradients of products; the head is read once, its gradient read and written: what is formed again in pieces is no floor.
    const double products = double(n) * double(d) * double(V);
    const Cost at_least{.flops = 6 * products, .bytes = 12 * double(V * d) + 12 * double(n * d)};
    b.whole(
        "cross entropy", fmt::format("T {}, {} -> {}, with both gradients", n, d, V),
        [&] {
          Tape tape;
          b.c.tape = &tape;
          cross_entropy(x, head, host, 1e-3f);
          tape.run_backward();
          b.c.tape = nullptr;
        },
        at_least);
    b.end();
  }
  if (b.wants("adamw")) {
    const int64_t weights = b.on_gpu() ? 1 << 26 : 1 << 20;
    Tensor w = b.random({weights}), g = b.random({weights}), m = b.random({weights}, 0), v = b.random({weights}, 0);
    b.whole("adamw", fmt::format("{} M weights", weights >> 20), [&] { adamw_step(b.c, w, g, m, v, {.lr = 1e-3f, .step = 3}); });
    b.end();
  }
  if (b.wants("newton-schulz")) {
    using Blocks = std::array<int64_t, 3>;
    for (auto [blocks, r, c] :
         b.on_gpu() ? std::vector<Blocks>{{8, 128, 1024}, {96, 128, 7168}, {1, 1024, 2048}} : std::vector<Blocks>{{4, 64, 256}}) {
      Tensor x = b.random({blocks, r, c});
      b.whole("newton-schulz", fmt::format("{} x {} x {}", blocks, r, c), [&, &x = x] { newton_schulz(b.c, x); });
      b.end();
    }
  }
}

struct OpsFlags {
  Device device = Device::cpu;
  bool bf16 = false;
  std::string op, file;
};

void run(const OpsFlags& f) {
  OpTable table{f.op};
  if (f.device == Device::cuda) {
    table.rates = gpu_rates();
    fmt::print("{}: a copy moves {:.2f} TB/s, cuBLASLt makes {:.0f} TFLOP/s in bfloat16, multiply-adds in float32 {:.1f}\n", gpu_name(),
               table.rates.bytes * 1e-12, table.rates.tensor_flops * 1e-12, table.rates.flops * 1e-12);
  } else {
    const plan::Machine m = plan::measure(0.2);
    table.rates = {m.triad, m.product, m.product};
    fmt::print("{} threads: a = b + s c moves {:.1f} GB/s, large products make {:.0f} GFLOP/s\n", thread_count(), m.triad * 1e-9, m.product * 1e-9);
  }
  fmt::print("{:<28} {:<52} {:>11} {:>11} {:>8}  {}\n", "operator", "shape", "us", "floor us", "share", "the floor is");
  if (f.device == Device::cuda) gpu_kernel_lines(table);
  for (bool narrow : {false, true}) {
    if (narrow && f.device == Device::cpu) break;
    Bench b(table, f.device, narrow);
    if (b.wants("linear")) linears(b);
    if (b.wants("kda")) kda(b);
    if (b.wants("mla")) attention_lines(b);
    if (b.wants("route") || b.wants("experts")) mixture(b);
    rows(b), ends(b);
  }
  K3_CHECK(!table.lines.empty(), "[bench] no line is called {}; leave out --op to see them all", f.op);
  if (f.file.empty()) return;
  nlohmann::ordered_json j;
  j["rates"] = {
      {"bytes_a_second", table.rates.bytes}, {"float32_flops_a_second", table.rates.flops}, {"tensor_flops_a_second", table.rates.tensor_flops}};
  for (const OpLine& l : table.lines)
    j["lines"].push_back({{"op", l.op},
                          {"shape", l.shape},
                          {"us", l.us},
                          {"floor_us", table.rates.floor_us(l)},
                          {"share", table.rates.floor_us(l) / l.us},
                          {"in_cache", table.rates.in_cache(l)},
                          {"bound", table.rates.bound(l)},
                          {"bytes", l.bytes},
                          {"flops", l.flops},
                          {"note", l.note}});
  write_file(f.file, j.dump(1) + "\n");
}

}  // namespace

void add_bench_ops(CLI::App& bench) {
  CLI::App* c = bench.add_subcommand("ops", "each operator, forward and backward: its time beside what its FLOPs and bytes cannot take less than");
  c->footer("Examples:\n  k3 bench ops\n  k3 bench ops --device cuda --op kda --json kda.json");
  auto f = std::make_shared<OpsFlags>();
  c->add_option_function<std::string>(
       "--device",
       [f](const std::string& name) {
         f->device = name == "cuda" ? Device::cuda : Device::cpu;
         if (f->device == Device::cuda) gpu::require();
       },
       "where to compute: cpu or cuda (there in float32 and as with --bf16)")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->default_str("cpu");
  c->add_option("--op", f->op, "only operators whose name holds this");
  c->add_option("--json", f->file, "write the lines to this file too");
  c->callback([f] { run(*f); });
}

}  // namespace k3

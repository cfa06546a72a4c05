// This engine's steps on this machine: rates of each kind of work are fitted to the steps of a few small models, then steps of other models
// are predicted from what their operators report on the null device.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <ctime>
#include <fstream>

#include "k3/core/error.h"
#include "k3/core/memory.h"
#include "k3/core/threads.h"
#include "k3/model/init.h"
#include "k3/model/model.h"
#include "k3/ops/loss/loss.h"
#include "k3/plan/counts.h"
#include "k3/plan/measure.h"
#include "k3/tape/tape.h"
#include "k3/train/optimizer.h"

namespace k3::plan {

namespace {

// With one thread its own processor time, which other programs don't touch; with more the clock on the wall.
double now() {
  if (thread_count() > 1) return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

// A step's work by kind. Time is a sum of kinds times seconds of each.
constexpr int kKinds = 7;
using Work = std::array<double, kKinds>;
enum { products, cores, bytes, updates, calls, weights, cold };  // cold: weights that the last-level cache cannot have kept

void add(Work& w, const Count& c) {
  for (const auto& [name, o] : c.operators) {
    w[calls] += double(o.calls);
    if (name == "linear" || name == "experts" || name == "cross_entropy")
      w[products] += o.flops, w[weights] += o.bytes;
    else if (name == "mla_attention" || name == "attention" || name == "delta_rule")
      w[cores] += o.flops;
    else if (name == "muon")
      w[updates] += o.flops;
    else
      w[bytes] += o.bytes;
  }
}

struct Size {
  int64_t hidden, layers, experts, tokens, vocabulary;
};
Architecture architecture(const Size& s) {
  Architecture a;
  a.name = fmt::format("hidden {}, {} layers, {} experts", s.hidden, s.layers, s.experts);
  a.experts = a.trunk = format_of("f32");
  Config& c = a.config;
  const int64_t heads = std::max<int64_t>(2, s.hidden / 64), dim = s.hidden / heads;
  c.vocab_size = s.vocabulary, c.hidden_size = s.hidden, c.num_hidden_layers = s.layers, c.num_attention_heads = heads,
  c.intermediate_size = 3 * s.hidden;
  c.hidden_act = "situ", c.activation_situ_beta = 4, c.activation_situ_linear_beta = 25, c.attn_res_block_size = 2, c.first_k_dense_replace = 1;
  c.num_experts = s.experts, c.num_experts_per_token = 4, c.num_shared_experts = 1, c.moe_intermediate_size = s.hidden / 2,
  c.routed_expert_hidden_size = s.hidden / 2;
  c.latent_moe_use_norm = true, c.q_lora_rank = s.hidden / 2, c.kv_lora_rank = dim, c.qk_nope_head_dim = dim, c.qk_rope_head_dim = dim / 2,
  c.v_head_dim = dim;
  c.mla_use_output_gate = c.use_full_rank_gate = true, c.gate_lower_bound = -5.0, c.kda_num_heads = heads, c.kda_head_dim = dim,
  c.rms_norm_eps = 1e-5;
  c.mixers = {"kda", "kda", "kda", "mla"}, c.final_mixer = "mla";
  c.finish();
  return a;
}

struct Run {
  Work train{}, decode{};
  double train_seconds = 0, decode_seconds = 0, predicted_bytes = 0, measured_bytes = 0;
};

constexpr int64_t kPrompt = 256, kDecoded = 32, kRounds = 24;

Run run(const Size& s) {
  Run r;
  const Architecture a = architecture(s);
  const TrainOptions options;
  size_t arena_bytes = 0, parameters = 0, moments = 0;
  {
    CountedModel counted(a, CountedModel::For::training, DType::f32);
    Count step = counted.train(s.tokens / 512, 512, false), update = counted.optimizer();
    add(r.train, step), add(r.train, update);
    arena_bytes = std::max(step.arena_peak, update.arena_peak);
    CountedModel inference(a, CountedModel::For::inference, DType::f32);
    add(r.decode, inference.decode(1, kPrompt));
    const double all = 4 * double(inference.parameters()), cache = double(std::max(sysconf(_SC_LEVEL3_CACHE_SIZE), 1L << 22));
    r.decode[cold] = r.decode[weights] * std::max(0.0, 1 - cache / 2 / all);  // half: others use it too
    r.decode[weights] -= r.decode[cold];
  }
  if (std::ofstream clear("/proc/self/clear_refs"); clear) clear << 5;  // the high-water mark starts again from here
  const double before = double(resident_memory());
  Model model(a.config);
  model.params().allocate(Device::cpu), model.params().allocate_grads();
  initialize(model, 1);
  Optimizer optimizer(model.params(), options);
  for (const Param& p : model.params().all()) parameters += p.value.bytes() + p.grad.bytes();
  for (const NamedTensor& m : optimizer.moments()) moments += m.value.bytes();
  std::vector<int32_t> ids(size_t(s.tokens), 0);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = int32_t((i * 7919 + i / 3) % size_t(s.vocabulary));
  {
    Arena arena(arena_bytes + (size_t(1) << 20));
    Batch batch = Batch::of_lengths(std::vector<int64_t>(size_t(s.tokens / 512), 512));
    r.train_seconds = 1e300;
    for (int i = 0; i < 5; ++i) {  // the first one also waits for the memory's first touch
      const double start = now();
      arena.rewind(0);
      model.params().zero_grads();
      Context c{.arena = &arena, .observe = true};
      Tape tape;
      c.tape = &tape;
      Tensor tokens(ids.data(), DType::i32, {s.tokens});
      cross_entropy(model.forward(c, tokens, batch), model.lm_head(), tokens, 1.0f / float(s.tokens));
      tape.run_backward();
      c.tape = nullptr;
      arena.rewind(0);
      optimizer.step(c, 1e-3);
      r.train_seconds = std::min(r.train_seconds, now() - start);
    }
  }
  r.measured_bytes = double(peak_resident_memory()) - before;
  r.predicted_bytes = double(parameters + moments + arena_bytes);

  Arena arena(size_t(1) << 30);
  ModelState state = model.new_state(1, Device::cpu, false);
  auto read = [&](int64_t at, int64_t n) {
    arena.rewind(0);
    Context c{.arena = &arena};
    c.deterministic = false;
    Batch b = Batch::one(n);
    b.slots = {0};
    Var h = model.forward(c, Tensor(ids.data() + at, DType::i32, {n}), b, &state);
    logits(Var(c, h.value().row_range(n - 1, n)), model.lm_head());
  };
  r.decode_seconds = 1e300;
  for (int round = 0; round < kRounds; ++round) {  // spread in time: a neighbour's burst should not be all that is seen
    state.reset(0);
    read(0, kPrompt);
    for (int64_t i = 0; i < kDecoded; ++i) {
      const double start = now();
      read(kPrompt + i, 1);
      r.decode_seconds = std::min(r.decode_seconds, now() - start);
    }
  }
  return r;
}

// Non-negative rates x that make sum_k work_k x_k / seconds nearest to 1 for every run: relative errors, coordinate by coordinate.
Work rates(const std::vector<std::pair<Work, double>>& runs, const std::vector<int>& used) {
  Work x{};
  for (int sweep = 0; sweep < 20000; ++sweep)
    for (int k : used) {
      double top = 0, bottom = 0;
      for (const auto& [w, t] : runs) {
        double rest = 1;
        for (int j : used)
          if (j != k) rest -= w[size_t(j)] * x[size_t(j)] / t;
        double a = w[size_t(k)] / t;
        top += a * rest, bottom += a * a;
      }
      x[size_t(k)] = bottom > 0 ? std::max(0.0, top / bottom) : 0;
    }
  return x;
}

double dot(const Work& a, const Work& b) {
  double s = 0;
  for (size_t i = 0; i < kKinds; ++i) s += a[i] * b[i];
  return s;
}

}  // namespace

std::vector<Target> machine_targets() {
  const Size calibration[] = {{64, 2, 8, 512, 256},    {128, 6, 8, 512, 512},  {256, 2, 8, 1024, 256},
                              {192, 3, 32, 512, 2048}, {256, 4, 16, 512, 256}, {384, 3, 32, 512, 512}};
  const Size sizes[] = {{128, 4, 16, 512, 256}, {192, 6, 32, 1024, 256}, {320, 3, 16, 512, 1024}};
  std::vector<std::pair<Work, double>> train, decode;
  for (const Size& s : calibration) {
    Run r = run(s);
    train.emplace_back(r.train, r.train_seconds), decode.emplace_back(r.decode, r.decode_seconds);
  }
  const Work train_rates = rates(train, {products, cores, bytes, updates, calls}), decode_rates = rates(decode, {weights, cold, cores, bytes, calls});
  std::vector<Target> out;
  for (const Size& s : sizes) {
    Run r = run(s);
    const std::string name = architecture(s).name;
    const std::string threads = fmt::format(", {} thread{}", thread_count(), thread_count() > 1 ? "s" : " (its processor time)");
    out.push_back({"this machine", "training, " + name + threads, "token/s", double(s.tokens) / r.train_seconds,
                   double(s.tokens) / dot(r.train, train_rates), 0.25});
    out.push_back({"this machine", "decode, " + name + threads, "token/s", 1 / r.decode_seconds, 1 / dot(r.decode, decode_rates), 0.25});
    out.push_back({"this machine", "peak memory of training, " + name, "B", r.measured_bytes, r.predicted_bytes, 0.05});
  }
  return out;
}

}  // namespace k3::plan

#include "k3/plan/plan.h"

#include <algorithm>
#include <cmath>

#include "k3/core/error.h"
#include "k3/plan/counts.h"

namespace k3::plan {

namespace {

std::string f(double v) { return fmt::format("{:.6g}", v); }

Section model_section(const Architecture& a) {
  const Config& c = a.config;
  const Parameters p = parameters(a);
  const double moe = double(a.moe_layers());
  Section s{"Model: " + a.name, {}};
  auto add = [&](std::string key, double v, std::string unit, std::string formula) {
    s.numbers.push_back({"model." + key, v, unit, Kind::exact, formula});
  };
  add("parameters", double(p.total), "",
      fmt::format("routed {} + other matrices {} + embedding {} + small {}", p.routed, p.trunk_matrices, p.embedding, p.small));
  add("active", double(p.active), "",
      fmt::format("every parameter a token multiplies, head included, embedding not: {} in matrices + {} small", p.active_matrices, p.small));
  add("routed", double(p.routed), "",
      fmt::format("L_e N 3 w m = {} x {} x 3 x {} x {}", a.moe_layers(), c.num_experts, c.latent_size(), c.moe_intermediate_size));
  for (const auto& [name, count] : a.mixers()) {
    MixerForm m = mixer_form(c, name);
    add(name + "_layers", double(count), "", "layers with this mixer");
    add(name + "_layer", double(m.matrices), "",
        fmt::format("weights in matrices of one {} layer; {} of them kept whole under TP; {} small", name, m.replicated, m.small));
  }
  add("checkpoint", p.checkpoint_bytes, "B",
      fmt::format("experts in {} ({} B a weight), the rest in {} ({} B), small in 2 B", a.experts.name, a.experts.bytes, a.trunk.name,
                  a.trunk.bytes));
  add("linear", linear_flops(a), "FLOP", fmt::format("2 x active matrices = 2 x {}, a token", p.active_matrices));
  add("cache", cache_bytes_per_token(a), "B", "sum over layers of cached numbers x 2 B, a token; KDA layers cache nothing");
  add("state", state_bytes(a), "B", "sum over KDA layers of H d_k d_v x 4 B + (conv - 1) 3 P x 2 B, a sequence");
  double numbers = 0;
  for (const auto& [name, count] : a.mixers()) numbers += double(count) * double(mixer_form(c, name).state + mixer_form(c, name).window);
  add("state_float32", 4 * numbers, "B", "the same with the windows in 4 B too");
  for (double context : {8192.0, 131072.0, 1048576.0})
    add(fmt::format("sequence_{:.0f}K", context / 1024), context * cache_bytes_per_token(a) + state_bytes(a), "B",
        fmt::format("{:.0f} x cache + state", context));
  if (c.attn_res_block_size)
    add("depth_reads", double(depth_sources(c) * c.hidden_size) * 2, "B",
        fmt::format("AttnRes: {} vectors of {} in 2 B, a token", depth_sources(c), c.hidden_size));
  if (moe > 0)
    add("activated", double(activated_elements(a)), "",
        "gated activations of a token; SiTU needs 4 special functions each, SwiGLU 2, and neither any bytes");
  return s;
}

void regime_section(Sections& out, const std::string& name, const Architecture& a, const Hardware& h, const Deployment& d, const Work& w,
                    const Question& q) {
  const Five v = five(a, d, w);
  const StepTime t = step_time(a, h, d, w);
  const double B = h.between(d.ep > 1 ? d.ep : d.tp);
  Section s{fmt::format("{}: batch {:g} a group of {} GPUs, {} {:.0f} tokens{}", name, w.batch, d.tp,
                        w.regime == Regime::decode ? "context" : "prompt", w.regime == Regime::decode ? w.context : w.tokens,
                        w.tokens > 1 && w.regime == Regime::decode ? fmt::format(", {:g} verified", w.tokens) : ""),
            {}};
  auto add = [&](std::string key, double x, std::string unit, Kind kind, std::string formula) {
    s.numbers.push_back({name + "." + key, x, unit, kind, formula});
  };
  const Config& c = a.config;
  if (a.moe_layers()) {
    add("experts_touched", v.touched, "", Kind::exact,
        fmt::format("U = N (1 - (1 - K/N)^(1 + rho (t - 1))), N = {}, K = {}, rho = {}", c.num_experts, c.num_experts_per_token, d.rho));
    add("tokens_per_expert", v.tokens_per_expert, "", Kind::exact, "t K / N");
    const std::string math = a.experts.bytes < 1.5 ? "fp8" : "bf16";
    add("ridge_tokens", ridge_tokens(a.experts.bytes, h.peak(math), h.hbm), "", Kind::exact,
        fmt::format("b_w F / (2 B_m) = {} x {} / (2 x {}), {} math: fewer tokens an expert are bound by HBM", a.experts.bytes, f(h.peak(math)),
                    f(h.hbm), math));
  }
  add("hbm_routed", v.routed, "B", Kind::exact, "L_e U w_e / ranks that hold the experts, one rank and step");
  add("hbm_trunk", v.trunk, "B", Kind::exact, "b (kept whole + (trunk - kept whole) / TP)");
  add("hbm_cache", v.cache, "B", Kind::exact, fmt::format("b c x cache a token / DCP, cache in {} B", d.kv_bytes));
  add("hbm_state", v.state, "B", Kind::exact, w.regime == Regime::decode ? "b x 2 x state / TP: read and written" : "b x state / TP: written");
  add("hbm", v.hbm(), "B", Kind::exact, "routed + trunk + cache + state");
  add("flops", v.flops, "FLOP", Kind::exact, "a rank: kept-whole products for all its tokens, the rest / TP, routed t K / ranks, cores / TP");
  add("network_tp", v.tp_bytes, "B", Kind::exact,
      "ring all-reduces: 2 (n - 1) / n x payload; attention output, and with sliced experts the feed-forward's and the latent sum");
  add("network_ep", v.ep_bytes, "B", Kind::exact, "t R (E - 1)/E w (b_d + b_c) L_e / E, R = E (1 - (1 - 1/E)^K): one copy a distinct rank");
  add("intensity", v.intensity(), "FLOP/B", Kind::exact, "FLOPs / HBM bytes");
  add("ridge", h.bf16 / h.hbm, "FLOP/B", Kind::exact, fmt::format("F / B_m of {} in bf16", h.name));
  if (d.ep > 1) {
    double F = h.peak(a.experts.bytes < 1.5 ? "fp8" : "bf16");
    add("comm_over_compute", v.comm_over_compute(a, d, F, B, false), "ratio", Kind::exact,
        fmt::format("(b_d + b_c) F / (6 m B) x distinct remote ranks / K, B = {} B/s; above 1 the all-to-all cannot hide", f(B)));
    add("comm_over_compute_all", v.comm_over_compute(a, d, F, B, true), "ratio", Kind::exact, "the same with K copies a token: an upper bound");
  }
  for (const OperatorTime& o : t.operators) {
    std::string key = "time." + o.name;
    std::replace(key.begin(), key.end(), ' ', '_');
    add(key, o.seconds, "s", Kind::modelled, fmt::format("{} [bound: {}]", o.formula, name_of(o.bound)));
  }
  add("step", t.seconds(), "s", Kind::modelled,
      fmt::format("sum of the operators, constants '{}' ({}); 15 to 30 % off in published cases", h.efficiency.name, h.efficiency.source));
  add("ideal", std::max({v.hbm() / h.hbm, v.flops / h.bf16, v.network() / (B > 0 ? B : 1e30)}), "s", Kind::exact,
      "max of bytes / B_m, FLOPs / F (bf16), network / B: no plan can be faster");
  const double group = t.seconds();
  if (w.regime == Regime::decode) {
    add("tpot", (group + q.draft) / q.accepted, "s", Kind::modelled, "(step + draft) / accepted");
    add("throughput", double(d.dp) * w.batch * q.accepted / (group + q.draft), "token/s", Kind::modelled,
        "DP x batch x accepted / (step + draft), all GPUs");
    add("attention_intensity",
        w.tokens * double(c.num_attention_heads) / double(d.tp) * double(d.dcp) * 2 * double(2 * c.kv_lora_rank + c.qk_rope_head_dim) /
            (double(c.kv_lora_rank + c.qk_rope_head_dim) * d.kv_bytes),
        "FLOP/B", Kind::exact, "MLA absorbed: q (H/TP) DCP 2 (2 r_kv + d_r) / ((r_kv + d_r) b_kv)");
    if (q.width > 1)
      add("break_even_accepted", break_even_accepted(a, h, d, w.batch, w.context, q.width, q.draft), "", Kind::modelled,
          "(step of q tokens + draft) / step of one");
  } else {
    add("ttft", group, "s", Kind::modelled, "an idle server: the prefill step");
    add("throughput", double(d.dp) * w.batch * w.tokens / group, "token/s", Kind::modelled, "DP x prompt tokens / step, all GPUs");
  }
  out.push_back(std::move(s));
}

Section memory_section(const Architecture& a, const Hardware& h, const Deployment& d, const Question& q) {
  const Memory m = memory_of(a, h, d);
  Section s{fmt::format("Memory of one of {} x {} ({})", d.gpus, h.name, to_string(d)), {}};
  auto add = [&](std::string key, double v, std::string unit, std::string formula) {
    s.numbers.push_back({"memory." + key, v, unit, Kind::exact, formula});
  };
  add("experts", m.routed, "B", fmt::format("routed weights in {} / {} ranks", a.experts.name, d.expert_ranks()));
  add("trunk", m.trunk, "B", "other matrices: kept whole, or / TP");
  add("tables", m.tables, "B", "embedding and head / TP");
  add("small", m.small, "B", "gains, biases, convolutions");
  add("weights", m.weights(), "B", "experts + trunk + tables + small");
  add("pool", m.pool, "B", fmt::format("{} x {} B - weights - {} B of workspace", d.memory_fraction, f(h.memory), f(d.workspace)));
  add("cache", m.cache_per_token * q.context * q.batch, "B", fmt::format("batch x context x {} B / DCP", f(cache_bytes_per_token(a, d.kv_bytes))));
  add("states", m.state_per_sequence * q.batch, "B", fmt::format("batch x {} slots x state / TP", d.slots));
  for (double context : {8192.0, 131072.0, 1048576.0})
    add(fmt::format("sequences_{:.0f}K", context / 1024), std::max(0.0, m.sequences(context)), "", "pool / (context x cache + state), a group");
  return s;
}

void counted_sections(Sections& out, const Architecture& a, const Question& q) {
  CountedModel model(a, CountedModel::For::inference);
  auto section = [&](const std::string& name, const std::string& what, const Count& c, const std::vector<Agreement>& list) {
    Section s{what, {}};
    for (const auto& [op, o] : c.operators)
      s.numbers.push_back(
          {name + "." + op, o.flops, "FLOP", Kind::counted,
           fmt::format("{} calls of {} reported {} FLOPs and {} B (float32 activations, bf16 weights)", o.calls, op, f(o.flops), f(o.bytes))});
    s.numbers.push_back({name + ".total", c.products(), "FLOP", Kind::counted, "matrix products and cores of all operators"});
    s.numbers.push_back({name + ".scratch", double(c.arena_peak), "B", Kind::counted, "peak of the arena, this engine"});
    for (const Agreement& g : list)
      s.numbers.push_back(
          {name + ".closed_form." + g.name, g.closed, "FLOP", Kind::exact,
           fmt::format("differs from the count by {:+.3g} %{}{}", 100 * g.difference(), g.convention.empty() ? "" : "; convention: ", g.convention)});
    out.push_back(std::move(s));
  };
  const int64_t context = int64_t(q.context), batch = std::max<int64_t>(1, int64_t(q.batch));
  section("counted.decode", fmt::format("Counted from the code on the null device: decode of {} at {}, whole model", batch, context),
          model.decode(batch, context), agreement(a, model, batch, context));
  section("counted.prefill", fmt::format("Counted from the code on the null device: prefill of {}, whole model", context), model.prefill(context),
          prefill_agreement(a, model, context));
}

void training_sections(Sections& out, const Architecture& a, const Hardware& h, const Deployment& d, const Question& q) {
  const Parameters p = parameters(a);
  const Config& c = a.config;
  const Flops fl = training_flops(a, q.sequence);
  const double moe = double(a.moe_layers()), ranks = double(d.expert_ranks());
  Section s{fmt::format("Training: sequences of {:.0f}, micro-batch {:g} a rank group, {} tokens a step", q.sequence, q.micro_batch,
                        show(q.tokens_a_step, "")),
            {}};
  auto add = [&](std::string key, double v, std::string unit, Kind kind, std::string formula) {
    s.numbers.push_back({"train." + key, v, unit, kind, formula});
  };
  add("flops_per_token", fl.total(), "FLOP", Kind::exact, "3 linear + 3 (attention + KDA cores); recompute not counted");
  add("tokens_per_second_gpu", q.mfu * h.bf16 / fl.total(), "token/s", Kind::modelled,
      fmt::format("MFU {} x F bf16 / FLOPs a token; published MoE runs reach 0.25 to 0.40", q.mfu));
  add("tokens_per_second", q.mfu * h.bf16 / fl.total() * double(d.gpus), "token/s", Kind::modelled, "x GPUs");
  add("days_per_trillion", 1e12 / (q.mfu * h.bf16 / fl.total() * double(d.gpus)), "s", Kind::modelled, "10^12 tokens");
  const TrainingMemory m = training_memory(a, d);
  add("parameters_per_rank", m.parameters, "", Kind::exact, "routed / expert ranks + kept whole + rest / TP");
  add("weights", m.weights, "B", Kind::exact, "bf16");
  add("gradients", m.gradients, "B", Kind::exact, "float32");
  add("optimizer", 8 * m.parameters, "B", Kind::exact, "float32 master 4 + Muon's momentum 4 (AdamW: 8), before sharding");
  add("optimizer_sharded", m.optimizer, "B", Kind::exact, "each DP rank keeps its share; experts among the ranks that hold the same ones");
  add("resident", m.total(), "B", Kind::exact, "weights + gradients + sharded optimizer, before activations");
  add("all_parameters", 14 * double(p.total), "B", Kind::exact, "2 + 4 + 4 + 4 bytes a parameter with Muon, all ranks together, before activations");
  if (moe > 0) {
    add("muon_experts", muon_expert_flops(a), "FLOP", Kind::exact, "5 (4 n^2 k + 2 n^3) for each expert matrix, a step");
    add("muon_share", muon_expert_flops(a) / (fl.total() * q.tokens_a_step), "%", Kind::exact, "of the step's FLOPs");
    add("balance_counters", double(c.num_experts) * 1000 * 4 * moe, "B", Kind::exact,
        "quantile balancing: N x 1000 bins x 4 B a layer, all-reduced each step");
  }
  if (d.ep > 1) {
    const double F = h.peak("fp8"), B = h.between(d.ep), bytes = 2 * d.dispatch_bytes + 3 * d.combine_bytes;
    add("all_to_all",
        q.micro_batch * q.sequence / double(d.tp) * remote_rank_copies(double(d.ep), double(c.num_experts_per_token)) * double(c.latent_size()) *
            bytes * moe,
        "B", Kind::exact, "a rank and micro-batch: five passes, 2 b_d + 3 b_c a copied element");
    add("comm_over_compute", bytes * F / (18 * double(c.moe_intermediate_size) * B), "ratio", Kind::exact, "(2 b_d + 3 b_c) F / (18 m B), K copies");
  }
  if (d.dp > 1)
    add("gradient_traffic", 6 * (double(d.dp) - 1) / double(d.dp) * (m.parameters - double(p.routed) / ranks), "B", Kind::exact,
        "reduce-scatter of float32 gradients, all-gather of bf16 weights, a step: (n - 1)/n (4 + 2) a replicated parameter");
  out.push_back(std::move(s));
  if (!q.count || !a.runs()) return;

  CountedModel model(a, CountedModel::For::training);
  const int64_t sequences = std::max<int64_t>(1, int64_t(q.micro_batch)), T = int64_t(q.sequence);
  Count kept = model.train(sequences, T, false), again = model.train(sequences, T, true), update = model.optimizer();
  Section k{"Counted from the code on the null device: a training micro-batch, whole model", {}};
  for (const auto& [op, o] : kept.operators)
    k.numbers.push_back(
        {"counted.train." + op, o.flops, "FLOP", Kind::counted, fmt::format("{} calls forward and backward, {} B", o.calls, f(o.bytes))});
  k.numbers.push_back({"counted.train.total", kept.products(), "FLOP", Kind::counted, "products and cores, forward and executed backward"});
  k.numbers.push_back({"counted.train.activations", double(kept.arena_peak), "B", Kind::counted,
                       "peak of the arena without recompute: float32 values, gradients, scratch"});
  k.numbers.push_back({"counted.train.activations_recompute", double(again.arena_peak), "B", Kind::counted,
                       "the same when each sublayer is computed again in the backward"});
  k.numbers.push_back({"counted.train.recompute_flops", again.flops() - kept.flops(), "FLOP", Kind::counted, "what recomputing adds"});
  k.numbers.push_back(
      {"counted.train.optimizer", update.flops(), "FLOP", Kind::counted, "Muon for each head and expert, AdamW for the rest, a step"});
  for (const Agreement& g : training_agreement(a, model, T))
    k.numbers.push_back({"counted.train.closed_form." + g.name, g.closed, "FLOP", Kind::exact,
                         fmt::format("one sequence; differs from the count by {:+.3g} %{}{}", 100 * g.difference(),
                                     g.convention.empty() ? "" : "; convention: ", g.convention)});
  out.push_back(std::move(k));
}

}  // namespace

Sections plan(const Architecture& a, const Hardware& h, const Deployment& d, const Question& q) {
  for (auto [name, v] : {std::pair{"--batch", q.batch},
                         {"--context", q.context},
                         {"--draft-width", q.width},
                         {"--accepted", q.accepted},
                         {"--sequence", q.sequence},
                         {"--micro-batch", q.micro_batch},
                         {"--mfu", q.mfu},
                         {"--step-tokens", q.tokens_a_step}})
    K3_CHECK(v > 0 && std::isfinite(v), "[plan] {} is {} but must be {}above 0", name, v, v > 0 ? "a finite number " : "");
  K3_CHECK(q.draft >= 0 && std::isfinite(q.draft), "[plan] --draft-ms is {} but must be 0 or a finite number above it", q.draft * 1e3);
  K3_CHECK(q.accepted <= q.width, "[plan] --accepted {} cannot exceed --draft-width {}", q.accepted, q.width);
  const Memory m = memory_of(a, h, d);
  const double needed = q.batch * (q.context * m.cache_per_token + m.state_per_sequence);
  if (!q.train && needed > m.pool) {
    const double most = std::floor(m.sequences(q.context));
    int64_t gpus = fewest_gpus(a, h, 4096, q.context, d);
    fail(
        "[plan] {} in {} x {} ({}) needs {} of weights and {} of caches a GPU, but {:.0f} % of {} less workspace leaves {}; the nearest that works: "
        "{}",
        a.name, d.gpus, h.name, to_string(d), show(m.weights(), "B"), show(needed, "B"), 100 * d.memory_fraction, show(h.memory, "B"),
        show(m.pool + m.weights(), "B"),
        most >= 1 ? fmt::format("--batch {:.0f}", most)
        : gpus    ? fmt::format("--gpus {}", gpus)
                  : "a smaller --context or --slots, or --set trunk_format=fp8");
  }
  if (const TrainingMemory t = training_memory(a, d); q.train && t.total() > d.memory_fraction * h.memory) {
    const Deployment fewest = fewest_for_training(a, h, d);
    fail("[plan] training {} in {} x {} ({}) needs {} a GPU for weights, gradients and optimizer, before activations, but {:.0f} % of {} is {}; {}",
         a.name, d.gpus, h.name, to_string(d), show(t.total(), "B"), 100 * d.memory_fraction, show(h.memory, "B"),
         show(d.memory_fraction * h.memory, "B"),
         fewest.gpus ? fmt::format("the fewest that work: --tp {} --dp {} --ep {}", fewest.tp, fewest.dp, fewest.ep)
                     : "no layout of up to 65536 GPUs without pipeline stages works");
  }
  Sections out = {model_section(a)};
  if (!q.train) {
    out.push_back(memory_section(a, h, d, q));
    regime_section(out, "decode", a, h, d, {Regime::decode, q.batch, q.context, q.width, q.replay}, q);
    regime_section(out, "prefill", a, h, d, {Regime::prefill, 1, 0, q.context, true}, q);
    if (q.count && a.runs()) counted_sections(out, a, q);
  } else {
    training_sections(out, a, h, d, q);
  }
  return out;
}

std::string compare_table(const std::vector<std::string>& names, const std::vector<Sections>& plans) {
  std::string out = fmt::format("{:<34}", "");
  size_t width = 14;
  for (const auto& n : names) width = std::max(width, std::min<size_t>(n.size(), 44) + 2);
  for (const auto& n : names) out += fmt::format("{:>{}}", n.substr(0, 44), width);
  out += "\n";
  std::string title;
  for (const Section& s : plans[0])
    for (const Number& n : s.numbers) {
      std::vector<const Number*> row;
      for (const Sections& p : plans) {
        const Number* found = nullptr;
        for (const Section& t : p)
          for (const Number& m : t.numbers)
            if (m.key == n.key) found = &m;
        row.push_back(found);
      }
      std::string group = n.key.substr(0, n.key.find('.'));
      if (group == "counted") continue;
      if (group != title) out += (title.empty() ? "" : "\n"), title = group;
      out += fmt::format("{:<34}", n.key);
      for (const Number* m : row) out += fmt::format("{:>{}}", m ? show(m->value, m->unit) : "-", width);
      if (row.size() == 2 && row[0] && row[1] && row[0]->value > 0) out += fmt::format("   x {:.3g}", row[1]->value / row[0]->value);
      out += "\n";
    }
  return out;
}

namespace {

std::vector<Deployment> layouts(const Architecture& a, int64_t gpus, const Deployment& like) {
  std::vector<Deployment> out;
  for (int64_t tp = 1; tp <= gpus; ++tp)
    if (gpus % tp == 0)
      for (int64_t ep : {int64_t(1), tp, gpus})
        for (int64_t dcp : {int64_t(1), tp}) {
          Deployment d = like;
          d.gpus = gpus, d.tp = tp, d.dp = gpus / tp, d.ep = ep, d.dcp = dcp;
          if (ep == 1 && d.dp > 1 && a.moe_layers()) continue;  // that many copies of all experts: never better than spreading them
          if ((ep == tp && ep == gpus && ep != 1) || ep > 1 || dcp == 1 || tp > 1) {
            try {
              d = resolve(a, d);
            } catch (const Error&) { continue; }
            if (d.tp != tp || d.ep != ep || (dcp > 1 && dcp != tp)) continue;
            bool twin = std::any_of(out.begin(), out.end(), [&](const Deployment& o) { return o.tp == d.tp && o.ep == d.ep && o.dcp == d.dcp; });
            if (!twin) out.push_back(d);
          }
        }
  return out;
}

bool better(const Fit& x, const Fit& y, Goal g) {
  if (g == Goal::latency) return x.tpot < y.tpot;
  if (g == Goal::throughput) return x.throughput > y.throughput;
  return x.longest_context > y.longest_context;
}

}  // namespace

std::vector<Fit> fit(const Architecture& a, const Hardware& h, int64_t most_gpus, double context, Goal goal, const Deployment& like) {
  K3_CHECK(most_gpus > 0 && most_gpus <= 65536, "[plan] --most-gpus is {} but must lie between 1 and 65536", most_gpus);
  K3_CHECK(context > 0 && std::isfinite(context), "[plan] --context is {} but must be a finite number above 0", context);
  std::vector<Fit> out;
  for (int64_t gpus = 1; gpus <= most_gpus; gpus *= 2)
    for (const Deployment& d : layouts(a, gpus, like)) {
      const Memory m = memory_of(a, h, d);
      Fit x;
      x.deployment = d;
      x.sequences = std::floor(m.sequences(context));
      if (m.pool <= 0 || x.sequences < 1) continue;
      x.longest_context = m.cache_per_token > 0 ? (m.pool - m.state_per_sequence) / m.cache_per_token : INFINITY;
      auto step = [&](double b) { return step_time(a, h, d, {Regime::decode, b, context}).seconds(); };
      auto rate = [&](double b) { return b / step(b) / double(d.tp); };  // tokens a second and GPU
      if (goal == Goal::throughput) {
        x.batch = 1;
        for (double b = 1;; b = std::min(2 * b, x.sequences)) {
          if (rate(b) > rate(x.batch)) x.batch = b;
          if (b >= x.sequences) break;
        }
      }
      x.tpot = step(x.batch);
      x.throughput = rate(x.batch);
      x.ttft = step_time(a, h, d, {Regime::prefill, 1, 0, context}).seconds();
      out.push_back(x);
    }
  std::stable_sort(out.begin(), out.end(), [&](const Fit& x, const Fit& y) { return better(x, y, goal); });
  return out;
}

int64_t fewest_gpus(const Architecture& a, const Hardware& h, int64_t most, double context, const Deployment& like) {
  for (int64_t gpus = 1; gpus <= most; gpus *= 2)
    for (const Deployment& d : layouts(a, gpus, like))
      if (memory_of(a, h, d).sequences(context) >= 1) return gpus;
  return 0;
}

}  // namespace k3::plan

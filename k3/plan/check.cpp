#include "k3/plan/check.h"

#include <algorithm>
#include <cmath>

#include "k3/core/error.h"
#include "k3/plan/time.h"

namespace k3::plan {

namespace {

constexpr double us = 1e-6, ms = 1e-3;

Deployment layout(int64_t tp, int64_t dp, int64_t ep, double rho) {
  Deployment d;
  d.gpus = tp * dp, d.tp = tp, d.dp = dp, d.ep = ep, d.rho = rho;
  return d;
}

constexpr double kRealText = 0.55;  // rho of text: how independently a batch's tokens choose experts

void kernels(std::vector<Target>& out) {
  const Architecture k3 = load_architecture("k3"), ds = load_architecture("deepseek-v3");
  const Hardware h200 = load_hardware("h200"), b300 = load_hardware("b300");
  auto add = [&](std::string name, double measured_us, double seconds) {
    out.push_back({"kernels", std::move(name), "s", measured_us * us, seconds, 0.25});
  };
  const double tokens[] = {1, 8, 16, 64, 256, 1024, 8192};
  const double b300_tp[] = {32, 91.7, 150.8, 303.5, 416.9, 610.6, 1269}, b300_ep[] = {30.8, 79.9, 125.3, 220.5, 354.9, 449.9, 842.5};
  const double h200_tp[] = {67.7, 175.9, 283, 564.9, 893, 1679, 7004};
  for (int i = 0; i < 7; ++i)
    add(fmt::format("K3 experts, B300, TP 8, {:.0f} tokens", tokens[i]), b300_tp[i], experts_seconds(k3, b300, layout(8, 1, 1, 1), tokens[i]));
  for (int i = 0; i < 7; ++i)
    add(fmt::format("K3 experts, B300, EP 8, {:.0f} tokens", tokens[i]), b300_ep[i], experts_seconds(k3, b300, layout(8, 1, 8, 1), tokens[i]));
  for (int i = 0; i < 7; ++i)
    add(fmt::format("K3 experts, H200, TP 8, {:.0f} tokens", tokens[i]), h200_tp[i], experts_seconds(k3, h200, layout(8, 1, 1, 1), tokens[i]));
  for (auto [batch, t] : {std::pair{1.0, 6.4}, {64.0, 36.8}, {1024.0, 532.8}})
    add(fmt::format("KDA decode, H200, 12 heads, batch {:.0f}", batch), t, kda_decode_seconds(h200, 12, 128, 4, batch));
  add("KDA decode, H200, 96 heads, batch 1024", 3572, kda_decode_seconds(h200, 96, 128, 4, 1024));
  add("KDA decode, B300, 96 heads, batch 1024", 2333, kda_decode_seconds(b300, 96, 128, 4, 1024));
  add("KDA prefill, H200, 96 heads, 8192 tokens", 890.5, kda_prefill_seconds(h200, 96, 128, 8192));
  add("KDA prefill, H200, 12 heads, 8192 tokens", 596.3, kda_prefill_seconds(h200, 12, 128, 8192));
  add("KDA prefill, B300, 12 heads, 8192 tokens", 512.9, kda_prefill_seconds(b300, 12, 128, 8192));
  add("MLA decode, H200, 16 heads, batch 64, 131,071", 2269, mla_decode_seconds(h200, ds.config, 16, 64, 131071));
  add("MLA decode, H200, 128 heads, batch 64, 131,071", 4069, mla_decode_seconds(h200, ds.config, 128, 64, 131071));
  const double sizes[] = {16384, 131072, 1048576, 8388608, 67108864};
  const double h200_ar[] = {4.15, 8.0, 19.3, 107.6, 563}, b300_ar[] = {5.7, 8.6, 18.7, 57.6, 395};
  for (int i = 0; i < 5; ++i)
    add(fmt::format("all-reduce of 8, H200, {:.0f} KiB", sizes[i] / 1024), h200_ar[i], all_reduce_seconds(h200, 8, sizes[i]));
  for (int i = 0; i < 5; ++i)
    add(fmt::format("all-reduce of 8, B300, {:.0f} KiB", sizes[i] / 1024), b300_ar[i], all_reduce_seconds(b300, 8, sizes[i]));
  for (auto [n, t] : {std::pair{6144.0, 17.5}, {3584.0, 12.0}, {16384.0, 36.5}})
    add(fmt::format("bf16 product 1 x 7168 -> {:.0f}, B300", n), t, gemm_seconds(b300, 1, 7168, n));
  add("bf16 product 8192 x 7168 -> 6144, H200", 939, gemm_seconds(h200, 8192, 7168, 6144));
  add("bf16 product 8192 x 7168 -> 6144, B300", 380, gemm_seconds(b300, 8192, 7168, 6144));
}

void serving(std::vector<Target>& out) {
  const Architecture k3 = load_architecture("k3"), k2 = load_architecture("k2"), k25 = load_architecture("k2", {"experts_format=int4"}),
                     ds = load_architecture("deepseek-v3");
  const Hardware b300 = load_hardware("b300"), gb300 = load_hardware("gb300"), mi355x = load_hardware("mi355x"), b200 = load_hardware("b200"),
                 h800 = load_hardware("h800"), h100 = load_hardware("h100"), h200 = load_hardware("h200");
  const Deployment tp8 = layout(8, 1, 1, kRealText);
  auto add = [&](std::string name, std::string unit, double measured, double predicted, double band, bool factor = false) {
    out.push_back({"serving", std::move(name), std::move(unit), measured, predicted, band, factor});
  };
  Users one = users_of(k3, b300, tp8, {1}), short_one = users_of(k3, b300, tp8, {1, 1024, 1024}), sixteen = users_of(k3, b300, tp8, {16});
  add("V1 K3, 8 x B300 TP 8, 8K/1K, 1 user: TPOT", "s", 8.51 * ms, one.tpot, 0.15);
  add("V1 the same, 1K/1K", "s", 8.49 * ms, short_one.tpot, 0.15);
  add("V2 the same, 8K/1K: TTFT", "s", 373.5 * ms, one.ttft, 0.12);
  add("V3 the same, 16 users: TTFT", "s", 3.539, sixteen.ttft, 0.15);
  add("V3 TPOT", "s", 19.47 * ms, sixteen.tpot, 0.15);
  add("V3 throughput a GPU", "token/s", 785, sixteen.throughput / 8, 0.15);
  add("V4 K3, 8 x GB300 TP 8, 1 user", "token/s", 111, 1 / users_of(k3, gb300, tp8, {1}).tpot, 0.15);
  add("V5 the same, draft of 7, 4.73 accepted", "token/s", 331, 1 / users_of(k3, gb300, tp8, {1, 8192, 1024, 8, 4.73, 2 * ms}).tpot, 0.15);
  Users draft = users_of(k3, b300, tp8, {1, 8192, 1024, 8, 5.5, 2 * ms});
  add("V6 K3, 8 x B300, draft of 7, 5.5 accepted: TPOT", "s", 2.84 * ms, draft.tpot, 0.15);
  add("V6 throughput a GPU", "token/s", 351, draft.throughput / 8, 0.15);
  add("V7 K3, 8 x MI355X TP 8, 2 users: TTFT", "s", 1.121, users_of(k3, mi355x, tp8, {2}).ttft, 0.30);
  add("V7 TPOT", "s", 20.86 * ms, users_of(k3, mi355x, tp8, {2}).tpot, 0.30);
  add("V8 K2.5 int4, 8 x B200 TP 8: step at batch 1", "s", 6.99 * ms, step_time(k25, b200, tp8, {Regime::decode, 1, 8704}).seconds(), 0.30);
  add("V8 step at batch 8", "s", 10.29 * ms, step_time(k25, b200, tp8, {Regime::decode, 8, 8704}).seconds(), 0.30);
  add("V8 prefill", "token/s", 40647, 8192 / step_time(k25, b200, tp8, {Regime::prefill, 1, 0, 8192}).seconds(), 0.12);
  add("V9 DeepSeek-V3, H800 EP 144, decode, 88 a GPU at 4989: a node of 8", "token/s", 14800,
      8 * 88 / step_time(ds, h800, layout(1, 144, 144, kRealText), {Regime::decode, 88, 4989}).seconds(), 0.25);
  for (auto [prompt, measured] : {std::pair{1024.0, 57674.0}, {4096.0, 50302.0}})
    add(fmt::format("V10 DeepSeek-V3, 32 x H100 EP 32, prefill of {:.0f}-token prompts: a node of 8", prompt), "token/s", measured,
        8 * 16384 / step_time(ds, h100, layout(1, 32, 32, 1), {Regime::prefill, 16384 / prompt, 0, prompt}).seconds(), 0.20);
  add("V11 K2, 96 x H200 EP 96, decode, 480 a GPU at 2050", "token/s", 288000,
      96 * 480 / step_time(k2, h200, layout(1, 96, 96, kRealText), {Regime::decode, 480, 2050}).seconds(), 0.25);
  const double k3_experts = 92.0 * 16 * 17547264;
  add("V12 K3, experts in the DDR4 of two sockets, decode", "token/s", 3, 1 / offload_seconds(k3_experts, 0, 0.3 * 256e9, 0, 0), 0.5, true);
  // trunk in 4 bits at 0.6 of the laptop's memory rate; random reads of experts at 0.75 of the disk's
  const double trunk = 0.53125 * double(parameters(k3).trunk_matrices) / (0.6 * 307e9);
  add("V13 K3 from a 12.8 GB/s disk, 37 % hits", "token/s", 0.54, 1 / offload_seconds(17.0e9, 0.37, 0.75 * 12.8e9, 0, trunk), 0.5, true);
}

void curves(std::vector<Target>& out) {
  Hardware h = load_hardware("h800");
  h.efficiency.host = 3.3 * ms;  // the paper's engine ran its steps without a graph
  const Architecture hybrid = load_architecture("kimi-linear-48b"), full = load_architecture("kimi-linear-48b", {"mixers=mla"});
  const Deployment tp8 = layout(8, 1, 1, kRealText);
  const double lengths[] = {4096, 131072, 524288}, full_tpot[] = {5.32, 7.67, 11.96}, hybrid_tpot[] = {5.09, 5.74, 6.66};
  const double full_prefill[] = {0, 2.004, 18.63}, hybrid_prefill[] = {0, 1.397, 8.067};
  for (int i = 0; i < 3; ++i) {
    auto decode = [&](const Architecture& a) { return step_time(a, h, tp8, {Regime::decode, 1, lengths[i]}).seconds(); };
    auto prefill = [&](const Architecture& a) { return step_time(a, h, tp8, {Regime::prefill, 1, 0, lengths[i]}).seconds(); };
    const std::string at = fmt::format("{:.0f}K", lengths[i] / 1024);
    out.push_back({"curves", "Kimi-Linear's size, all MLA, TPOT at " + at, "s", full_tpot[i] * ms, decode(full), 0.15});
    out.push_back({"curves", "Kimi-Linear, TPOT at " + at, "s", hybrid_tpot[i] * ms, decode(hybrid), 0.15});
    if (i == 0) continue;
    out.push_back({"curves", "all MLA, prefill of " + at, "s", full_prefill[i], prefill(full), 0.15});
    out.push_back({"curves", "Kimi-Linear, prefill of " + at, "s", hybrid_prefill[i], prefill(hybrid), 0.15});
  }
}

void training(std::vector<Target>& out) {
  const double flops = training_flops(load_architecture("deepseek-v3"), 4096).total();
  out.push_back({"training", "V15 DeepSeek-V3, GB300 bf16, 3848 token/s a GPU: FLOP/s", "FLOP/s", 961e12, 3848 * flops, 0.01});
  out.push_back(
      {"training", "V16 DeepSeek-V3, 14.8 T tokens in 2.664 M H800-hours: FLOP/s a GPU", "FLOP/s", 386e12, 14.8e12 / (2.664e6 * 3600) * flops, 0.01});
  out.push_back({"training", "V17 DeepSeek-V3, 256 x H100, 1002 token/s a GPU: FLOP/s", "FLOP/s", 251e12, 1002 * flops, 0.01});
}

}  // namespace

double offload_seconds(double expert_bytes, double hit_rate, double byte_rate, double compute, double rest) {
  return std::max((1 - hit_rate) * expert_bytes / byte_rate, compute) + rest;
}

std::vector<Target> published_targets() {
  std::vector<Target> out;
  kernels(out), serving(out), curves(out), training(out);
  return out;
}

double median_error(const std::vector<Target>& targets, const std::string& group) {
  std::vector<double> e;
  for (const Target& t : targets)
    if (t.group == group) e.push_back(std::fabs(t.error()));
  std::sort(e.begin(), e.end());
  return e.empty() ? 0 : (e[(e.size() - 1) / 2] + e[e.size() / 2]) / 2;
}

std::string table(const std::vector<Target>& targets) {
  size_t width = 0;
  for (const Target& t : targets) width = std::max(width, t.name.size());
  std::string out, group;
  for (const Target& t : targets) {
    if (t.group != group) {
      group = t.group;
      out += fmt::format("{}{} (median error {:.1f} %)\n  {:<{}}  {:>14}  {:>14}  {:>8}  {}\n", out.empty() ? "" : "\n", group,
                         100 * median_error(targets, group), "", width, "measured", "predicted", "error", "allowed");
    }
    out += fmt::format("  {:<{}}  {:>14}  {:>14}  {:>+7.1f}%  {}{:.0f} %{}\n", t.name, width, show(t.measured, t.unit), show(t.predicted, t.unit),
                       100 * t.error(), t.factor ? "x/÷ 1+" : "±", 100 * t.band, t.holds() ? "" : "  OUTSIDE");
  }
  return out;
}

}  // namespace k3::plan

#include "k3/plan/measure.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>

#include "k3/core/error.h"
#include "k3/core/file.h"
#include "k3/core/memory.h"
#include "k3/core/threads.h"
#include "k3/ops/activation/activation.h"
#include "k3/ops/linear/product.h"

namespace k3::plan {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

// The best of repeated calls during about `budget` seconds: other programs only ever add time.
double best(double budget, const std::function<void()>& f) {
  f();
  double least = 1e300;
  for (auto start = Clock::now(); seconds_since(start) < budget;) {
    auto t = Clock::now();
    f();
    least = std::min(least, seconds_since(t));
  }
  return least;
}

double triad(size_t floats, double budget) {
  Buffer memory(3 * floats * sizeof(float));
  float *a = memory.view(DType::f32, {int64_t(3 * floats)}).f32(), *b = a + floats, *c = b + floats;
  for (size_t i = 0; i < 3 * floats; ++i) a[i] = float(i & 7);
  const int64_t block = 1 << 14;
  double t = best(budget, [&] {
    parallel_blocks(int64_t(floats), block, [&](int64_t x, int64_t y) {
      for (int64_t i = x; i < y; ++i) a[i] = b[i] + 3 * c[i];
    });
  });
  return 12 * double(floats) / t;
}

double product_seconds(int64_t m, int64_t n, int64_t k, double budget) {
  Buffer memory(size_t(m * k + n * k + m * n) * sizeof(float));
  float *x = memory.view(DType::f32, {m * k + n * k + m * n}).f32(), *w = x + m * k, *y = w + n * k;
  for (int64_t i = 0; i < m * k + n * k; ++i) x[i] = float(i % 13) * 0.01f;
  return best(budget, [&] { product(x_wt(x, w, y, m, n, k)); });
}

double disk(double budget) {
  const std::string path = (std::filesystem::temp_directory_path() / fmt::format("k3-measure-{}", getpid())).string();
  std::vector<char> block(size_t(1) << 24, 'x');
  double rate = 0;
  if (FILE* f = std::fopen(path.c_str(), "wb")) {
    auto start = Clock::now();
    size_t bytes = 0;
    while (seconds_since(start) < budget && bytes < (size_t(1) << 30)) bytes += std::fwrite(block.data(), 1, block.size(), f);
    std::fflush(f);
    if (fsync(fileno(f)) == 0) rate = double(bytes) / seconds_since(start);
    std::fclose(f);
  }
  std::remove(path.c_str());
  return rate;
}

}  // namespace

Machine measure(double budget) {
  Machine m;
  m.memory = double(address_space());
  m.triad = triad(size_t(1) << 25, budget);
  m.cached = triad(size_t(1) << 16, budget / 2);
  m.product = 2.0 * 1024 * 1024 * 1024 / product_seconds(1024, 1024, 1024, budget);
  m.read = 4.0 * 4096 * 4096 / product_seconds(1, 4096, 4096, budget);
  Arena arena(size_t(64) << 20);
  Context c{.arena = &arena};
  Var x(c, DType::f32, {256, 1024}), one(c, DType::f32, {1, 16});
  std::memset(x.value().data(), 0, x.value().bytes()), std::memset(one.value().data(), 0, one.value().bytes());
  const size_t mark = arena.mark();
  m.element = 4.0 * 256 * 1024 / best(budget / 2, [&] { sigmoid(x), arena.rewind(mark); });
  m.launch = best(budget / 4, [&] { sigmoid(one), arena.rewind(mark); });
  m.disk = disk(budget);
  return m;
}

std::string measure_this_machine() {
  const Machine m = measure();
  using nlohmann::ordered_json;
  auto round = [](double v) { return std::stod(fmt::format("{:.4g}", v)); };
  const double us = round(std::max(0.1, m.launch * 1e6)), read = round(std::min(1.0, m.read / m.triad)), all = 1.0;
  auto experts = [&] { return ordered_json{{"tau_us", us}, {"hbm", read}, {"flops", 0.7}, {"math", "bf16"}}; };
  ordered_json j = {{"name", fmt::format("this machine, {} threads", thread_count())},
                    {"kind", "measured"},
                    {"note", "k3 plan --measure: triad, float32 products (entered as bf16_tflops: this engine computes in float32), disk"},
                    {"memory_gb", round(m.memory / 1e9)},
                    {"hbm_tb_s", round(m.triad / 1e12)},
                    {"bf16_tflops", round(m.product / 1e12)},
                    {"link_domain", 1},
                    {"disk_gb_s", round(m.disk / 1e9)},
                    {"efficiency_constants",
                     {{"source", "measured; products and reads at the rates above"},
                      {"gemm", {{"tau_us", us}, {"tau_standalone_us", us}, {"hbm", read}, {"flops", all}}},
                      {"experts", {{"w4", experts()}, {"fp8", experts()}, {"bf16", experts()}}},
                      {"kda_decode", {{"tau_us", us}, {"hbm", 0.7}, {"token_us", us}}},
                      {"kda_prefill", {{"tau_us", us}, {"chunk_us", us}, {"tflops", round(m.product / 2e12)}}},
                      {"mla_decode", {{"tau_us", us}, {"hbm", 0.8}, {"flops", 0.5}}},
                      {"mla_prefill", {{"tau_us", us}, {"flops", 0.7}}},
                      {"all_reduce", {{"small_tau_us", 0}, {"small_link", 1}, {"large_tau_us", 0}, {"large_link", 1}, {"limit_bytes", 0}}},
                      {"all_to_all", {{"decode_tau_us", 0}, {"decode_net", 1}, {"prefill_tau_us", 0}, {"prefill_net", 1}, {"prefill_link", 1}}},
                      {"rest_us", round(20 * us)},
                      {"host_ms", 0}}}};
  return j.dump(2) + "\n";
}

}  // namespace k3::plan

#pragma once
// The subcommands of `k3 bench`, each in a file of its own. Every figure is printed beside the machine's own limit, measured in the same run.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <string>
#include <vector>

namespace k3 {

inline double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

class Model;
struct GpuDecodeFlags {
  std::vector<int64_t> rows = {1, 8, 33};
  int64_t context = 512, steps = 64;
  bool json = false;
};
void bench_decode_on_gpu(Model& model, const std::string& what, const GpuDecodeFlags& flags);

void add_bench_decode(CLI::App& bench);
void add_bench_ops(CLI::App& bench);
void add_bench_train(CLI::App& bench);

}  // namespace k3

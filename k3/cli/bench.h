#pragma once
// The subcommands of `k3 bench`, each in a file of its own. Every figure is printed beside the machine's own limit, measured in the same run.
#include <CLI/CLI.hpp>

namespace k3 {

void add_bench_decode(CLI::App& bench);
void add_bench_ops(CLI::App& bench);
void add_bench_train(CLI::App& bench);

}  // namespace k3

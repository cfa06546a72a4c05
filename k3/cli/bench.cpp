#include "k3/cli/bench.h"

#include "k3/cli/commands.h"

namespace k3 {

void add_bench(CLI::App& app) {
  CLI::App* bench = app.add_subcommand("bench", "how fast this machine runs the model, as a share of what it could");
  bench->require_subcommand(1);
  add_bench_decode(*bench), add_bench_ops(*bench), add_bench_train(*bench);
}

}  // namespace k3

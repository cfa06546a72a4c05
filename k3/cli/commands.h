#pragma once
// One function a command, each in a file of its own: adds the subcommand with its flags, its example, and what it does. A fault is a
// k3::Error; main turns it into one line and exit code 1 (2 for a wrong command line).
#include <CLI/CLI.hpp>

#include "k3/core/device.h"

namespace k3 {

// --device cpu or cuda, and --bf16 for the latter; where there is no GPU to compute on, cuda is an Error before anything is read
void add_device(CLI::App* command, Device& device, bool& bf16);

void add_train(CLI::App& app);
void add_eval(CLI::App& app);
void add_generate(CLI::App& app);
void add_inspect(CLI::App& app);
void add_verify(CLI::App& app);
void add_tokenize(CLI::App& app);
void add_plan(CLI::App& app);
void add_fabricate(CLI::App& app);
void add_chat(CLI::App& app);
void add_lab(CLI::App& app);
void add_bench(CLI::App& app);

}  // namespace k3

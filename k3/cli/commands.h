#pragma once
// One function a command, each in a file of its own: adds the subcommand with its flags, its example, and what it does. A fault is a
// k3::Error; main turns it into one line and exit code 1 (2 for a wrong command line).
#include <CLI/CLI.hpp>

namespace k3 {

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

}  // namespace k3

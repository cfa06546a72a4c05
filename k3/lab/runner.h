#pragma once
// Runs experiments: units that are not stored yet, one a core; then the conclusion, a table and a page.
//
//   OUT/NAME/runs/KEY.json    one unit: what decided it, its seconds, its result; written whole, kept by the next run
//   OUT/NAME/results.json     question, answer, notes, tables, and all results
//   OUT/NAME/table.txt        OUT/NAME/report.html (needs nothing else)
#include <functional>
#include <string>
#include <vector>

#include "k3/lab/experiment.h"

namespace k3::lab {

struct Request {
  std::vector<std::string> names;  // "all": every one
  Setting setting;
  std::string out;
};
struct Hooks {
  std::function<void(const std::string&)> line = {};      // something ended
  std::function<void(const std::string&)> progress = {};  // now and then
  std::function<bool()> stop = {};                        // asked between reports of progress
};
// Error "[lab] stopped; ..." when asked to stop: finished units are kept.
void run(const Request& request, const Hooks& hooks);

std::string table_text(const Table& table);
std::string page(const Experiment& e, const Findings& f, const std::string& command);

}  // namespace k3::lab

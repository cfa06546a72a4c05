#include "k3/lab/runner.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <map>
#include <mutex>
#include <utility>

#include "k3/core/error.h"
#include "k3/core/file.h"
#include "k3/core/progress.h"
#include "k3/core/threads.h"

namespace k3::lab {

namespace {

using Clock = std::chrono::steady_clock;
double since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

struct Work {
  const Experiment* experiment;
  std::vector<Unit> units;
  Results done;
};

// A stored result, if it is of this very unit.
bool stored(const std::string& path, const json& what, json& result) {
  if (!std::filesystem::exists(path)) return false;
  json j = json::parse(read_file(path), nullptr, false);
  if (!j.is_object() || j.value("what", json()) != what || !j.contains("result")) return false;
  result = j["result"];
  return true;
}

// Of all units that are to be run, from any thread.
class Progress {
 public:
  Progress(const std::vector<Work>& all, const Hooks& hooks, const std::string& out) : hooks_(hooks), out_(out) {
    for (const Work& w : all)
      for (const Unit& u : w.units)
        if (!w.done.contains(u.key)) work_ += u.work, ++count_;
  }
  void see(const char* experiment, const Unit& u, double part) {
    std::lock_guard lock(mutex_);
    if (hooks_.stop && hooks_.stop()) fail("[lab] stopped; finished runs are kept in {}, and the same command goes on", out_);
    done_ += u.work * (part - std::exchange(part_[&u], part));
    if (!hooks_.progress) return;
    const double seconds = since(start_);
    hooks_.progress(fmt::format("{} {}  {:.0f} %  run {} of {}  {} left", experiment, u.key, 100 * part, ended_ + 1, count_,
                                done_ > 0 && seconds > 1 ? duration_text(seconds / done_ * (work_ - done_)) : "?"));
  }
  void end(const Unit& u) {
    std::lock_guard lock(mutex_);
    done_ += u.work * (1 - std::exchange(part_[&u], 1.0)), ++ended_;
  }

 private:
  const Hooks& hooks_;
  const std::string out_;
  const Clock::time_point start_ = Clock::now();
  std::mutex mutex_;
  std::map<const Unit*, double> part_;
  double work_ = 0, done_ = 0;
  size_t count_ = 0, ended_ = 0;
};

}  // namespace

std::string table_text(const Table& t) {
  std::vector<size_t> width(t.columns.size(), 0);
  auto see = [&](const std::vector<std::string>& row) {
    for (size_t i = 0; i < row.size() && i < width.size(); ++i) width[i] = std::max(width[i], row[i].size());
  };
  see(t.columns);
  for (const auto& r : t.rows) see(r);
  auto line = [&](const std::vector<std::string>& row) {
    std::string s;
    for (size_t i = 0; i < row.size(); ++i) s += i + 1 == row.size() ? row[i] : fmt::format("{:<{}}  ", row[i], width[i]);
    return s + "\n";
  };
  std::string out = t.title + "\n" + line(t.columns);
  for (const auto& r : t.rows) out += line(r);
  return out;
}

std::string page(const Experiment& e, const Findings& f, const std::string& command) {
  std::string out = chart::page_head(fmt::format("{}: {}", e.name, e.question));
  out += "<p class='answer'>" + chart::escaped(f.answer) + "</p>\n<p><code>" + chart::escaped(command) + "</code></p>\n<ul>\n";
  for (const std::string& n : f.notes) out += "<li>" + chart::escaped(n) + "</li>\n";
  out += "</ul>\n";
  for (const Chart& c : f.charts) out += chart::svg(c);
  for (const Table& t : f.tables) {
    out += "<figure class='scroll'><figcaption>" + chart::escaped(t.title) + "</figcaption><table><tr>";
    for (const std::string& c : t.columns) out += "<th>" + chart::escaped(c) + "</th>";
    for (const auto& r : t.rows) {
      out += "</tr>\n<tr>";
      for (const std::string& c : r) out += "<td>" + chart::escaped(c) + "</td>";
    }
    out += "</tr></table></figure>\n";
  }
  return out + "</html>\n";
}

void run(const Request& request, const Hooks& hooks) {
  K3_CHECK(!request.names.empty(), "[lab] name an experiment, or all (see k3 lab list)");
  K3_CHECK(request.setting.seeds >= 1 && request.setting.seeds <= 100, "[lab] --seeds is {}; it must be 1 to 100", request.setting.seeds);
  std::vector<Work> all;
  auto want = [&](const Experiment& e) {
    for (const Work& w : all)
      if (w.experiment->name == std::string(e.name)) return;
    all.push_back({&e, e.units(request.setting), {}});
  };
  for (const std::string& name : request.names) {
    if (name == "all")
      for (const Experiment& e : experiments()) want(e);
    else
      want(find(name));
  }
  auto line = [&](const std::string& s) {
    if (hooks.line) hooks.line(s);
  };
  size_t kept = 0;
  for (Work& w : all)
    for (const Unit& u : w.units) {
      json result;
      if (stored(fmt::format("{}/{}/runs/{}.json", request.out, w.experiment->name, u.key), u.what, result)) w.done[u.key] = result, ++kept;
    }
  if (kept) line(fmt::format("{} finished runs kept", kept));
  const auto start = Clock::now();
  Progress progress(all, hooks, request.out);
  for (Work& w : all) {
    const std::string folder = request.out + "/" + w.experiment->name;
    std::filesystem::create_directories(folder + "/runs");
    std::vector<const Unit*> todo;
    for (const Unit& u : w.units)
      if (!w.done.contains(u.key)) todo.push_back(&u);
    std::stable_sort(todo.begin(), todo.end(), [](const Unit* a, const Unit* b) { return a->work > b->work; });  // so that the cores end together
    std::mutex mutex;
    auto run_unit = [&](int64_t i) {
      const Unit& u = *todo[size_t(i)];
      const auto began = Clock::now();
      json result = u.run([&](double part) { progress.see(w.experiment->name, u, part); });
      progress.end(u);
      write_file(folder + "/runs/" + u.key + ".json", json{{"what", u.what}, {"seconds", since(began)}, {"result", result}}.dump());
      std::lock_guard lock(mutex);
      w.done[u.key] = std::move(result);
    };
    // One unit a core: models this small leave nothing to share inside a step, and their bits do not depend on it. A GPU has one stream.
    if (request.setting.device == Device::cpu)
      parallel_for(int64_t(todo.size()), [&](int64_t n) { run_unit(n); });
    else
      for (int64_t i = 0; i < int64_t(todo.size()); ++i) run_unit(i);
    const Findings f = w.experiment->conclude(request.setting, w.done);
    const std::string command =
        fmt::format("k3 lab run {}{}{}{} --seeds {} --out OUT", w.experiment->name, request.setting.quick ? " --quick" : "",
                    request.setting.device == Device::cuda ? " --device cuda" : "", request.setting.bf16 ? " --bf16" : "", request.setting.seeds);
    json tables = json::array();
    std::string text = fmt::format("{}: {}\n{}\n", w.experiment->name, w.experiment->question, f.answer);
    for (const std::string& n : f.notes) text += "- " + n + "\n";
    for (const Table& t : f.tables) {
      text += "\n" + table_text(t);
      tables.push_back({{"title", t.title}, {"columns", t.columns}, {"rows", t.rows}});
    }
    json results = json::object();
    for (const auto& [key, value] : w.done) results[key] = value;
    write_file(folder + "/results.json", json{{"experiment", w.experiment->name},
                                              {"question", w.experiment->question},
                                              {"command", command},
                                              {"answer", f.answer},
                                              {"notes", f.notes},
                                              {"tables", tables},
                                              {"results", results}}
                                             .dump(1));
    write_file(folder + "/table.txt", text);
    write_file(folder + "/report.html", page(*w.experiment, f, command));
    line(fmt::format("{}: {}\n  {}/report.html", w.experiment->name, f.answer, folder));
  }
  line(fmt::format("{} {} in {}", all.size(), all.size() == 1 ? "experiment" : "experiments", duration_text(since(start))));
}

}  // namespace k3::lab

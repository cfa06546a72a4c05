#include "k3/train/run_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "k3/core/error.h"
#include "k3/core/file.h"
#include "k3/model/checkpoint.h"

namespace k3 {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

constexpr size_t kKept = 2;

void flush_folder(const std::string& path) {
  int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  K3_CHECK(fd >= 0 && fsync(fd) == 0, "[train] cannot flush the folder {}: {}", path, std::strerror(errno));
  close(fd);
}

void rename_folder(const std::string& from, const std::string& to) {
  K3_CHECK(std::rename(from.c_str(), to.c_str()) == 0, "[train] cannot rename {} to {}: {}", from, to, std::strerror(errno));
}

std::vector<std::string> step_folders(const std::string& path) {
  std::vector<std::string> names;
  for (const auto& e : fs::directory_iterator(path)) {
    std::string name = e.path().filename();
    if (e.is_directory() && name.starts_with("step-") && name.size() > 5 && name.find_first_not_of("0123456789", 5) == std::string::npos)
      names.push_back(name);
  }
  std::sort(names.begin(), names.end(), [](const std::string& a, const std::string& b) { return std::stoll(a.substr(5)) < std::stoll(b.substr(5)); });
  return names;
}

}  // namespace

std::string step_name(int64_t step) { return fmt::format("step-{:06}", step); }

std::optional<std::string> newest_step(const std::string& out) {
  if (!fs::is_directory(out)) return std::nullopt;
  if (fs::exists(out + "/LATEST")) return resolve_snapshot(out);
  auto all = step_folders(out);
  if (all.empty()) return std::nullopt;
  return out + "/" + all.back();
}

RunFolder::RunFolder(const std::string& path) : path_(path) {
  std::error_code problem;
  fs::create_directories(path, problem);
  K3_CHECK(fs::is_directory(path), "[train] cannot make the folder {}: {}", path, problem.message());
  lock_ = open(file("lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  K3_CHECK(lock_ >= 0, "[train] cannot write into {}: {}", path, std::strerror(errno));
  if (flock(lock_, LOCK_EX | LOCK_NB) != 0) {
    close(lock_);
    fail("[train] another run is writing into {}; stop it or choose another --out", path);
  }
}

RunFolder::~RunFolder() { close(lock_); }  // which gives the lock back, as does a kill

std::vector<std::string> RunFolder::remove_parts() {
  std::vector<std::string> parts;
  for (const auto& e : fs::directory_iterator(path_)) {
    std::string name = e.path().filename();
    bool ours = name.starts_with("step-");
    for (const char* file : {"LATEST", "tokens.bin", "metrics.jsonl", "report.html"}) ours |= name == std::string(file) + ".part";
    if (ours && name.ends_with(".part")) parts.push_back(name);
  }
  for (const std::string& name : parts) fs::remove_all(path_ + "/" + name);
  return parts;
}

void RunFolder::save(int64_t step, const std::function<void(const std::string&)>& write) {
  const std::string name = step_name(step), whole = path_ + "/" + name, part = whole + ".part", old = whole + ".old.part";
  fs::remove_all(part);
  try {
    fs::create_directory(part);
    write(part);
    flush_folder(part);
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(part, ignored);  // gives its space back on a full disk
    throw;
  }
  fs::remove_all(old);
  if (fs::exists(whole)) rename_folder(whole, old);  // the same step of a course that was given up by pointing LATEST further back
  rename_folder(part, whole);
  flush_folder(path_);
  write_file(file("LATEST"), name + "\n");
  flush_folder(path_);
  fs::remove_all(old);
  std::vector<std::string> all = step_folders(path_);
  std::erase_if(all, [&](const std::string& n) { return std::stoll(n.substr(5)) > step; });
  for (size_t i = 0; i + kKept < all.size(); ++i) {
    rename_folder(path_ + "/" + all[i], path_ + "/" + all[i] + ".old.part");  // a folder that is half removed must not look complete
    fs::remove_all(path_ + "/" + all[i] + ".old.part");
  }
}

Metrics::Metrics(const std::string& path, int64_t last_step) : path_(path) {
  if (fs::exists(path)) {
    const std::string all = read_file(path);
    std::string kept;
    for (size_t at = 0; at < all.size();) {
      size_t end = all.find('\n', at);
      if (end == std::string::npos) break;  // cut
      json line = json::parse(all.begin() + std::ptrdiff_t(at), all.begin() + std::ptrdiff_t(end), nullptr, false);
      if (line.is_object() && line.value("step", int64_t(0)) <= last_step) kept.append(all, at, end + 1 - at);
      at = end + 1;
    }
    if (kept != all) write_file(path, kept);
  }
  fd_ = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  K3_CHECK(fd_ >= 0, "[train] cannot write {}: {}", path, std::strerror(errno));
}

Metrics::~Metrics() { close(fd_); }

void Metrics::add(const std::string& text) {
  const std::string line = text + "\n";
  for (size_t at = 0; at < line.size();) {
    ssize_t n = ::write(fd_, line.data() + at, line.size() - at);
    if (n < 0 && errno == EINTR) continue;
    K3_CHECK(n > 0, "[train] cannot write {}: {}; the checkpoints are safe: free some space and go on with --resume", path_,
             std::strerror(n < 0 ? errno : ENOSPC));
    at += size_t(n);
  }
}

}  // namespace k3

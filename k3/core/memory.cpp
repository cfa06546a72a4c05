#include "k3/core/memory.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>

namespace k3 {

namespace fs = std::filesystem;

namespace {

constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();

// Files below /proc and /sys have no size, so they can't be mapped. Empty when the file isn't there.
std::string text_of(const std::string& path) {
  std::ifstream f(path);
  std::ostringstream text;
  text << f.rdbuf();
  return text.str();
}

// The number after `key` at the beginning of a line; `missing` if there is none.
uint64_t field(const std::string& text, const std::string& key, uint64_t missing) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with(key)) {
      const size_t at = line.find_first_of("0123456789", key.size());
      return at == line.npos ? missing : std::stoull(line.substr(at));
    }
  return missing;
}

uint64_t number(const std::string& path) {
  const std::string text = text_of(path);
  return !text.empty() && std::isdigit(static_cast<unsigned char>(text[0])) ? std::stoull(text) : kUnlimited;
}

// What is left below one limit. Cached file pages count as used there, but are given up on demand.
uint64_t left_below(uint64_t limit, uint64_t used, uint64_t cached) {
  if (limit == kUnlimited || used == kUnlimited) return kUnlimited;
  return limit - std::min(limit, used - std::min(used, cached));
}

}  // namespace

uint64_t available_memory(const std::string& root) {
  const uint64_t kib = field(text_of(root + "/proc/meminfo"), "MemAvailable:", kUnlimited >> 10);
  uint64_t least = kib == kUnlimited >> 10 ? kUnlimited : kib << 10;
  std::istringstream groups(text_of(root + "/proc/self/cgroup"));  // number:controllers:path
  for (std::string line; std::getline(groups, line);) {
    const size_t a = line.find(':'), b = line.find(':', a + 1);
    if (a == line.npos || b == line.npos) continue;
    const std::string controllers = line.substr(a + 1, b - a - 1);
    const bool v2 = controllers.empty();
    if (!v2 && controllers != "memory") continue;
    const std::string top = root + "/sys/fs/cgroup" + (v2 ? "" : "/memory");
    for (fs::path at = line.substr(b + 1);; at = at.parent_path()) {  // every group above has its own limit
      const std::string dir = top + (at == "/" ? "" : at.string());
      const std::string stat = text_of(dir + "/memory.stat");
      const uint64_t left = v2 ? left_below(number(dir + "/memory.max"), number(dir + "/memory.current"),
                                            field(stat, "inactive_file ", 0) + field(stat, "active_file ", 0))
                               : left_below(number(dir + "/memory.limit_in_bytes"), number(dir + "/memory.usage_in_bytes"),
                                            field(stat, "total_inactive_file ", 0) + field(stat, "total_active_file ", 0));
      least = std::min(least, left);
      if (!at.has_relative_path()) break;
    }
    // inside of a container the path may be the host's, and the container's own group mounted at the top: that one was read last
  }
  return least;
}

size_t address_space() { return size_t(sysconf(_SC_PHYS_PAGES)) * size_t(sysconf(_SC_PAGE_SIZE)); }
uint64_t resident_memory() { return field(text_of("/proc/self/status"), "VmRSS:", 0) << 10; }
uint64_t peak_resident_memory() { return field(text_of("/proc/self/status"), "VmHWM:", 0) << 10; }

}  // namespace k3

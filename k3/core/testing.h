#pragma once
// What tests of every folder share: how an Error is asserted, and a folder that goes away.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <string>

#include "k3/core/error.h"

namespace k3::testing {

inline auto throws_error(const std::string& part) { return ::testing::ThrowsMessage<Error>(::testing::HasSubstr(part)); }

class TemporaryFolder {
 public:
  enum Start { made, absent };  // absent: a path where nothing is yet
  explicit TemporaryFolder(Start start = made) {
    static std::atomic<int> count = 0;
    path = std::filesystem::path(::testing::TempDir()) / ("k3-test-" + std::to_string(getpid()) + "-" + std::to_string(count++));
    std::filesystem::remove_all(path);
    if (start == made) std::filesystem::create_directories(path);
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  std::string str() const { return path.string(); }
  std::string operator/(const std::string& name) const { return (path / name).string(); }

  std::filesystem::path path;
};

}  // namespace k3::testing

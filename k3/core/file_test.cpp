#include "k3/core/file.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

namespace k3 {
namespace {

// A read beyond the end of a file that shrank is a signal to the process: only a sentence and an orderly end are left to give.
TEST(file, a_mapped_file_that_is_cut_while_in_use_is_named) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  const std::string path = std::filesystem::temp_directory_path() / ("k3-cut-" + std::to_string(getpid()));
  write_file(path, std::string(100000, 'x'));
  EXPECT_EXIT(
      {
        explain_lost_pages();
        MappedFile f(path);
        if (truncate(path.c_str(), 10) != 0) _exit(3);
        volatile char c = f.data()[90000];
        (void)c;
        _exit(4);
      },
      ::testing::ExitedWithCode(1), "k3-cut-[0-9]+ became shorter while it was used");
  std::filesystem::remove(path);
}

TEST(file, a_write_that_is_not_finished_leaves_the_old_bytes) {
  const std::string path = std::filesystem::temp_directory_path() / ("k3-old-" + std::to_string(getpid()));
  write_file(path, "old");
  {
    AtomicFile f(path);
    f.write("new");
  }
  EXPECT_EQ(read_file(path), "old");
  EXPECT_FALSE(std::filesystem::exists(path + ".part"));
  write_file(path, "new");
  EXPECT_EQ(read_file(path), "new");
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace k3

#pragma once
// Files: mapped for reading, and written so that a reader never sees half of one.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace k3 {

// A whole file mapped read-only. Move-only.
class MappedFile {
 public:
  MappedFile() = default;
  explicit MappedFile(const std::string& path);  // Error when it is missing or no regular file
  ~MappedFile();
  MappedFile(MappedFile&& o) noexcept { *this = std::move(o); }
  MappedFile& operator=(MappedFile&& o) noexcept;
  const char* data() const { return data_; }
  size_t size() const { return size_; }
  std::string_view text() const { return {data_, size_}; }

 private:
  const char* data_ = nullptr;
  size_t size_ = 0;
  int listed_ = -1;  // for explain_lost_pages()
};

// From this call on a page of a mapped file that can't be had any more (the file was cut while it was in use, or its disk fails) ends the program
// with a sentence that names the file; without it the system would end it without one.
void explain_lost_pages();

std::string read_file(const std::string& path);

// Where from `at` on nothing was ever written to a file, so that it reads as zeros and takes no space: the hole's first byte; the file's size when
// there is none, or the file system cannot say.
uint64_t first_hole(const std::string& path, uint64_t at);

// Writes to a temporary beside `path`, flushes it to the disk, then renames: `path` holds the old bytes or the new ones, never a mix.
// A full disk is an Error that says how much was wanted, and leaves nothing behind.
class AtomicFile {
 public:
  explicit AtomicFile(const std::string& path);
  ~AtomicFile();  // without commit(): the temporary is removed
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  void write(const void* data, size_t bytes);
  void write(std::string_view text) { write(text.data(), text.size()); }
  void commit();

 private:
  void flush();
  std::string path_, temporary_;
  std::vector<char> pending_;
  size_t written_ = 0;
  int fd_ = -1;
};
void write_file(const std::string& path, std::string_view text);

// 64-bit FNV-1a over 8-byte words: a checksum against damage, not against malice.
uint64_t checksum(const void* data, size_t bytes, uint64_t seed = 0xcbf29ce484222325ull);

}  // namespace k3

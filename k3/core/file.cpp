#include "k3/core/file.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "k3/core/error.h"

namespace k3 {

namespace {

// The newest mappings, for a signal handler: no locks, no memory of its own.
struct Listed {
  std::atomic<const char*> data{nullptr};
  size_t size = 0;
  char path[512] = {};
};
Listed g_listed[256];

int list_mapping(const char* data, size_t size, const std::string& path) {
  for (int i = 0; i < 256; ++i) {
    const char* none = nullptr;
    if (!g_listed[i].data.compare_exchange_strong(none, data)) continue;
    g_listed[i].size = size;
    std::strncpy(g_listed[i].path, path.c_str(), sizeof g_listed[i].path - 1);
    return i;
  }
  return -1;
}

void on_lost_page(int, siginfo_t* info, void*) {
  auto say = [](const char* text) { [[maybe_unused]] ssize_t n = write(STDERR_FILENO, text, std::strlen(text)); };
  const char* at = static_cast<const char*>(info->si_addr);
  const char* path = "a mapped file";
  for (const Listed& l : g_listed) {
    const char* data = l.data.load();
    if (data && at >= data && at < data + l.size) path = l.path;
  }
  say("\nk3: [file] "), say(path), say(" became shorter while it was used, or its disk can't be read; put it back and run again\n");
  _exit(1);
}

}  // namespace

void explain_lost_pages() {
  struct sigaction action {};
  action.sa_sigaction = on_lost_page;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGBUS, &action, nullptr);
}

MappedFile::MappedFile(const std::string& path) {
  int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a FIFO without a writer would wait here
  K3_CHECK(fd >= 0, "[file] cannot open {}: {}", path, std::strerror(errno));
  struct stat st {};
  if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
    close(fd);
    fail("[file] {} is not a regular file", path);
  }
  size_ = size_t(st.st_size);
  if (size_) {
    void* p = mmap(nullptr, size_, PROT_READ, MAP_SHARED, fd, 0);
    int problem = errno;
    close(fd);
    K3_CHECK(p != MAP_FAILED, "[file] cannot map {} ({} bytes): {}", path, size_, std::strerror(problem));
    data_ = static_cast<const char*>(p);
    listed_ = list_mapping(data_, size_, path);
  } else {
    close(fd);
  }
}

MappedFile::~MappedFile() {
  if (listed_ >= 0) g_listed[listed_].data = nullptr;
  if (data_) munmap(const_cast<char*>(data_), size_);
}

MappedFile& MappedFile::operator=(MappedFile&& o) noexcept {
  std::swap(data_, o.data_);
  std::swap(size_, o.size_);
  std::swap(listed_, o.listed_);
  return *this;
}

std::string read_file(const std::string& path) {
  MappedFile f(path);
  return std::string(f.text());
}

uint64_t first_hole(const std::string& path, uint64_t at) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  K3_CHECK(fd >= 0, "[file] cannot open {}: {}", path, std::strerror(errno));
  const off_t size = lseek(fd, 0, SEEK_END), hole = lseek(fd, off_t(at), SEEK_HOLE);
  close(fd);
  return uint64_t(hole < 0 ? size : hole);
}

AtomicFile::AtomicFile(const std::string& path) : path_(path), temporary_(path + ".part") {
  fd_ = open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  K3_CHECK(fd_ >= 0, "[file] cannot write {}: {}", path, std::strerror(errno));
}

AtomicFile::~AtomicFile() {
  if (fd_ < 0) return;
  close(fd_);
  unlink(temporary_.c_str());
}

void AtomicFile::write(const void* data, size_t bytes) {
  const char* p = static_cast<const char*>(data);
  pending_.insert(pending_.end(), p, p + bytes);
  if (pending_.size() >= (size_t(4) << 20)) flush();
}

void AtomicFile::flush() {
  for (size_t at = 0; at < pending_.size();) {
    ssize_t n = ::write(fd_, pending_.data() + at, pending_.size() - at);
    if (n < 0 && errno == EINTR) continue;
    K3_CHECK(n > 0, "[file] writing {} stopped after {} bytes: {}; what was there before is untouched. Free some space and run again", path_,
             written_ + at, std::strerror(n < 0 ? errno : ENOSPC));
    at += size_t(n);
  }
  written_ += pending_.size();
  pending_.clear();
}

void AtomicFile::commit() {
  flush();
  bool ok = fsync(fd_) == 0;
  ok = close(std::exchange(fd_, -1)) == 0 && ok;
  if (!ok || std::rename(temporary_.c_str(), path_.c_str()) != 0) {
    int problem = errno;
    unlink(temporary_.c_str());
    fail("[file] cannot finish {}: {}; what was there before is untouched", path_, std::strerror(problem));
  }
}

void write_file(const std::string& path, std::string_view text) {
  AtomicFile f(path);
  f.write(text);
  f.commit();
}

uint64_t checksum(const void* data, size_t bytes, uint64_t seed) {
  const char* p = static_cast<const char*>(data);
  uint64_t h = seed;
  auto mix = [&](uint64_t w) { h = (h ^ w) * 0x100000001b3ull, h ^= h >> 29; };
  size_t at = 0;
  for (uint64_t w; at + 8 <= bytes; at += 8) std::memcpy(&w, p + at, 8), mix(w);
  uint64_t rest = 0;
  if (at < bytes) std::memcpy(&rest, p + at, bytes - at);
  mix(rest ^ (uint64_t(bytes) << 56));
  return h;
}

}  // namespace k3

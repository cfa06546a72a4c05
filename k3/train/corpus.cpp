#include "k3/train/corpus.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "k3/core/error.h"
#include "k3/core/file.h"
#include "k3/tokenizer/unicode.h"

namespace k3 {

namespace fs = std::filesystem;

namespace {

constexpr size_t kBlock = size_t(1) << 20;
constexpr size_t kSlice = 400000;  // characters that the published tokenizer looks at together (tokenizer/pieces.h)

Source stat_of(const std::string& path) {
  struct stat st {};
  K3_CHECK(stat(path.c_str(), &st) == 0, "[data] cannot read {}: {}", path, std::strerror(errno));
  return {path, uint64_t(st.st_size), int64_t(st.st_mtim.tv_sec) * 1000000000 + st.st_mtim.tv_nsec, 0};
}

// Reads with read(2), not mapped: a file cut by somebody else is then a short read and not a crash.
class Reader {
 public:
  explicit Reader(const std::string& path) : path_(path), fd_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    K3_CHECK(fd_ >= 0, "[data] cannot read {}: {}", path, std::strerror(errno));
  }
  ~Reader() { close(fd_); }
  Reader(const Reader&) = delete;
  // The next block; shorter than kBlock only at the end.
  std::string_view next() {
    block_.resize(kBlock);
    size_t n = 0;
    while (n < kBlock) {
      ssize_t got = ::read(fd_, block_.data() + n, kBlock - n);
      if (got < 0 && errno == EINTR) continue;
      K3_CHECK(got >= 0, "[data] reading {} failed: {}", path_, std::strerror(errno));
      if (got == 0) break;
      n += size_t(got);
    }
    return {block_.data(), n};
  }

 private:
  const std::string& path_;
  int fd_;
  std::string block_;
};

// Gathers the text of one document and hands it on in slices.
class Slices {
 public:
  explicit Slices(const DocumentSink& sink) : sink_(sink) {}
  void add(std::string_view text) {
    text_ += text;
    while (text_.size() >= 4 * kSlice + 4) cut();  // so many bytes hold a slice and the character after it
  }
  void end() {
    while (text_.size() > kSlice) cut();
    if (!text_.empty()) sink_.text(text_), any_ = true;
    if (any_) sink_.end();
    text_.clear(), any_ = false;
  }

 private:
  void cut() {
    size_t at = 0;
    for (size_t n = 0; n < kSlice && at < text_.size(); ++n) at += std::max<size_t>(1, char_at(text_, at).length);
    sink_.text(std::string_view(text_).substr(0, at)), any_ = true;
    text_.erase(0, at);
  }
  const DocumentSink& sink_;
  std::string text_;
  bool any_ = false;
};

// Finds separator lines. A line longer than a separator is passed on as it comes.
class Lines {
 public:
  Lines(const std::string& separator, Slices& slices) : separator_(separator), slices_(slices) {}
  void add(std::string_view block) {
    held_ += block;
    size_t from = 0;  // text before it was passed on
    for (size_t line = 0; line < held_.size();) {
      size_t end = held_.find('\n', line);
      if (end == std::string::npos) {  // an unfinished line: wait if it may become a separator
        bool may_be = at_start_ && held_.size() - line <= separator_.size() + 1;
        size_t pass = may_be ? line : held_.size();
        slices_.add(std::string_view(held_).substr(from, pass - from));
        at_start_ = may_be;
        held_.erase(0, pass);
        return;
      }
      if (at_start_ && is_separator(std::string_view(held_).substr(line, end - line))) {
        slices_.add(std::string_view(held_).substr(from, line - from));
        slices_.end();
        from = end + 1;
      }
      at_start_ = true;
      line = end + 1;
    }
    slices_.add(std::string_view(held_).substr(from));
    held_.clear();
  }
  void end() {
    if (!(at_start_ && is_separator(held_))) slices_.add(held_);
    slices_.end();
    held_.clear(), at_start_ = true;
  }

 private:
  bool is_separator(std::string_view line) const {
    if (line.ends_with('\r')) line.remove_suffix(1);
    return line == separator_;
  }
  const std::string& separator_;
  Slices& slices_;
  std::string held_;
  bool at_start_ = true;  // of a line, at held_[0]
};

}  // namespace

std::vector<Source> list_sources(const std::vector<std::string>& paths, const std::string& except) {
  K3_CHECK(!paths.empty(), "[data] no data given; name files or folders with --data");
  const std::string own = except.empty() ? "" : (fs::absolute(except).lexically_normal() / "").string();
  std::vector<Source> all;
  for (const std::string& given : paths) {
    fs::path path = fs::absolute(given).lexically_normal();
    K3_CHECK(fs::exists(path), "[data] {} is not there", given);
    std::vector<std::string> files;
    if (fs::is_directory(path)) {
      for (const auto& entry : fs::recursive_directory_iterator(path))
        if (entry.is_regular_file() && (own.empty() || !entry.path().string().starts_with(own))) files.push_back(entry.path().string());
      K3_CHECK(!files.empty(), "[data] the folder {} holds no files", given);
      std::sort(files.begin(), files.end());
    } else {
      K3_CHECK(fs::is_regular_file(path), "[data] {} is neither a file nor a folder", given);
      files.push_back(path.string());
    }
    for (const std::string& f : files) all.push_back(stat_of(f));
  }
  uint64_t bytes = 0;
  for (const Source& s : all) bytes += s.bytes;
  K3_CHECK(bytes > 0, "[data] {} holds {} file{} but not one byte; give it some text", paths[0], all.size(), all.size() == 1 ? "" : "s");
  return all;
}

void read_documents(std::vector<Source>& sources, const std::string& separator, const DocumentSink& sink) {
  uint64_t done = 0;
  for (Source& s : sources) {
    Slices slices(sink);
    Lines lines(separator, slices);
    Reader reader(s.path);
    s.checksum = 0;
    uint64_t size = 0;
    for (;;) {
      std::string_view block = reader.next();
      s.checksum = checksum(block.data(), block.size(), s.checksum);
      if (block.empty()) break;
      size += block.size();
      if (separator.empty())
        slices.add(block);
      else
        lines.add(block);
      if (sink.progress) sink.progress(done + size);
    }
    if (separator.empty())
      slices.end();
    else
      lines.end();
    Source after = stat_of(s.path);
    K3_CHECK(size == s.bytes && after.bytes == s.bytes && after.modified == s.modified,
             "[data] {} changed while it was read ({} bytes at first, {} now); run again", s.path, s.bytes, after.bytes);
    done += size;
  }
}

uint64_t checksum_of_file(const std::string& path) {
  Reader reader(path);
  uint64_t sum = 0;
  for (;;) {
    std::string_view block = reader.next();
    sum = checksum(block.data(), block.size(), sum);
    if (block.empty()) return sum;
  }
}

}  // namespace k3

#pragma once
// Standard error while something takes long: the newest word in place, each second, on a terminal; a line each ten seconds elsewhere.
//
//   StatusLine status;
//   read_in(tensors, status.of("loading", Progress::bytes));
#include <fmt/core.h>
#include <unistd.h>

#include <utility>

#include "k3/core/progress.h"

namespace k3 {

class StatusLine {
 public:
  StatusLine() = default;
  StatusLine(const StatusLine&) = delete;
  ~StatusLine() { clear(); }

  // `text` is called when something is to be said.
  template <class Text>
  void say(Text text) {
    if (!pace_.due()) return;
    fmt::print(stderr, "{}{}{}", terminal_ ? "\r\033[K" : "", text(), terminal_ ? "" : "\n");
    std::fflush(stderr);
    shown_ = terminal_;
  }
  // A line on standard output, which is a sign of life too.
  void line(const std::string& text) {
    clear();
    fmt::print("{}\n", text);
    std::fflush(stdout);
    pace_.restart();
  }
  void clear() {  // before other output
    if (std::exchange(shown_, false)) fmt::print(stderr, "\r\033[K"), std::fflush(stderr);
  }
  // For who tells how much is done of how much, from now on. The line must outlive it.
  auto of(std::string what, Progress::Unit unit) {
    return [this, work = Progress(std::move(what), unit)](uint64_t done, uint64_t total) { say([&] { return work.text(done, total); }); };
  }

 private:
  bool terminal_ = isatty(STDERR_FILENO), shown_ = false;
  Pace pace_{terminal_ ? 1. : 10.};
};

}  // namespace k3

#pragma once
// Error: what went wrong, where, and what to do. Thrown for anything a user, a file or a peer can cause.
//
//   K3_CHECK(x.cols() == w.cols(), "[linear] x has {} columns but {} takes {}", x.cols(), name, w.cols());
//
// `assert` is for our own mistakes. Libraries never print and never exit; cli/ and serve/ turn an Error into an exit code or a response.
#include <fmt/core.h>

#include <stdexcept>
#include <string>

namespace k3 {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <class... Args>
[[noreturn]] void fail(fmt::format_string<Args...> text, Args&&... args) {
  throw Error(fmt::format(text, std::forward<Args>(args)...));
}

}  // namespace k3

#define K3_CHECK(condition, ...)               \
  do {                                         \
    if (!(condition)) ::k3::fail(__VA_ARGS__); \
  } while (false)

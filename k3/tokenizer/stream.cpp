#include "k3/tokenizer/stream.h"

#include <algorithm>
#include <utility>

#include "k3/core/error.h"
#include "k3/tokenizer/unicode.h"

namespace k3 {
namespace {

constexpr std::string_view kReplacement = "\uFFFD";

}  // namespace

std::string Utf8Stream::add(std::string_view bytes) {
  held_ += bytes;
  std::string out;
  size_t at = 0;
  while (at < held_.size()) {
    int seen;
    const int n = utf8_length(held_, at, seen);
    if (n < 0) break;  // the rest may still come
    if (n > 0)
      out.append(held_, at, n);
    else
      out += kReplacement;
    at += seen;
  }
  held_.erase(0, at);
  return out;
}

std::string Utf8Stream::finish() {
  const bool cut = !held_.empty();
  held_.clear();
  return std::string(cut ? kReplacement : "");
}

std::string replace_invalid_utf8(std::string_view bytes) {
  Utf8Stream stream;
  std::string out = stream.add(bytes);
  return out += stream.finish();
}

StopStrings::StopStrings(std::vector<std::string> stops) : stops_(std::move(stops)) {
  for (const std::string& s : stops_) K3_CHECK(!s.empty(), "[stop] a stop string is empty; leave it out, or give at least one character");
}

std::string StopStrings::add(std::string_view text) {
  if (stopped()) return {};
  if (stops_.empty()) return std::string(text);
  for (const char c : text) {
    held_ += c;
    for (size_t s = 0; s < stops_.size(); ++s)
      if (held_.ends_with(stops_[s]) && (!stopped() || stops_[s].size() > match().size())) stopped_ = int(s);
    if (!stopped()) continue;
    held_.resize(held_.size() - match().size());
    return std::exchange(held_, {});
  }
  // keep the longest end that begins a stop string
  size_t keep = 0;
  for (const std::string& s : stops_)
    for (size_t n = std::min(s.size() - 1, held_.size()); n > keep; --n)
      if (held_.ends_with(std::string_view(s).substr(0, n))) keep = n;
  std::string out = held_.substr(0, held_.size() - keep);
  held_.erase(0, out.size());
  return out;
}

std::string StopStrings::finish() { return std::exchange(held_, {}); }

const std::string& StopStrings::match() const {
  K3_CHECK(stopped(), "[stop] no stop string has matched");
  return stops_[stopped_];
}

}  // namespace k3

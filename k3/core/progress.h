#pragma once
// What one who waits is told of a long work: how much is done, how fast, how long it still takes; and how often. Texts: printing is the caller's.
//
//   Pace pace(terminal ? 1 : 10);
//   Progress reading("reading the prompt", Progress::tokens);
//   if (pace.due()) print(reading.text(512, 20000));      "reading the prompt: 512 of 20,000 tokens, 811 tokens/s, 0:24 left"
#include <cstdint>
#include <functional>
#include <string>

namespace k3 {

double seconds_now();  // of a clock that only goes forward

std::string size_text(double bytes);        // "8.59 GB"
std::string duration_text(double seconds);  // "1:04", "2:00:00"

class Pace {  // due once a period, first when one has gone by
 public:
  using Clock = std::function<double()>;
  explicit Pace(double period, Clock clock = seconds_now) : period_(period), clock_(std::move(clock)), last_(clock_()) {}
  bool due();
  void restart() { last_ = clock_(); }

 private:
  double period_;
  Clock clock_;
  double last_;
};

class Progress {
 public:
  enum Unit { bytes, tokens };
  Progress(std::string what, Unit unit, Pace::Clock clock = seconds_now)
      : what_(std::move(what)), unit_(unit), clock_(std::move(clock)), start_(clock_()) {}
  std::string text(uint64_t done, uint64_t total) const;
  double seconds_left(uint64_t done, uint64_t total) const;  // at the rate so far

 private:
  std::string what_;
  Unit unit_;
  Pace::Clock clock_;
  double start_;
};

}  // namespace k3

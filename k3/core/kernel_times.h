#pragma once
// KernelTimes: when each kernel began and ended on the GPU, by NVIDIA's CUPTI where that is installed. For `k3 bench`.
//
//   KernelTimes times;
//   if (times.why_not().empty()) { times.begin(); ...; gpu::synchronize(); times.end(); }
#include <cstdint>
#include <string>
#include <vector>

namespace k3 {

class KernelTimes {
 public:
  struct Kernel {
    double begin, end;  // seconds
    std::string name;
  };
  KernelTimes();
  const std::string& why_not() const { return why_not_; }  // empty when kernels can be timed
  void begin();
  const std::vector<Kernel>& end();  // in the order of their beginnings; what was enqueued must have been waited for

 private:
  std::string why_not_;
};

// Of the time from the first beginning to the last end, what lay within no kernel.
double gap_share(const std::vector<KernelTimes::Kernel>& kernels);

}  // namespace k3

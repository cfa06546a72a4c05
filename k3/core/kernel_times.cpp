#include "k3/core/kernel_times.h"

#include <algorithm>

#ifdef K3_CUDA
#if __has_include(<cupti.h>)
#define K3_CUPTI
#endif
#endif
#ifdef K3_CUPTI
#include <cupti.h>
#include <dlfcn.h>

#include <cstdlib>
#endif

namespace k3 {

double gap_share(const std::vector<KernelTimes::Kernel>& kernels) {
  if (kernels.empty()) return 0;
  double end = kernels[0].begin, gaps = 0;
  for (const auto& k : kernels) gaps += std::max(0.0, k.begin - end), end = std::max(end, k.end);
  return end > kernels[0].begin ? gaps / (end - kernels[0].begin) : 0;
}

#ifdef K3_CUPTI

namespace {

std::vector<KernelTimes::Kernel> kernels;

struct Cupti {  // found while running: a program that never asks needs no such library
  decltype(&cuptiActivityRegisterCallbacks) activity_register = nullptr;
  decltype(&cuptiActivityEnable) enable = nullptr;
  decltype(&cuptiActivityDisable) disable = nullptr;
  decltype(&cuptiActivityFlushAll) flush = nullptr;
  decltype(&cuptiActivityGetNextRecord) next = nullptr;
  Cupti() {
    void* library = nullptr;
    for (const char* name : {"libcupti.so.13", "libcupti.so", "/usr/local/cuda/lib64/libcupti.so", "/usr/local/cuda/extras/CUPTI/lib64/libcupti.so"})
      if ((library = dlopen(name, RTLD_NOW))) break;
    if (!library) return;
    auto find = [&](auto& f, const char* name) { f = reinterpret_cast<std::decay_t<decltype(f)>>(dlsym(library, name)); };
    find(activity_register, "cuptiActivityRegisterCallbacks"), find(enable, "cuptiActivityEnable"), find(disable, "cuptiActivityDisable");
    find(flush, "cuptiActivityFlushAll"), find(next, "cuptiActivityGetNextRecord");
  }
  bool complete() const { return activity_register && enable && disable && flush && next; }
};
const Cupti& cupti() {
  static const Cupti c;
  return c;
}

void CUPTIAPI lend(uint8_t** buffer, size_t* bytes, size_t* most) {
  *bytes = size_t(1) << 20, *buffer = static_cast<uint8_t*>(std::aligned_alloc(8, *bytes)), *most = 0;
}
void CUPTIAPI complete(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t valid) {
  CUpti_Activity* record = nullptr;
  while (cupti().next(buffer, valid, &record) == CUPTI_SUCCESS)
    if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
      const auto* k = reinterpret_cast<const CUpti_ActivityKernel9*>(record);  // later forms begin with the same members
      kernels.push_back({double(k->start) * 1e-9, double(k->end) * 1e-9, k->name ? k->name : ""});
    }
  std::free(buffer);
}

}  // namespace

KernelTimes::KernelTimes() {
  if (!cupti().complete())
    why_not_ = "CUPTI is not installed";
  else if (cupti().activity_register(lend, complete) != CUPTI_SUCCESS)
    why_not_ = "CUPTI refuses to record";
}
void KernelTimes::begin() {
  kernels.clear();
  if (cupti().enable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) != CUPTI_SUCCESS) why_not_ = "CUPTI refuses to record kernels";
}
const std::vector<KernelTimes::Kernel>& KernelTimes::end() {
  cupti().flush(1);
  cupti().disable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
  std::sort(kernels.begin(), kernels.end(), [](const Kernel& a, const Kernel& b) { return a.begin < b.begin; });
  return kernels;
}

#else

KernelTimes::KernelTimes() : why_not_("this program was built without CUPTI") {}
void KernelTimes::begin() {}
const std::vector<KernelTimes::Kernel>& KernelTimes::end() {
  static const std::vector<Kernel> none;
  return none;
}

#endif

}  // namespace k3

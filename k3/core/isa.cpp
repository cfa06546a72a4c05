#include "k3/core/isa.h"

#include <atomic>

#include "k3/core/error.h"

namespace k3::cpu {

Isa best_isa() {
  static const Isa best = [] {
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
    return avx2 && avx512 ? Isa::avx512 : avx2 ? Isa::avx2 : Isa::plain;
  }();
  return best;
}

static std::atomic<int> g_forced{-1};

Isa isa() {
  int forced = g_forced.load(std::memory_order_relaxed);
  return forced < 0 ? best_isa() : Isa(forced);
}

void force_isa(Isa level) {
  K3_CHECK(level <= best_isa(), "[isa] this processor has no {}; the best it offers is {}", name_of(level), name_of(best_isa()));
  g_forced = int(level);
}

const char* name_of(Isa level) {
  switch (level) {
    case Isa::avx512:
      return "avx512";
    case Isa::avx2:
      return "avx2";
    default:
      return "plain";
  }
}

}  // namespace k3::cpu

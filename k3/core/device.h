#pragma once
#include <cstdint>

namespace k3 {

// Where memory lives and kernels run. `null` computes nothing: the same code then counts FLOPs, bytes and memory (the planner).
enum class Device : uint8_t { cpu, cuda, null };

}  // namespace k3

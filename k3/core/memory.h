#pragma once
// Memory of the machine and of this process.
#include <cstddef>
#include <cstdint>
#include <string>

namespace k3 {

// What this process may still take without being killed or making others swap: the machine's available memory and the limits of the
// containers around it (cgroup v1 and v2). `root` is for tests.
uint64_t available_memory(const std::string& root = "");
size_t address_space();           // as large as all the memory: for arenas, whose pages count when they are touched
uint64_t resident_memory();       // of this process now
uint64_t peak_resident_memory();  // and at its highest

}  // namespace k3

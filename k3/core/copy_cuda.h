#pragma once
// Filling and copying by kernels: between kernels of a captured step they cost less than the copy engine's nodes, by several us each. Null, or what
// failed.
#include <cstddef>

namespace k3::cuda {

const char* fill(void* p, int byte, size_t bytes, void* stream);
// Neither overlaps the other. to_host: `to` is memory of the host that the device sees; there too it is complete when the next kernel begins.
const char* copy(void* to, const void* from, size_t bytes, bool to_host, void* stream);

}  // namespace k3::cuda

#pragma once
// enqueue: a kernel that may begin while the one in front of it in the stream still runs its last blocks, so that its start costs nothing. Such a kernel
// says follow() before it touches memory: from there on all that was enqueued before it is done and visible. Kernels launched without it may stand
// before or behind.
//
//   __global__ void kernel(Args a) { follow(); ... }
//   enqueue(kernel, blocks, threads, shared_bytes, stream, a);
//   return launched();
#include "k3/core/block.cuh"

namespace k3 {

// Once every block got here, the next kernel's blocks may take the places that are free. They wait here in turn, so what they see is complete.
__device__ __forceinline__ void follow() { asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory"); }

template <class... Parameters, class... Arguments>
void enqueue(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared, cudaStream_t stream, const Arguments&... a) {
  cudaLaunchAttribute early{cudaLaunchAttributeProgrammaticStreamSerialization, {}, {}};
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{grid, block, shared, stream, &early, 1};
  cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(a)...);  // launched() has what came of it
}

}  // namespace k3

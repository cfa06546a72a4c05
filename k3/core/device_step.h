#pragma once
// DeviceStep: one decode step on a GPU, a token for each of several sequences. What changes from step to step lies in device memory, so that the
// same launches serve every step and can be captured as a graph.
#include <cstdint>

namespace k3 {

// All on the device, one entry a row. A row with slot -1 is filler: it reads and changes no state, reaches no expert, and whatever its numbers
// are (its embedding is NaN) no other row sees them.
struct DeviceStep {
  const int32_t* ids;      // the tokens to read; not looked at in filler
  const int32_t* slots;    // where the row's sequence has its state; no slot twice
  const int32_t* tokens;   // what the sequence has read before
  const int32_t* open;     // how many of these lie in the open chunk of the delta rule
  const uint8_t* padding;  // 1: filler
};

}  // namespace k3

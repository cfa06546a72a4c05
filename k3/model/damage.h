#pragma once
// Damage that headers don't show: reads every byte of a snapshot.
//
//   zero           a tensor that ends in zeros where a random number would not: the whole of it, or its last 4 KiB or more (a download that
//                  was cut after the file was made in its full size reads so)
//   not finite     NaN or infinity in a float tensor; 255, the NaN among MXFP4 scales
//   hashes         SHA-256 of each file that the folder gives one for: SHA256SUMS ("hash  file"), or what the hub's downloader keeps in
//                  .cache/huggingface/download/FILE.metadata (its second line)
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "k3/model/safetensors.h"

namespace k3 {

struct Damage {
  struct Finding {
    std::string what;
    bool fault;  // false: may be meant, as zeros of a vector
  };
  std::vector<Finding> findings;  // in the snapshot's order
  int64_t hashes = 0;             // files whose hash was given and is right
  uint64_t bytes = 0;             // read
  bool good() const;
};

Damage find_damage(const Snapshot& snapshot, const std::function<void(uint64_t done, uint64_t total)>& progress = nullptr);

}  // namespace k3

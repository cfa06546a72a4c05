#pragma once
// Snapshot: a folder in the published layout, opened by its index and headers alone. Nothing is copied that can be mapped.
//
//   8 bytes little-endian header length | JSON: name -> {dtype, shape, data_offsets} | data        per shard
//   model.safetensors.index.json: {"metadata": {"total_size"}, "weight_map": {name: shard}}        when there are several
//
// Every shard's size is checked against its header; overlaps, holes, doubles, names that the index and the shards don't share, and a shard
// that is named but not there are Errors that name file, tensor, wanted and found.
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "k3/core/file.h"
#include "k3/core/tensor.h"

namespace k3 {

struct StoredTensor {
  std::string name;
  uint32_t shard;
  DType dtype;
  Shape shape;
  uint64_t offset, bytes;  // in the shard's data
};

class Snapshot {
 public:
  explicit Snapshot(const std::string& folder);  // also a single .safetensors file
  const std::vector<StoredTensor>& tensors() const { return tensors_; }
  const StoredTensor* find(std::string_view name) const;
  Tensor view(const StoredTensor& t) const;  // the mapped bytes
  const std::string& file_of(const StoredTensor& t) const { return shards_[t.shard].path; }
  uint64_t bytes() const;
  // Error if a part of a shard was never written: a download that made the file in full size and did not fill it. Before weights are read; a
  // snapshot of headers only (fabricate) opens all the same.
  void check_written() const;
  const std::string& folder() const { return folder_; }

 private:
  struct Shard {
    std::string path;
    MappedFile file;
    uint64_t data = 0;  // where the data begins
  };
  void open_shard(const std::string& path);
  void check_layout(uint32_t shard, size_t first) const;
  void index_names();  // once all shards are open: the views point into tensors_

  std::string folder_;
  std::deque<Shard> shards_;
  std::vector<StoredTensor> tensors_;
  std::unordered_map<std::string_view, size_t> by_name_;
};

struct NamedTensor {
  std::string name;
  Tensor value;
};
// Writes tensors in the given order, in shards of about `shard_bytes`; with one shard the file is model.safetensors and there is no index.
// Files appear complete or not at all; the index comes last.
void write_snapshot(const std::string& folder, const std::vector<NamedTensor>& tensors, uint64_t shard_bytes = uint64_t(4) << 30);
// The JSON in front of the data of a file that holds these tensors in this order, padded to 8 bytes. The values aren't looked at.
std::string safetensors_header(const std::vector<NamedTensor>& tensors, const std::string& metadata_json = "");
// One file, for anything that isn't a snapshot (optimizer state, recorded tensors).
void write_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors, const std::string& metadata_json = "");

}  // namespace k3

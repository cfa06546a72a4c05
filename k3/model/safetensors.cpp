#include "k3/model/safetensors.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <span>

#include "k3/core/error.h"
#include "k3/core/gpu.h"

namespace k3 {

using nlohmann::json;
namespace fs = std::filesystem;

namespace {

// Reads a shard's header without building a document: half a million names would cost a gigabyte.
class HeaderReader : public nlohmann::json_sax<json> {
 public:
  HeaderReader(const std::string& file, uint32_t shard, std::vector<StoredTensor>& out) : file_(file), shard_(shard), out_(out) {}

  bool start_object(std::size_t) override {
    if (++depth_ == 2 && !in_metadata_) current_ = StoredTensor{name_, shard_, DType::f32, {}, 0, 0}, have_ = 0;
    K3_CHECK(depth_ <= 2 || in_metadata_, "[safetensors] {}: the header nests too deep at {}", file_, name_);
    return true;
  }
  bool end_object() override {
    if (depth_-- == 2 && !in_metadata_) {
      K3_CHECK(have_ == 7, "[safetensors] {}: tensor {} lacks dtype, shape or data_offsets", file_, current_.name);
      K3_CHECK(end_ >= begin_, "[safetensors] {}: tensor {} has data_offsets {} .. {}", file_, current_.name, begin_, end_);
      current_.offset = begin_, current_.bytes = end_ - begin_;
      uint64_t want = uint64_t(current_.shape.size()) * bytes_of(current_.dtype);
      K3_CHECK(current_.bytes == want, "[safetensors] {}: tensor {} ({} {}) must have {} bytes but its data_offsets span {}", file_, current_.name,
               name_of(current_.dtype), to_string(current_.shape), want, current_.bytes);
      out_.push_back(current_);
    }
    if (depth_ == 1) in_metadata_ = false;
    return true;
  }
  bool key(string_t& k) override {
    if (depth_ == 1)
      name_ = k, in_metadata_ = k == "__metadata__";
    else
      field_ = k;
    return true;
  }
  bool string(string_t& s) override {
    if (in_metadata_) return true;
    K3_CHECK(depth_ == 2 && field_ == "dtype", "[safetensors] {}: {}.{} must not be text", file_, name_, field_);
    bool known = false;
    for (DType t : {DType::f32, DType::bf16, DType::f16, DType::i32, DType::i64, DType::u8, DType::f64})
      if (s == k3::name_of(t)) current_.dtype = t, known = true;
    if (s == "F8_E8M0") current_.dtype = DType::u8, known = true;  // the official name of a scale byte
    K3_CHECK(known, "[safetensors] {}: tensor {} has dtype {}, which is not supported", file_, name_, s);
    have_ |= 1;
    return true;
  }
  bool start_array(std::size_t) override {
    if (!in_metadata_) list_.clear();
    return true;
  }
  bool end_array() override {
    if (in_metadata_) return true;
    if (field_ == "shape") {
      current_.shape.rank = 0;
      double elements = 1;
      for (uint64_t d : list_) {
        if (d == 1 && list_.size() > Shape::kMaxRank) continue;
        elements *= double(d);
        K3_CHECK(elements < 1e18, "[safetensors] {}: tensor {} has a size that cannot be", file_, name_);
        K3_CHECK(current_.shape.rank < Shape::kMaxRank, "[safetensors] {}: tensor {} has more than {} axes", file_, name_, int(Shape::kMaxRank));
        current_.shape.dims[current_.shape.rank++] = int64_t(d);
      }
      if (list_.empty()) current_.shape = {1};  // a scalar
      have_ |= 2;
    } else if (field_ == "data_offsets" && list_.size() == 2) {
      begin_ = list_[0], end_ = list_[1], have_ |= 4;
    } else {
      fail("[safetensors] {}: tensor {} has an unknown or malformed field {}", file_, name_, field_);
    }
    return true;
  }
  bool number_unsigned(number_unsigned_t v) override { return list_.push_back(v), true; }
  bool number_integer(number_integer_t) override { fail("[safetensors] {}: tensor {} has a negative {}", file_, name_, field_); }
  bool number_float(number_float_t, const string_t&) override { fail("[safetensors] {}: tensor {} has a fractional {}", file_, name_, field_); }
  bool null() override { return in_metadata_; }
  bool boolean(bool) override { return in_metadata_; }
  bool binary(binary_t&) override { return false; }
  bool parse_error(std::size_t at, const std::string&, const nlohmann::detail::exception&) override {
    fail("[safetensors] {}: the header is not valid JSON at byte {}; the file is damaged", file_, at);
  }

 private:
  const std::string& file_;
  uint32_t shard_;
  std::vector<StoredTensor>& out_;
  int depth_ = 0, have_ = 0;
  bool in_metadata_ = false;
  std::string name_, field_;
  std::vector<uint64_t> list_;
  uint64_t begin_ = 0, end_ = 0;
  StoredTensor current_{};
};

// Reads weight_map: tensor name -> shard file.
class IndexReader : public nlohmann::json_sax<json> {
 public:
  explicit IndexReader(const std::string& file) : file_(file) {}
  std::vector<std::pair<std::string, uint32_t>> map;
  std::vector<std::string> shards;

  bool start_object(std::size_t) override { return ++depth_, in_map_ = depth_ == 2 && key_ == "weight_map", true; }
  bool end_object() override { return --depth_, in_map_ = false, true; }
  bool key(string_t& k) override { return key_ = k, true; }
  bool string(string_t& s) override {
    if (!in_map_) return true;
    if (shards.empty() || shards.back() != s) {
      auto it = std::find(shards.begin(), shards.end(), s);
      if (it == shards.end()) shards.push_back(s), it = shards.end() - 1;
      last_ = uint32_t(it - shards.begin());
    } else {
      last_ = uint32_t(shards.size() - 1);
    }
    map.emplace_back(key_, last_);
    return true;
  }
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool binary(binary_t&) override { return false; }
  bool start_array(std::size_t) override { return true; }
  bool end_array() override { return true; }
  bool parse_error(std::size_t at, const std::string&, const nlohmann::detail::exception&) override {
    fail("[safetensors] {} is not valid JSON at byte {}", file_, at);
  }

 private:
  const std::string& file_;
  int depth_ = 0;
  bool in_map_ = false;
  std::string key_;
  uint32_t last_ = 0;
};

std::string header_of(std::span<const NamedTensor> tensors, const std::string& metadata) {
  std::string text = "{";
  if (!metadata.empty()) text += "\"__metadata__\":" + metadata + ",";
  uint64_t at = 0;
  for (const NamedTensor& named : tensors) {
    const Tensor& t = named.value;
    json shape = json::array();
    for (int d = 0; d < t.rank(); ++d) shape.push_back(t.dim(d));
    text += json(named.name).dump() + ":{\"dtype\":\"" + k3::name_of(t.dtype()) + "\",\"shape\":" + shape.dump() + ",\"data_offsets\":[" +
            std::to_string(at) + "," + std::to_string(at + t.bytes()) + "]},";
    at += t.bytes();
  }
  if (text.back() == ',') text.pop_back();
  text += "}";
  text.resize((text.size() + 7) / 8 * 8, ' ');
  return text;
}

void write_one(const std::string& path, const std::vector<NamedTensor>& tensors, size_t first, size_t last, const std::string& metadata) {
  AtomicFile f(path);
  std::string header = header_of(std::span(tensors).subspan(first, last - first), metadata);
  uint64_t n = header.size();
  f.write(&n, 8);
  f.write(header);
  for (size_t i = first; i < last; ++i) {
    const HostCopy value(tensors[i].value);
    f.write(value.tensor().data(), value.tensor().bytes());
  }
  f.commit();
}

}  // namespace

Snapshot::Snapshot(const std::string& folder) : folder_(folder) {
  std::string index = folder + "/model.safetensors.index.json", single = folder + "/model.safetensors";
  if (fs::is_regular_file(folder)) {
    open_shard(folder);
    index_names();
  } else if (fs::exists(index)) {
    MappedFile file(index);
    IndexReader reader(index);
    json::sax_parse(file.data(), file.data() + file.size(), &reader);
    K3_CHECK(!reader.map.empty(), "[safetensors] {} has no weight_map", index);
    for (const std::string& name : reader.shards) {
      K3_CHECK(name.find('/') == std::string::npos, "[safetensors] {} names '{}', which is no plain file name", index, name);
      K3_CHECK(fs::exists(folder + "/" + name), "[safetensors] {} names {}, but that file is not there; download it again", index, name);
      open_shard(folder + "/" + name);
    }
    index_names();
    for (const auto& entry : fs::directory_iterator(folder)) {
      std::string name = entry.path().filename();
      K3_CHECK(!name.ends_with(".safetensors") || !name.starts_with("model") ||
                   std::find(reader.shards.begin(), reader.shards.end(), name) != reader.shards.end(),
               "[safetensors] {} is in the folder but not in {}; remove it or restore the index", name, index);
    }
    size_t in_index = 0;
    for (const auto& [name, shard] : reader.map) {
      const StoredTensor* t = find(name);
      K3_CHECK(t, "[safetensors] {} promises tensor {} in {}, but the shard does not have it", index, name, reader.shards[shard]);
      K3_CHECK(t->shard == shard, "[safetensors] {} says tensor {} is in {}, but it is in {}", index, name, reader.shards[shard], file_of(*t));
      ++in_index;
    }
    K3_CHECK(in_index == tensors_.size(), "[safetensors] the shards hold {} tensors but {} lists {}", tensors_.size(), index, in_index);
  } else {
    K3_CHECK(fs::exists(single), "[safetensors] {} holds neither model.safetensors nor model.safetensors.index.json", folder);
    open_shard(single);
    index_names();
  }
}

void Snapshot::open_shard(const std::string& path) {
  uint32_t number = uint32_t(shards_.size());
  Shard& s = shards_.emplace_back(Shard{path, MappedFile(path), 0});
  uint64_t header = 0;
  K3_CHECK(s.file.size() >= 8, "[safetensors] {} has {} bytes; it is cut or empty, download it again", path, s.file.size());
  std::memcpy(&header, s.file.data(), 8);
  K3_CHECK(header <= s.file.size() - 8, "[safetensors] {} must have a header of {} bytes but the file has only {}; it is cut, download it again",
           path, header, s.file.size());
  s.data = 8 + header;
  size_t first = tensors_.size();
  HeaderReader reader(s.path, number, tensors_);
  json::sax_parse(s.file.data() + 8, s.file.data() + s.data, &reader);
  check_layout(number, first);
}

void Snapshot::index_names() {
  by_name_.reserve(tensors_.size());
  for (size_t i = 0; i < tensors_.size(); ++i) {
    auto [it, fresh] = by_name_.emplace(tensors_[i].name, i);
    K3_CHECK(fresh, "[safetensors] tensor {} is in {} and again in {}", tensors_[i].name, file_of(tensors_[it->second]), file_of(tensors_[i]));
  }
}

void Snapshot::check_layout(uint32_t shard, size_t first) const {
  std::vector<const StoredTensor*> order;
  for (size_t i = first; i < tensors_.size(); ++i) order.push_back(&tensors_[i]);
  std::sort(order.begin(), order.end(), [](auto* a, auto* b) { return a->offset != b->offset ? a->offset < b->offset : a->bytes < b->bytes; });
  const Shard& s = shards_[shard];
  uint64_t at = 0;
  for (const StoredTensor* t : order) {
    K3_CHECK(t->offset == at, "[safetensors] {}: tensor {} begins at byte {} of the data but {} was expected (overlap or hole)", s.path, t->name,
             t->offset, at);
    at += t->bytes;
  }
  K3_CHECK(s.data + at == s.file.size(), "[safetensors] {} must have {} bytes but has {}; {}", s.path, s.data + at, s.file.size(),
           s.file.size() < s.data + at ? "it is cut, download it again" : "something was appended");
}

const StoredTensor* Snapshot::find(std::string_view name) const {
  auto it = by_name_.find(name);
  return it == by_name_.end() ? nullptr : &tensors_[it->second];
}

Tensor Snapshot::view(const StoredTensor& t) const {
  const Shard& s = shards_[t.shard];
  return Tensor(const_cast<char*>(s.file.data() + s.data + t.offset), t.dtype, t.shape);
}

void Snapshot::check_written() const {
  for (uint32_t i = 0; i < shards_.size(); ++i) {
    const Shard& s = shards_[i];
    const uint64_t hole = first_hole(s.path, s.data);
    if (hole >= s.file.size()) continue;
    const StoredTensor* in = nullptr;  // the one that holds the first byte of the hole
    for (const StoredTensor& t : tensors_)
      if (t.shard == i && t.offset <= hole - s.data && (!in || t.offset > in->offset)) in = &t;
    fail("[safetensors] {} was never written from byte {} of {} on, in tensor {} (nothing but zeros, which take no space); download it again", s.path,
         hole, s.file.size(), in ? in->name : "?");
  }
}

uint64_t Snapshot::bytes() const {
  uint64_t n = 0;
  for (const StoredTensor& t : tensors_) n += t.bytes;
  return n;
}

std::string safetensors_header(const std::vector<NamedTensor>& tensors, const std::string& metadata_json) {
  return header_of(tensors, metadata_json);
}

void write_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors, const std::string& metadata_json) {
  write_one(path, tensors, 0, tensors.size(), metadata_json);
}

void write_snapshot(const std::string& folder, const std::vector<NamedTensor>& tensors, uint64_t shard_bytes) {
  fs::create_directories(folder);
  std::vector<size_t> starts = {0};
  uint64_t total = 0, in_shard = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    uint64_t bytes = tensors[i].value.bytes();
    if (in_shard > 0 && in_shard + bytes > shard_bytes) starts.push_back(i), in_shard = 0;
    in_shard += bytes, total += bytes;
  }
  size_t shards = starts.size();
  starts.push_back(tensors.size());
  const std::string metadata = "{\"format\":\"pt\"}";
  if (shards == 1) return write_one(folder + "/model.safetensors", tensors, 0, tensors.size(), metadata);
  json map = json::object();
  for (size_t s = 0; s < shards; ++s) {
    std::string name = fmt::format("model-{:05}-of-{:06}.safetensors", s + 1, shards);
    write_one(folder + "/" + name, tensors, starts[s], starts[s + 1], metadata);
    for (size_t i = starts[s]; i < starts[s + 1]; ++i) map[tensors[i].name] = name;
  }
  write_file(folder + "/model.safetensors.index.json", json{{"metadata", {{"total_size", total}}}, {"weight_map", map}}.dump(1));
}

}  // namespace k3

#include "k3/model/damage.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <sstream>

#include "k3/core/error.h"
#include "k3/core/threads.h"
#include "k3/model/sha256.h"

namespace k3 {

namespace fs = std::filesystem;

namespace {

constexpr int64_t kBlock = 1 << 20;  // elements a call looks at

// Bytes after the last one that isn't zero.
uint64_t zeros_at_end(const char* p, uint64_t n) {
  uint64_t zeros = 0;
  for (uint64_t word; n - zeros >= 8; zeros += 8) {
    std::memcpy(&word, p + n - zeros - 8, 8);
    if (word) break;
  }
  while (zeros < n && p[n - zeros - 1] == 0) ++zeros;
  return zeros;
}

// Index of the first element that no weight may be, or -1.
int64_t first_bad(const Tensor& t, bool scale) {
  const int64_t blocks = (t.size() + kBlock - 1) / kBlock;
  std::vector<int64_t> found(size_t(blocks), -1);
  parallel_for(blocks, [&](int64_t b) {
    const int64_t end = std::min(t.size(), (b + 1) * kBlock);
    auto look = [&](auto bad) {
      for (int64_t i = b * kBlock; i < end && found[size_t(b)] < 0; ++i)
        if (bad(i)) found[size_t(b)] = i;
    };
    const char* p = static_cast<const char*>(t.data());  // a header of odd length leaves what follows unaligned
    auto at = [&]<class T>(T, int64_t i) {
      T x;
      std::memcpy(&x, p + size_t(i) * sizeof x, sizeof x);
      return x;
    };
    if (t.dtype() == DType::f32) look([&](int64_t i) { return (at(uint32_t(), i) & 0x7f800000u) == 0x7f800000u; });
    if (t.dtype() == DType::bf16) look([&](int64_t i) { return (at(uint16_t(), i) & 0x7f80u) == 0x7f80u; });
    if (t.dtype() == DType::f16) look([&](int64_t i) { return (at(uint16_t(), i) & 0x7c00u) == 0x7c00u; });
    if (t.dtype() == DType::u8 && scale) look([&](int64_t i) { return at(uint8_t(), i) == 255; });
  });
  for (int64_t i : found)
    if (i >= 0) return i;
  return -1;
}

// file name -> {hash, who gives it}
std::map<std::string, std::pair<std::string, std::string>> hashes_of(const std::string& folder) {
  auto is_hash = [](const std::string& s) { return s.size() == 64 && s.find_first_not_of("0123456789abcdef") == s.npos; };
  std::map<std::string, std::pair<std::string, std::string>> all;
  const std::string kept = ".cache/huggingface/download";
  if (fs::is_directory(folder + "/" + kept))
    for (const auto& entry : fs::directory_iterator(folder + "/" + kept)) {
      std::string name = entry.path().filename(), line, hash;
      if (!name.ends_with(".metadata")) continue;
      std::istringstream text(read_file(entry.path()));
      std::getline(text, line), std::getline(text, hash);  // a commit; then an etag, which for large files is their SHA-256
      if (is_hash(hash)) all[name.substr(0, name.size() - 9)] = {hash, kept};
    }
  if (fs::exists(folder + "/SHA256SUMS")) {
    std::istringstream text(read_file(folder + "/SHA256SUMS"));
    int number = 0;
    for (std::string line; std::getline(text, line);) {
      ++number;
      if (line.empty()) continue;
      std::string hash = line.substr(0, line.find(' ')), name = line.substr(std::min(line.size(), line.find_first_not_of(" *", hash.size())));
      K3_CHECK(is_hash(hash) && !name.empty(), "[inspect] {}/SHA256SUMS:{} must be a hash of 64 digits and a file's name, but is '{}'", folder,
               number, line);
      all[name.starts_with("./") ? name.substr(2) : name] = {hash, "SHA256SUMS"};
    }
  }
  return all;
}

}  // namespace

bool Damage::good() const {
  return std::none_of(findings.begin(), findings.end(), [](const Finding& f) { return f.fault; });
}

Damage find_damage(const Snapshot& snapshot, const std::function<void(uint64_t, uint64_t)>& progress) {
  Damage damage;
  const uint64_t total = snapshot.bytes();
  for (const StoredTensor& stored : snapshot.tensors()) {
    const Tensor t = snapshot.view(stored);
    const std::string where = fmt::format("{} in {}", stored.name, snapshot.file_of(stored));
    const uint64_t zeros = zeros_at_end(static_cast<const char*>(t.data()), t.bytes());
    const bool vector = std::any_of(stored.shape.dims, stored.shape.dims + stored.shape.rank, [&](int64_t d) { return d == stored.shape.size(); });
    if (t.bytes() && zeros == t.bytes())
      damage.findings.push_back({where + " is all zeros", !vector});
    else if (zeros >= 4096)
      damage.findings.push_back({fmt::format("{} is zero from byte {} of {} on", where, t.bytes() - zeros, t.bytes()), true});
    if (int64_t bad = first_bad(t, stored.name.ends_with("_scale")); bad >= 0)
      damage.findings.push_back({fmt::format("{} is not a number or not finite at {}", where, bad), true});
    damage.bytes += t.bytes();
    if (progress) progress(damage.bytes, total);
  }
  if (!fs::is_directory(snapshot.folder())) return damage;
  const auto given = hashes_of(snapshot.folder());
  struct Hashed {
    std::string name, found;
    MappedFile file;
  };
  std::vector<Hashed> files;
  for (const auto& [name, hash] : given) {
    const std::string path = snapshot.folder() + "/" + name;
    files.push_back({name, "", fs::is_regular_file(path) ? MappedFile(path) : MappedFile()});
  }
  parallel_for(int64_t(files.size()), [&](int64_t i) {
    Sha256 sha;
    sha.add(files[size_t(i)].file.data(), files[size_t(i)].file.size());
    files[size_t(i)].found = sha.hex();
  });
  for (const auto& [name, found, file] : files) {
    const auto& [hash, source] = given.at(name);
    if (!fs::is_regular_file(snapshot.folder() + "/" + name))
      damage.findings.push_back({fmt::format("{} has a hash in {} but is not there", name, source), true});
    else if (found != hash)
      damage.findings.push_back({fmt::format("{} must have SHA-256 {} ({}) but has {}; download it again", name, hash, source, found), true});
    else
      ++damage.hashes;
  }
  return damage;
}

}  // namespace k3

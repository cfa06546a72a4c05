// Damaged headers, indices and configs: always an Error or an answer. Mutations are seeded, so that a failure comes again.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "k3/core/file.h"
#include "k3/core/mutate.h"
#include "k3/model/checkpoint.h"
#include "k3/model/testing.h"

namespace k3 {
namespace {

namespace fs = std::filesystem;

struct Saved {
  fs::path path = fs::path(::testing::TempDir()) / ("k3_fuzz" + std::to_string(getpid()));
  Config config;
  explicit Saved(uint64_t shard_bytes) {
    fs::remove_all(path);
    config = testing::tiny_k3();
    config.num_experts = 2, config.num_experts_per_token = 1;
    config.finish();
    Model m(config);
    testing::fill(m);
    save(m, path.string(), shard_bytes);
  }
  ~Saved() { fs::remove_all(path); }
};

TEST(snapshot_fuzz, headers) {
  Saved s(uint64_t(1) << 40);
  const std::string file = (s.path / "model.safetensors").string(), good = read_file(file);
  uint64_t length = 0;
  std::memcpy(&length, good.data(), 8);
  const std::string header = good.substr(8, length), data = good.substr(8 + length);
  const Model model(s.config);
  int fine = 0;
  for (uint64_t i = 0; i < 1200; ++i) {
    std::string changed = mutated(header, i);
    uint64_t n = i % 7 ? changed.size() : mutated(std::string(reinterpret_cast<char*>(&length), 8), i).size();
    std::string bytes(reinterpret_cast<char*>(&n), 8);
    if (i % 11 == 0) bytes = mutated(bytes, i + 1), bytes.resize(8);
    put(file, bytes + changed + data);
    fine += answers([&] {
      const Snapshot snapshot(s.path.string());
      find_parameters(model, snapshot);
    });
  }
  EXPECT_GT(fine, 0);
  EXPECT_LT(fine, 600);
}

TEST(snapshot_fuzz, indices) {
  Saved s(60000);
  const std::string file = (s.path / "model.safetensors.index.json").string(), good = read_file(file);
  int fine = 0;
  for (uint64_t i = 0; i < 400; ++i) {
    put(file, mutated(good, i));
    fine += answers([&] { Snapshot snapshot(s.path.string()); });
  }
  EXPECT_GT(fine, 0);
  EXPECT_LT(fine, 360);
}

TEST(snapshot_fuzz, configs) {
  for (const char* name : {"k3.json", "kimi-linear-48b.json", "demo.json"}) {
    const std::string good = read_file(std::string(K3_SOURCE_DIR) + "/configs/" + name);
    int fine = 0;
    for (uint64_t i = 0; i < 4000; ++i)
      fine += answers([&] {
        nlohmann::json j = nlohmann::json::parse(mutated(good, i), nullptr, false);
        K3_CHECK(!j.is_discarded(), "not JSON");
        j.erase("train");
        Config c = Config::parse(j);
        c.finish();
        c.to_json();
      });
    // A value of another kind somewhere in it.
    const nlohmann::json whole = nlohmann::json::parse(good), flat = whole.flatten();
    const nlohmann::json kinds = {nullptr, true, 1, -1, 1e300, INT64_MAX, "text", "", nlohmann::json::array(), {1, "a"}, nlohmann::json::object()};
    for (uint64_t i = 0; i < 4000; ++i) {
      const Rng rng{i, 7};
      nlohmann::json::json_pointer at(std::next(flat.begin(), int64_t(rng.below(flat.size(), 0))).key());
      if (i % 4 == 0) at = at.parent_pointer();
      nlohmann::json j = whole;
      j[at] = kinds[rng.below(kinds.size(), 1)];
      fine += answers([&] {
        Config c = Config::parse(j);
        c.finish();
        c.to_json();
      });
    }
    EXPECT_GT(fine, 0) << name;
    EXPECT_LT(fine, 7000) << name;
  }
}

}  // namespace
}  // namespace k3

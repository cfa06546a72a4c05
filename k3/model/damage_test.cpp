#include "k3/model/damage.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <limits>

#include "k3/model/sha256.h"
#include "k3/ops/testing.h"

namespace k3 {
namespace {

namespace fs = std::filesystem;
using testing::throws_error;

using testing::TemporaryFolder;

std::string hash_of(std::string_view text) {
  Sha256 s;
  s.add(text.data(), text.size());
  return s.hex();
}

TEST(damage, sha256_has_the_standards_values) {
  EXPECT_EQ(hash_of("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hash_of(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hash_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"), "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hash_of(std::string(1000000, 'a')), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  std::string text = "a text of some length, longer than a block of sixty-four bytes, read in pieces of every size";
  for (size_t piece = 1; piece < text.size(); ++piece) {
    Sha256 s;
    for (size_t at = 0; at < text.size(); at += piece) s.add(text.data() + at, std::min(piece, text.size() - at));
    EXPECT_EQ(s.hex(), hash_of(text)) << piece;
  }
}

// One matrix and one vector in bf16, one matrix in f32, codes with scales; `change` before they are written.
struct Weights {
  std::vector<uint16_t> matrix = std::vector<uint16_t>(64 * 96, 0x3f80), vector = std::vector<uint16_t>(96, 0x3f80);
  std::vector<float> wide = std::vector<float>(33 * 65, 1.0f);
  std::vector<uint8_t> packed = std::vector<uint8_t>(64 * 16, 0x21), scale = std::vector<uint8_t>(64, 120);
  void write(const std::string& folder) {
    write_snapshot(folder, {{"matrix.weight", Tensor(matrix.data(), DType::bf16, {64, 96})},
                            {"norm.weight", Tensor(vector.data(), DType::bf16, {1, 96})},
                            {"wide.weight", Tensor(wide.data(), DType::f32, {33, 65})},
                            {"w1.weight_packed", Tensor(packed.data(), DType::u8, {64, 16})},
                            {"w1.weight_scale", Tensor(scale.data(), DType::u8, {64, 1})}});
  }
};

std::string damage_after(const std::function<void(Weights&)>& change, bool fault = true) {
  TemporaryFolder f;
  Weights w;
  change(w);
  w.write(f.str());
  const Damage d = find_damage(Snapshot(f.str()));
  EXPECT_EQ(d.bytes, Snapshot(f.str()).bytes());
  EXPECT_EQ(d.good(), d.findings.empty() || !fault);
  return d.findings.empty() ? "" : d.findings[0].what;
}

TEST(damage, zeros_where_weights_should_be_are_found) {
  EXPECT_EQ(damage_after([](auto&) {}), "");
  EXPECT_TRUE(damage_after([](auto& w) { std::fill(w.matrix.begin(), w.matrix.end(), 0); }).starts_with("matrix.weight in "));
  EXPECT_TRUE(damage_after([](auto& w) { std::fill(w.matrix.begin(), w.matrix.end(), 0); }).ends_with("is all zeros"));
  EXPECT_TRUE(damage_after([](auto& w) { std::fill(w.vector.begin(), w.vector.end(), 0); }, false).ends_with("is all zeros"));
  // what a cut download leaves in a file made in its full size
  EXPECT_TRUE(damage_after([](auto& w) { std::fill(w.matrix.begin() + 2000, w.matrix.end(), 0); }).ends_with("is zero from byte 4000 of 12288 on"));
  EXPECT_EQ(damage_after([](auto& w) { std::fill(w.matrix.begin() + 5000, w.matrix.end(), 0); }), "");  // a short run may be meant
  EXPECT_TRUE(damage_after([](auto& w) { std::fill(w.packed.begin(), w.packed.end(), 0); }).ends_with("is all zeros"));
}

TEST(damage, values_that_are_no_numbers_are_found) {
  auto says = [](auto change, const char* what) { EXPECT_TRUE(damage_after(change).ends_with(what)) << damage_after(change); };
  says([](auto& w) { w.matrix[77] = 0x7f80; }, "is not a number or not finite at 77");
  says([](auto& w) { w.matrix.back() = 0xffc0; }, "is not a number or not finite at 6143");
  says([](auto& w) { w.wide[2000] = std::numeric_limits<float>::quiet_NaN(); }, "is not a number or not finite at 2000");
  says([](auto& w) { w.scale[63] = 255; }, "is not a number or not finite at 63");
  EXPECT_EQ(damage_after([](auto& w) { w.packed[3] = 255, w.scale[3] = 0; }), "");  // codes, and the smallest scale
}

TEST(damage, hashes_are_compared_where_the_folder_gives_any) {
  TemporaryFolder f;
  Weights().write(f.str());
  const std::string file = "model.safetensors", hash = hash_of(read_file(f.str() + "/" + file));
  auto found = [&] { return find_damage(Snapshot(f.str())); };
  EXPECT_EQ(found().hashes, 0);
  write_file(f.str() + "/SHA256SUMS", hash + "  ./" + file + "\n");
  EXPECT_EQ(found().hashes, 1);
  write_file(f.str() + "/SHA256SUMS", hash.substr(0, 63) + (hash[63] == '0' ? '1' : '0') + " *" + file + "\n");
  Damage wrong = found();
  ASSERT_EQ(wrong.findings.size(), 1u);
  EXPECT_FALSE(wrong.good());
  EXPECT_NE(wrong.findings[0].what.find("must have SHA-256"), std::string::npos);
  EXPECT_TRUE(wrong.findings[0].what.ends_with("but has " + hash + "; download it again"));
  write_file(f.str() + "/SHA256SUMS", hash + "  gone.safetensors\n");
  EXPECT_EQ(found().findings.at(0).what, "gone.safetensors has a hash in SHA256SUMS but is not there");
  write_file(f.str() + "/SHA256SUMS", "hello\n");
  EXPECT_THAT([&] { found(); }, throws_error("SHA256SUMS:1 must be a hash of 64 digits"));
  fs::remove(f.path / "SHA256SUMS");
  const std::string kept = f.str() + "/.cache/huggingface/download";
  fs::create_directories(kept);
  write_file(kept + "/" + file + ".metadata", "0123abc\n" + hash + "\n1700000000.0\n");
  write_file(kept + "/config.json.metadata", "0123abc\n8ab686eafeb1f44702738c8b0f24f2567c36da6d\n1700000000.0\n");  // small files: no SHA-256
  EXPECT_EQ(found().hashes, 1);
  EXPECT_TRUE(found().good());
}

}  // namespace
}  // namespace k3

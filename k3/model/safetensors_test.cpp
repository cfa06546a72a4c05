#include "k3/model/safetensors.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "k3/ops/testing.h"

namespace k3 {
namespace {

namespace fs = std::filesystem;
using testing::throws_error;

using testing::TemporaryFolder;

// A file with this header and `data` bytes behind it.
std::string file_of(std::string header, size_t data) {
  uint64_t n = header.size();
  return std::string(reinterpret_cast<const char*>(&n), 8) + header + std::string(data, '\1');
}

Snapshot opened(const TemporaryFolder& f, const std::string& header, size_t data) {
  write_file(f.str() + "/model.safetensors", file_of(header, data));
  return Snapshot(f.str());
}

TEST(safetensors, a_good_header_is_read_whatever_the_order_of_its_fields) {
  TemporaryFolder f;
  Snapshot s = opened(f,
                      R"({"b":{"data_offsets":[4,12],"shape":[2,1,2],"dtype":"BF16"},"__metadata__":{"format":"pt","n":{"x":[1]}},)"
                      R"( "a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"c":{"dtype":"F8_E8M0","shape":[3],"data_offsets":[12,15]}}  )",
                      15);
  EXPECT_EQ(s.tensors().size(), 3u);
  EXPECT_EQ(s.bytes(), 15u);
  EXPECT_EQ(s.find("c")->dtype, DType::u8);  // the official type of scale bytes
  EXPECT_EQ(to_string(s.find("b")->shape), "2 x 1 x 2");
  EXPECT_EQ(s.view(*s.find("a")).size(), 1);
  EXPECT_EQ(s.find("d"), nullptr);
}

TEST(safetensors, headers_that_cannot_be_are_refused_with_file_and_tensor) {
  TemporaryFolder f;
  auto refuses = [&](const char* header, size_t data, const char* why) {
    EXPECT_THAT([&] { opened(f, header, data); }, throws_error(why)) << header;
  };
  refuses(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4, "tensor a (F32 2) must have 8 bytes but its data_offsets span 4");
  refuses(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", 8, "tensor a begins at byte 4 of the data but 0 was expected");
  refuses(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}})", 6,
          "tensor b begins at byte 2 of the data but 4 was expected (overlap or hole)");
  refuses(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})", 4, "has data_offsets 4 .. 0");
  refuses(R"({"a":{"dtype":"Q7","shape":[1],"data_offsets":[0,4]}})", 4, "tensor a has dtype Q7, which is not supported");
  refuses(R"({"a":{"dtype":"F32","shape":[1]}})", 4, "tensor a lacks dtype, shape or data_offsets");
  refuses(R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", 4, "negative shape");
  refuses(R"({"a":{"dtype":"F32","shape":[1.5],"data_offsets":[0,4]}})", 4, "fractional shape");
  refuses(R"({"a":{"dtype":"F32","shape":[2,2,3,4,5],"data_offsets":[0,960]}})", 960, "has more than 4 axes");
  refuses(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"color":[1]}})", 4, "unknown or malformed field color");
  refuses(R"({"a":{"dtype":"F32","shape":{"x":1},"data_offsets":[0,4]}})", 4, "nests too deep");
  refuses(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", 8, "tensor a is in ");
  refuses(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]})", 4, "not valid JSON");
}

TEST(safetensors, a_tensor_in_two_shards_is_refused) {
  TemporaryFolder f;
  const std::string one = R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";
  write_file(f.str() + "/model-00001-of-000002.safetensors", file_of(one, 4));
  write_file(f.str() + "/model-00002-of-000002.safetensors",
             file_of(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", 8));
  write_file(f.str() + "/model.safetensors.index.json",
             R"({"weight_map":{"a":"model-00001-of-000002.safetensors","b":"model-00002-of-000002.safetensors"}})");
  EXPECT_THAT([&] { Snapshot s(f.str()); }, throws_error("model-00002-of-000002.safetensors"));
}

TEST(safetensors, an_index_that_says_another_shard_or_leaves_the_folder_is_refused) {
  TemporaryFolder f;
  for (const char* name : {"a", "b"})
    write_file(f.str() + "/model-" + name + ".safetensors",
               file_of(std::string("{\"") + name + R"(":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 4));
  auto with = [&](const char* index) {
    write_file(f.str() + "/model.safetensors.index.json", index);
    return Snapshot(f.str()).tensors().size();
  };
  EXPECT_EQ(with(R"({"metadata":{"total_size":8},"weight_map":{"b":"model-b.safetensors","a":"model-a.safetensors"}})"), 2u);
  EXPECT_THAT([&] { with(R"({"weight_map":{"a":"model-b.safetensors","b":"model-a.safetensors"}})"); }, throws_error("says tensor a is in"));
  EXPECT_THAT([&] { with(R"({"weight_map":{"a":"../model-a.safetensors"}})"); }, throws_error("is no plain file name"));
  EXPECT_THAT([&] { with(R"({"weight_map":{}})"); }, throws_error("has no weight_map"));
  EXPECT_THAT([&] { with("[1,"); }, throws_error("is not valid JSON"));
}

}  // namespace
}  // namespace k3

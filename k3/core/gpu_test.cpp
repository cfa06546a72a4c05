#include "k3/core/gpu.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "k3/core/arena.h"
#include "k3/core/error.h"

namespace k3 {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(gpu, without_one_every_use_says_why_and_what_to_do) {
  const std::string why = gpu::why_not();
  if (why.empty()) GTEST_SKIP() << "there is a GPU";
  if (!gpu::kBuilt) { EXPECT_THAT(why, HasSubstr("this build has no CUDA; configure it with cmake --preset cuda")); }
  EXPECT_THAT(why, HasSubstr("use --device cpu"));
  EXPECT_THAT([] { Buffer(64, Device::cuda); }, ThrowsMessage<Error>(HasSubstr(why)));
  EXPECT_THAT([] { Arena(64, Device::cuda); }, ThrowsMessage<Error>(HasSubstr(why)));
}

TEST(gpu, the_cpus_tensors_are_read_in_place) {
  float x[3] = {1, 2, 3};
  const Tensor t(x, DType::f32, {3});
  EXPECT_EQ(HostCopy(t).f32(), x);
  const float y[3] = {4, 5, 6};
  write(t, y);
  EXPECT_EQ(x[2], 6);
}

TEST(gpu, an_arena_grows_where_it_is_and_poisons_what_it_lends) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  Arena arena(size_t(8) << 30, Device::cuda);
  arena.set_poison(true);
  std::vector<float> one(1000);
  for (int i = 0; i < 1000; ++i) one[size_t(i)] = float(i);
  Tensor first = arena.lend(DType::f32, {1000});
  EXPECT_NE(HostCopy(first).f32()[0], HostCopy(first).f32()[0]);  // NaN
  write(first, one.data());
  Tensor large = arena.lend_zeroed(DType::f32, {int64_t(100) << 20});  // far more than was committed
  EXPECT_EQ(0, std::memcmp(HostCopy(first).f32(), one.data(), first.bytes()));
  EXPECT_EQ(HostCopy(large.row_range(large.rows() - 1, large.rows())).f32()[0], 0);
  copy_values(large.row_range(7, 1007), first);
  EXPECT_EQ(HostCopy(large).f32()[1006], 999);
  EXPECT_THAT([&] { arena.lend(DType::f32, {int64_t(4) << 30}); }, ThrowsMessage<Error>(HasSubstr("a step needs more than")));
}

TEST(gpu, no_room_says_what_there_is) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  EXPECT_THAT([] { Buffer(size_t(8) << 40, Device::cuda); }, ThrowsMessage<Error>(HasSubstr("[gpu] no room for 8388608 MB more: of the")));
  Arena arena(size_t(8) << 40, Device::cuda);  // addresses cost nothing
  EXPECT_THAT([&] { arena.lend(DType::f32, {int64_t(1) << 40}); }, ThrowsMessage<Error>(HasSubstr("use a smaller model, batch or context")));
  Buffer small(64, Device::cuda);  // and afterwards all goes on
  EXPECT_EQ(HostCopy(small.view(DType::f32, {16})).f32()[15], 0);
}

}  // namespace
}  // namespace k3

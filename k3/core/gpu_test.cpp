#include "k3/core/gpu.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "k3/core/arena.h"
#include "k3/core/error.h"
#include "k3/core/readback.h"

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

// What is there, what is needed, what would do: of every machine that cannot compute, without being on it.
TEST(gpu, what_is_missing_is_said_in_one_sentence) {
  const gpu::Card v100{"Tesla V100-SXM2-32GB", 7, 0}, l40{"NVIDIA L40S", 8, 9}, b200{"NVIDIA B200", 10, 0}, h200{"NVIDIA H200", 9, 0};
  EXPECT_EQ(gpu::why_not({0, 13000, "no CUDA-capable device is detected", {}}),
            "there is no NVIDIA driver here; needs one of CUDA 13.0 and an H100 or H200; install it, or use --device cpu");
  EXPECT_EQ(
      gpu::why_not({12040, 13000, "CUDA driver version is insufficient for CUDA runtime version", {}}),
      "the NVIDIA driver here serves CUDA 12.4, but this build needs CUDA 13.0; update the driver, configure with a CUDA toolkit of its age, or use "
      "--device cpu");
  EXPECT_EQ(gpu::why_not({12000, 12060, "", {h200}}), "");  // a driver serves all of its major version
  EXPECT_EQ(gpu::why_not({13000, 13000, "no CUDA-capable device is detected", {}}),
            "there is no usable NVIDIA GPU here (no CUDA-capable device is detected); needs an H100 or H200, or use --device cpu");
  EXPECT_EQ(gpu::why_not({13000, 13000, "", {}}),
            "there is no usable NVIDIA GPU here (the driver finds none); needs an H100 or H200, or use --device cpu");
  EXPECT_EQ(gpu::why_not({13000, 13000, "", {v100}}),
            "the GPU here is a Tesla V100-SXM2-32GB of compute capability 7.0, but the kernels need 9.0 (H100, H200); use --device cpu");
  EXPECT_EQ(gpu::why_not({13000, 13000, "", {b200}}),
            "the GPU here is a NVIDIA B200 of compute capability 10.0, but the kernels need 9.0 (H100, H200); use --device cpu");
  EXPECT_EQ(
      gpu::why_not({13000, 13000, "", {l40, v100, h200}}),
      "the GPU here is a NVIDIA L40S of compute capability 8.9, but the kernels need 9.0 (H100, H200); set CUDA_VISIBLE_DEVICES=2 for the NVIDIA "
      "H200, or use --device cpu");
  EXPECT_EQ(gpu::why_not({13000, 13000, "", {h200, v100}}), "");
  EXPECT_EQ(
      gpu::no_room(size_t(4) << 30, size_t(3) << 30, size_t(140) << 30, "NVIDIA H200"),
      "no room for 4096 MB more: of the 143360 MB of NVIDIA H200 3072 MB are free, so at most that fits; use a smaller model, batch or context");
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

TEST(readback, what_a_step_that_failed_asked_for_is_given_to_nobody_on_the_gpu) {
  if (const std::string why = gpu::why_not(); !why.empty()) GTEST_SKIP() << why;
  Buffer memory(64, Device::cuda);
  const Tensor t = memory.view(DType::f32, {16});
  Readback later;
  std::vector<float> got;
  auto ask = [&](float value) {
    const std::vector<float> v(16, value);
    write(t, v.data());
    later.ask(t, [&](const void* p) { got.push_back(static_cast<const float*>(p)[15]); });
  };
  ask(1), ask(2);
  later.deliver();
  EXPECT_EQ(got, (std::vector<float>{1, 2}));
  ask(3);
  later.forget();
  ask(4);
  later.deliver();
  EXPECT_EQ(got, (std::vector<float>{1, 2, 4}));
}

}  // namespace
}  // namespace k3

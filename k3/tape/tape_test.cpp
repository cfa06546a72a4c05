// Gradients that several have: nobody sees what another adds.
#include <gtest/gtest.h>

#include "k3/core/arena.h"
#include "k3/tape/tape.h"

namespace k3 {
namespace {

TEST(var, a_gradient_that_two_have_is_copied_before_one_adds_to_it) {
  Arena arena(1 << 20, Device::cpu);
  Context c{.arena = &arena};
  Var y(c, DType::f32, {3}), a(c, DType::f32, {3}), b(c, DType::f32, {1, 3});
  y.grad().f32()[1] = 5;
  ASSERT_TRUE(a.share_grad(y));
  ASSERT_TRUE(b.share_grad(y));
  EXPECT_FALSE(a.share_grad(b)) << "it has one";
  const float* shared = y.read_grad().f32();
  y.drop_grad();
  EXPECT_FALSE(y.has_grad());
  EXPECT_EQ(a.read_grad().f32(), shared);
  EXPECT_EQ(b.read_grad().shape(), (Shape{1, 3}));
  EXPECT_EQ(b.read_grad().f32(), shared);
  a.grad().f32()[1] += 2;
  EXPECT_EQ(a.read_grad().f32()[1], 7);
  EXPECT_EQ(a.read_grad().f32()[0], 0);
  EXPECT_EQ(b.read_grad().f32()[1], 5);
  bool fresh = true;
  EXPECT_EQ(b.grad(fresh).f32(), shared) << "nobody else has it any more";
  EXPECT_FALSE(fresh);
}

TEST(var, a_view_has_the_gradient_of_what_it_shows_and_shares_none) {
  Arena arena(1 << 20, Device::cpu);
  Context c{.arena = &arena};
  Var x(c, DType::f32, {2, 2}), y(c, DType::f32, {4});
  y.grad();
  const Var view = x.reshape({4});
  EXPECT_FALSE(view.share_grad(y));
  view.grad().f32()[3] = 1;
  EXPECT_EQ(x.read_grad().f32()[3], 1);
  EXPECT_FALSE(x.share_grad(y));
}

}  // namespace
}  // namespace k3

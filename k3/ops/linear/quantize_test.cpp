#include "k3/ops/linear/quantize.h"

#include "k3/ops/linear/weight_product.h"
#include "k3/ops/testing.h"

namespace k3 {
namespace {

using testing::Values;

struct Narrow {
  std::vector<uint8_t> codes;
  std::vector<float> q8_scales;
  std::vector<uint8_t> mxfp4_scales;
  std::vector<float> wide;  // what the codes mean

  Narrow(Stored to, const Values& w, int64_t out, int64_t in)
      : codes(size_t(out * in)), q8_scales(size_t(out * ((in + 63) / 64))), mxfp4_scales(size_t(out * in / 32)), wide(size_t(out * in)) {
    void* scales = to == Stored::q8 ? static_cast<void*>(q8_scales.data()) : mxfp4_scales.data();
    quantize(to, w.data(), out, in, codes.data(), scales, "w");
    widen({to, out, in, codes.data(), scales}, 0, out, wide.data());
  }
};

double largest(const Values& w, int64_t first, int64_t last) {
  double m = 0;
  for (int64_t i = first; i < last; ++i) m = std::max(m, std::abs(double(w[i])));
  return m;
}

TEST(quantize, q8_is_within_its_bound_at_any_width) {
  for (int64_t in : {1, 63, 64, 65, 200})
    for (double size : {1e-30, 0.02, 1e30}) {
      Values w(9 * in, uint64_t(in), size);
      Narrow n(Stored::q8, w, 9, in);
      for (int64_t i = 0; i < 9 * in; ++i) {
        const int64_t row = i / in, first = row * in + i % in / 64 * 64;
        const double m = largest(w, first, std::min(first + 64, (row + 1) * in));
        // half a step; the scale and code * scale are each rounded to float32
        ASSERT_LE(std::abs(double(w[i]) - n.wide[size_t(i)]), m / 254 + m * 2e-7) << i << " of width " << in;
      }
    }
}

TEST(quantize, mxfp4_takes_the_nearest_value_under_the_least_scale_that_does_not_clip) {
  constexpr double magnitude[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  for (double size : {1e-44, 1e-38, 1e-9, 0.02, 1.0, 1e37}) {
    const int64_t out = 40, in = 96;
    Values w(out * in, 5, size);
    w[0] = 6, w[1] = 0.25f, w[2] = 0.75f, w[3] = 1.25f, w[4] = 1.75f, w[5] = 2.5f, w[6] = 3.5f, w[7] = -5, w[8] = -0.0f;  // ties
    for (int i = 9; i < 32; ++i) w[i] = 0;
    for (int i = 32; i < 64; ++i) w[i] = 0;
    Narrow n(Stored::mxfp4, w, out, in);
    EXPECT_EQ(std::vector<float>(n.wide.begin(), n.wide.begin() + 9), (std::vector<float>{6, 0, 1, 1, 2, 2, 4, -4, 0}));
    for (int64_t g = 0; g < out * in / 32; ++g) {
      const double m = largest(w, 32 * g, 32 * g + 32), s = std::ldexp(1.0, n.mxfp4_scales[size_t(g)] - 127);
      ASSERT_LE(m, 6 * s);
      ASSERT_TRUE(m > 3 * s || n.mxfp4_scales[size_t(g)] == 0 || m == 0);
      for (int64_t i = 32 * g; i < 32 * g + 32; ++i) {
        const double error = std::abs(double(w[i]) - n.wide[size_t(i)]);
        for (double v : magnitude) ASSERT_LE(error, std::abs(std::abs(double(w[i])) - v * s)) << w[i] << " became " << n.wide[size_t(i)];
        ASSERT_LE(error, s);
      }
    }
  }
}

TEST(quantize, values_that_mxfp4_holds_stay_as_they_are) {
  Values w(64 * 96, 3);
  std::vector<float> once = Narrow(Stored::mxfp4, w, 64, 96).wide;
  EXPECT_EQ(Narrow(Stored::mxfp4, Values(once), 64, 96).wide, once);
}

// Root mean square error of normal weights, relative: what a user pays. MXFP4's is training.md 9's figure; q8's is s / sqrt(12) for a step of
// s = 2.6 sigma / 127, the largest of 64 being 2.6 sigma or so.
TEST(quantize, normal_weights_lose_a_known_amount) {
  for (auto [to, want] : {std::pair{Stored::q8, 0.0059}, {Stored::mxfp4, 0.115}}) {
    Values w(256 * 256, 1);
    Narrow n(to, w, 256, 256);
    double error = 0, norm = 0;
    for (int64_t i = 0; i < w.size(); ++i) error += std::pow(w[i] - n.wide[size_t(i)], 2), norm += std::pow(w[i], 2);
    EXPECT_NEAR(std::sqrt(error / norm), want, 0.03 * want);
  }
}

TEST(quantize, a_weight_that_is_not_finite_is_refused_by_name) {
  for (Stored to : {Stored::q8, Stored::mxfp4})
    for (float bad : {NAN, INFINITY}) {
      Values w(3 * 64, 1);
      w[70] = bad;
      EXPECT_THAT([&] { Narrow(to, w, 3, 64); }, testing::throws_error("[quantize] w holds a weight that is not finite in row 1"));
    }
  EXPECT_THAT([&] { Narrow(Stored::mxfp4, Values(48, 1), 1, 48); }, testing::throws_error("[quantize] MXFP4 takes rows of a multiple of 32, not 48"));
}

}  // namespace
}  // namespace k3

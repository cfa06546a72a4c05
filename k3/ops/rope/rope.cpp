#include "k3/ops/rope/rope.h"

#include <cmath>

#include "k3/core/error.h"
#include "k3/core/listed.h"
#include "k3/core/threads.h"
#include "k3/ops/rope/rope_cuda.h"
#include "k3/tape/tape.h"

namespace k3 {

namespace {

// y = x or y += x, rotated. Few numbers beside the products around it, so one plain loop serves every instruction set.
template <bool add>
void rotate(const float* x, float* y, const std::vector<int64_t>& positions, const RopeShape& s, float direction) {
  const int64_t head = s.plain + s.width, row = s.heads * head;
  std::vector<double> frequency(static_cast<size_t>(s.width / 2));
  for (size_t i = 0; i < frequency.size(); ++i) frequency[i] = std::pow(s.theta, -2 * double(i) / double(s.width));
  parallel_blocks(int64_t(positions.size()), 64, [&](int64_t from, int64_t to) {
    std::vector<float> cosine(frequency.size()), sine(frequency.size());
    for (int64_t n = from; n < to; ++n) {
      for (size_t i = 0; i < frequency.size(); ++i) {
        const double phi = double(positions[size_t(n)]) * frequency[i];
        cosine[i] = float(std::cos(phi)), sine[i] = direction * float(std::sin(phi));
      }
      for (int64_t h = 0; h < s.heads; ++h) {
        const float* a = x + n * row + h * head;
        float* b = y + n * row + h * head;
        for (int64_t i = 0; i < s.plain; ++i) b[i] = add ? b[i] + a[i] : a[i];
        for (int64_t i = 0; i < s.width / 2; ++i) {
          const float u = a[s.plain + 2 * i], v = a[s.plain + 2 * i + 1], c = cosine[size_t(i)], d = sine[size_t(i)];
          float* to_pair = b + s.plain + 2 * i;
          const float first = c * u - d * v, second = d * u + c * v;
          to_pair[0] = add ? to_pair[0] + first : first, to_pair[1] = add ? to_pair[1] + second : second;
        }
      }
    }
  });
}

void rotate_on_gpu([[maybe_unused]] Context& c, [[maybe_unused]] const float* x, [[maybe_unused]] float* y,
                   [[maybe_unused]] const std::vector<int64_t>& positions, [[maybe_unused]] const RopeShape& s, [[maybe_unused]] float direction,
                   [[maybe_unused]] bool add) {
  if constexpr (gpu::kBuilt) {
    Scratch scratch(*c.arena);
    const int64_t* at = listed(c.device, scratch, positions);
    gpu::check(cuda::rope({int64_t(positions.size()), s.heads, s.plain, s.width, s.theta, at, x, y, direction, add}, gpu::stream()));
  }
}

}  // namespace

Var rope(Var x, const RopeShape& s, const Batch& batch, const std::vector<int64_t>& first) {
  Context& c = x.context();
  const int64_t columns = s.heads * (s.plain + s.width);
  K3_CHECK(s.width > 0 && s.width % 2 == 0 && s.plain >= 0 && s.heads > 0,
           "[rope] {} heads of {} + {} channels; the rotated ones must be even and some", s.heads, s.plain, s.width);
  K3_CHECK(std::isfinite(s.theta) && s.theta > 0, "[rope] theta is {} but must be above 0", s.theta);
  K3_CHECK(x.cols() == columns && x.rows() == batch.tokens(), "[rope] x is {} but {} tokens of {} heads of {} + {} channels are {} x {}",
           to_string(x.value().shape()), batch.tokens(), s.heads, s.plain, s.width, batch.tokens(), columns);
  K3_CHECK(first.empty() || int64_t(first.size()) == batch.sequences(), "[rope] {} first positions for {} sequences", first.size(),
           batch.sequences());
  std::vector<int64_t> positions(size_t(batch.tokens()), 0);
  for (int64_t q = 0; q < batch.sequences(); ++q)
    for (int64_t i = 0; i < batch.length(q); ++i) positions[size_t(batch.begin(q) + i)] = (first.empty() ? 0 : first[size_t(q)]) + i;
  Var y(c, DType::f32, x.value().shape());
  const double n = double(x.rows()) * double(s.heads * s.width);
  c.cost("rope", {.flops = 3 * n, .bytes = 8 * double(x.size())});
  if (c.device == Device::cpu) rotate<false>(x.f32(), y.f32(), positions, s, 1);
  if (c.device == Device::cuda) rotate_on_gpu(c, x.f32(), y.f32(), positions, s, 1, false);
  on_backward(y, [=, &c] {
    Tensor dx = x.grad();
    c.cost("rope", {.flops = 3 * n, .bytes = 12 * double(x.size())});
    if (c.device == Device::cpu) rotate<true>(y.grad().f32(), dx.f32(), positions, s, -1);
    if (c.device == Device::cuda) rotate_on_gpu(c, y.grad().f32(), dx.f32(), positions, s, -1, true);
  });
  return y;
}

}  // namespace k3

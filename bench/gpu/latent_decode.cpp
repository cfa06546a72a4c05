// Decode attention over the paged latent cache: against a double-precision softmax, and its time.
#include "bench/gpu/gpu.h"
#include "k3/ops/attention/attention_cuda.h"

using namespace k3;
using namespace k3::gpu;

namespace {

constexpr int W = cuda::kLatentRow, V = cuda::kLatent, P = cuda::kPageTokens;

void check(int heads, const std::vector<int>& lengths, int split, double sharp) {
  Rng rng(5);
  const int rows = int(lengths.size());
  int longest = *std::max_element(lengths.begin(), lengths.end()), stride = (longest + P - 1) / P + 1, pages = 1;
  std::vector<int> table(rows * stride, 1 << 30), order;  // entries past the end would fault
  for (int n : lengths) pages += (n + P - 1) / P;
  for (int i = 0; i < pages; ++i) order.push_back(i);
  for (int i = pages - 1; i > 0; --i) std::swap(order[i], order[rng.next() % (i + 1)]);
  std::vector<bf16> cache(int64_t(pages) * P * W, bf16{0x7fff}), q = gpu::to_bf16(normals(int64_t(rows) * heads * W, rng, 0, sharp));
  int used = 0;
  for (int r = 0; r < rows; ++r)
    for (int t = 0; t < lengths[r]; ++t) {
      if (t % P == 0) table[r * stride + t / P] = order[used++];
      for (int i = 0; i < W; ++i) cache[(int64_t(table[r * stride + t / P]) * P + t % P) * W + i] = k3::to_bf16(float(rng.normal()));
    }
  std::vector<double> right(int64_t(rows) * heads * V, 0.);
  const double scale = 1 / std::sqrt(192.);
  for (int r = 0; r < rows; ++r)
    for (int h = 0; h < heads; ++h) {
      std::vector<double> s(lengths[r]);
      double top = -INFINITY, sum = 0;
      for (int t = 0; t < lengths[r]; ++t) {
        const bf16* c = &cache[(int64_t(table[r * stride + t / P]) * P + t % P) * W];
        double x = 0;
        for (int i = 0; i < W; ++i) x += double(to_float(c[i])) * to_float(q[(int64_t(r) * heads + h) * W + i]);
        s[t] = x * scale, top = std::max(top, s[t]);
      }
      for (double& x : s) sum += x = std::exp(x - top);
      for (int t = 0; t < lengths[r]; ++t) {
        const bf16* c = &cache[(int64_t(table[r * stride + t / P]) * P + t % P) * W];
        for (int i = 0; i < V; ++i) right[(int64_t(r) * heads + h) * V + i] += s[t] / sum * to_float(c[i]);
      }
    }
  Buffer<bf16> dq(q), dc(cache), out(int64_t(rows) * heads * V);
  Buffer<int> dt(table), dl(lengths);
  Buffer<float> part(cuda::latent_decode_workspace(rows, heads, longest, split));
  cuda::LatentDecodeArgs a{dq.data, int64_t(heads) * W, dc.data, pages,     dt.data, stride, dl.data, rows, heads,
                           longest, float(scale),       split,   part.data, out.data};
  launched(latent_decode(a, nullptr));
  GPU(cudaDeviceSynchronize());
  auto first = out.download();
  std::string name =
      "latent decode, " + std::to_string(heads) + " heads, " + std::to_string(split) + " pages a split, queries x " + std::to_string(sharp);
  expect(name, error(widen(first), right), 6e-3);  // P in bf16: 2^-9 an entry; out in bf16
  out.poison(), part.poison();
  launched(latent_decode(a, nullptr));
  GPU(cudaDeviceSynchronize());
  expect_true(name + ", two runs are bitwise equal", same_bits(first, out.download()));
}

void time(int rows, int length, int heads, double floor) {
  Rng rng(6);
  const int pages_each = (length + P - 1) / P;
  Buffer<bf16> cache(many_normals(int64_t(rows) * pages_each * P * W, rng)), q(many_normals(int64_t(rows) * heads * W, rng)),
      out(int64_t(rows) * heads * V);
  std::vector<int> table(rows * pages_each);
  for (int i = 0; i < int(table.size()); ++i) table[i] = i;
  for (int i = int(table.size()) - 1; i > 0; --i) std::swap(table[i], table[rng.next() % (i + 1)]);
  Buffer<int> dt(table), dl(std::vector<int>(rows, length));
  const int split = cuda::latent_decode_split(rows, heads, length, 132);
  Buffer<float> part(cuda::latent_decode_workspace(rows, heads, length, split));
  cuda::LatentDecodeArgs a{q.data, int64_t(heads) * W, cache.data, rows * pages_each, dt.data, pages_each, dl.data, rows, heads, length, 0.0722f,
                           split,  part.data,          out.data};
  double us = time_us([&](int, cudaStream_t st) { launched(latent_decode(a, st)); }, 4);
  report("MLA decode, B " + std::to_string(rows) + ", L " + std::to_string(length) + ", " + std::to_string(heads) + " heads", us, floor);
}

}  // namespace

int main(int argc, char** argv) {
  if (wants(argc, argv, "check")) {
    const std::vector<int> lengths = {1, 63, 64, 65, 0, 300, 1000};
    check(96, lengths, 100, 1), check(96, lengths, 2, 1), check(12, lengths, 2, 1), check(32, lengths, 1, 3), check(96, lengths, 3, 6),
        check(64, lengths, 5, 1), check(70, lengths, 100, 1);
  }
  if (wants(argc, argv, "time"))
    time(64, 8192, 96, 144), time(128, 4096, 96, 147), time(64, 8192, 12, 141), time(1, 131072, 96, 35), time(1, 8192, 96, 3);
  if (argc > 1 && !std::strcmp(argv[1], "profile")) time(64, 8192, 96, 144);
  std::printf("%d failures\n", failures);
  return failures != 0;
}

// Causal attention of prefill and training on the GPU against a double-precision softmax, and its time.
#include "bench/gpu/gpu.h"
#include "k3/ops/attention/attention_cuda.h"

using namespace k3;
using namespace k3::gpu;

namespace {

void check(int heads, double sharp, bool gated) {
  Rng rng(5);
  const std::vector<std::pair<int, int>> shapes = {{1, 1},     {5, 5},   {64, 64},  {50, 50}, {128, 128}, {129, 129},
                                                   {200, 200}, {1, 300}, {70, 333}, {0, 10},  {127, 255}, {300, 300}};
  const int poisoned = 3;  // this sequence is NaN: nobody else may notice
  std::vector<int> qb = {0}, kb = {0};
  int longest = 0;
  for (auto [n, m] : shapes) qb.push_back(qb.back() + n), kb.push_back(kb.back() + m), longest = std::max(longest, n);
  const int64_t nq = qb.back(), nk = kb.back();
  auto q = gpu::to_bf16(normals(nq * heads * 192, rng, 0, sharp)), kv = gpu::to_bf16(normals(nk * heads * 256, rng)),
       sh = gpu::to_bf16(normals(nk * 72, rng)), gate = gpu::to_bf16(normals(nq * heads * 128, rng));
  for (int64_t i = kb[poisoned] * heads * 256; i < kb[poisoned + 1] * heads * 256; ++i) kv[i] = bf16{0x7fff};
  std::vector<double> right(nq * heads * 128, 0.), lse(nq * heads), largest(nq * heads), raw(nq * heads * 128, 0.);
  const double scale = 1 / std::sqrt(192.);
  for (size_t s = 0; s < shapes.size(); ++s)
    for (int i = 0; i < shapes[s].first; ++i)
      for (int h = 0; h < heads; ++h) {
        const int64_t row = qb[s] + i;
        int see = i + shapes[s].second - shapes[s].first + 1;
        std::vector<double> p(see);
        double top = -INFINITY, sum = 0;
        for (int j = 0; j < see; ++j) {
          const int64_t k = kb[s] + j;
          double x = 0;
          for (int c = 0; c < 192; ++c)
            x += double(to_float(q[(row * heads + h) * 192 + c])) * to_float(c < 128 ? kv[(k * heads + h) * 256 + c] : sh[k * 72 + c - 128]);
          p[j] = x * scale, top = std::max(top, p[j]);
        }
        for (double& x : p) sum += x = std::exp(x - top);
        lse[row * heads + h] = top + std::log(sum), largest[row * heads + h] = top;
        for (int c = 0; c < 128; ++c) {
          double& o = raw[(row * heads + h) * 128 + c];
          for (int j = 0; j < see; ++j) o += p[j] / sum * to_float(kv[((kb[s] + j) * heads + h) * 256 + 128 + c]);
          right[(row * heads + h) * 128 + c] = gated ? o / (1 + std::exp(-double(to_float(gate[(row * heads + h) * 128 + c])))) : o;
        }
      }
  Buffer<bf16> dq(q), dkv(kv), dsh(sh), dg(gate), o(nq * heads * 128);
  Buffer<float> dl(nq * heads), dm(nq * heads), dr(nq * heads * 128);
  Buffer<int> dqb(qb), dkb(kb);
  cuda::PrefillArgs a{dq.data,  dkv.data,     dkv.data + 128,
                      dsh.data, heads * 192,  heads * 256,
                      256,      72,           heads * 128,
                      dqb.data, dkb.data,     int(shapes.size()),
                      heads,    longest,      nq,
                      nk,       float(scale), gated ? dg.data : nullptr,
                      o.data,   dl.data,      dm.data,
                      dr.data};
  launched(prefill_forward(a, nullptr));
  GPU(cudaDeviceSynchronize());
  auto first = o.download();
  auto drop = [&](std::vector<double> v, bool by_head) {  // without the poisoned sequence
    const int64_t width = heads * (by_head ? 1 : 128);
    std::fill(v.begin() + qb[poisoned] * width, v.begin() + qb[poisoned + 1] * width, 0.);
    return v;
  };
  std::string name = "prefill, " + std::to_string(heads) + " heads, queries x " + std::to_string(sharp) + (gated ? ", gated, " : ", ");
  expect(name + "output", error(drop(widen(first), false), drop(right, false)), 5e-3);  // P and o in bf16
  expect(name + "log-sum", error(drop(widen(dl.download()), true), drop(lse, true)), 1e-5);
  expect(name + "largest logit", error(drop(widen(dm.download()), true), drop(largest, true)), 1e-5);
  expect(name + "output before the gate", error(drop(widen(dr.download()), false), drop(raw, false)), 3e-3);
  o.poison();
  launched(prefill_forward(a, nullptr));
  GPU(cudaDeviceSynchronize());
  expect_true(name + "two runs are bitwise equal", same_bits(first, o.download()));
}

void time(int sequences, int tokens, int heads, double floor, bool gated) {
  Rng rng(6);
  const int64_t N = int64_t(sequences) * tokens;
  Buffer<bf16> q(many_normals(N * heads * 192, rng)), kv(many_normals(N * heads * 256, rng)), sh(many_normals(N * 64, rng)),
      gate(many_normals(N * heads * 128, rng)), o(N * heads * 128);
  Buffer<float> lse(N * heads);
  std::vector<int> begins;
  for (int i = 0; i <= sequences; ++i) begins.push_back(i * tokens);
  Buffer<int> b(begins);
  cuda::PrefillArgs a{q.data, kv.data, kv.data + 128, sh.data, heads * 192, heads * 256, 256, 64,      heads * 128,
                      b.data, b.data,  sequences,     heads,   tokens,      N,           N,   0.0722f, gated ? gate.data : nullptr,
                      o.data, lse.data};
  report("MLA prefill, " + std::to_string(sequences) + " x " + std::to_string(tokens) + ", " + std::to_string(heads) + " heads" +
             (gated ? ", gated" : ""),
         time_us([&](int, cudaStream_t s) { launched(prefill_forward(a, s)); }, 1, 20), floor);
}

}  // namespace

int main(int argc, char** argv) {
  if (wants(argc, argv, "check")) check(2, 1, false), check(3, 3, true);
  if (wants(argc, argv, "time")) time(1, 8192, 96, 2610, false), time(1, 8192, 96, 2657, true), time(8, 1024, 96, 326, false);
  std::printf("%d failures\n", failures);
  return failures != 0;
}

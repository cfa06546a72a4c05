// Forward of delta_parallel.cuh: 3, results.
#include "k3/core/enqueue.cuh"
#include "k3/ops/delta_rule/delta_parallel.cuh"

namespace k3::cuda {
namespace {

template <int K, bool kExact>
__global__ void __launch_bounds__(kThreads<K>) results_kernel(const __grid_constant__ DeltaParallel p) {
  follow();
  const DeltaArgs& a = p.a;
  const Place place(p);
  const float* z = Work<K>(p, blockIdx.x, place.head).z;
  const float* S = p.memories + (int64_t(blockIdx.x) * a.heads + place.head) * K * K;
  product<C, K, K, kAcross<K>, kExact, true>(threadIdx.x >> 5, kThreads<K> / 32, [&](int i, int k) { return pair(z + i * K + k); }, [&](int k, int j) { return pair(S + j * K + k); },
                                         [&](int i, int j, float x0, float x1) {
                                           if (i >= place.n) return;
                                           float* o = a.out + place.row(a, i) * a.value_dim + j;
                                           if (j < a.value_dim) o[0] += a.scale * x0;
                                           if (j + 1 < a.value_dim) o[1] += a.scale * x1;
                                         });
}

}  // namespace

const char* delta_parallel_forward(const DeltaParallel& p, void* s) {
  return run<false>(p, s, [&]<int K, bool kExact>(dim3 chunks) { return launch(results_kernel<K, kExact>, chunks, kThreads<K>, 0, s, p); });
}

}  // namespace k3::cuda

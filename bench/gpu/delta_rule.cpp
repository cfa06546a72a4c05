// The gated delta rule on the GPU: the chunk kernel and the decode step against the double-precision recurrence, and their times.
#include "bench/gpu/gpu.h"
#include "k3/ops/delta_rule/delta_rule_cuda.h"

using namespace k3;
using namespace k3::gpu;

namespace {

constexpr int D = 128;

struct Gates {
  const char* name;
  bool bounded;
  double mean, deviation;  // of the raw gate
  int pattern = 0;         // 1: half of the channels saturated, half open   2: 20 tokens saturated, 20 open   3: aligned keys, beta near 1
  double limit = 5e-3;
};
const Gates kGates[] = {
    {"bounded, N(0,1)", true, 0, 1},
    {"bounded, slow", true, -4, 1},
    {"bounded, very slow", true, -8, 1},
    {"bounded, all at -5", true, 30, 0},
    {"bounded, channels mixed", true, 0, 1, 1},
    {"bounded, tokens mixed", true, 0, 1, 2},
    {"bounded, aligned keys, beta near 1", true, -5.3, 0.2, 3, 1.2e-2},
    {"softplus, N(0,1)", false, 0, 1},
    {"softplus, slow", false, -4, 1},
    {"softplus, about -8", false, 8, 0.5},
    {"softplus, about -60", false, 60, 2},
    {"softplus, channels mixed", false, 0, 1, 1},
    {"softplus, aligned keys, beta near 1", false, -4, 0.1, 3, 1.2e-2},
};

struct Problem {
  std::vector<int> begins;
  int heads;
  Gates gates;
  std::vector<float> q, k, v, x, b, A_log, dt_bias, state;  // (N, H, D); state (sequences, H, D, D)
  int64_t tokens() const { return begins.back(); }
  int sequences() const { return int(begins.size()) - 1; }
};

Problem make(const std::vector<int>& lengths, int heads, const Gates& g, uint64_t seed) {
  Rng rng(seed);
  Problem p{{0}, heads, g};
  for (int n : lengths) p.begins.push_back(p.begins.back() + n);
  int64_t n = p.tokens() * heads * D;
  p.q = normals(n, rng), p.k = normals(n, rng), p.v = normals(n, rng), p.x = normals(n, rng, g.mean, g.deviation);
  p.b = normals(p.tokens() * heads, rng, 0, 1.5);
  p.A_log = normals(heads, rng, 0, 0.05), p.dt_bias = normals(heads * D, rng, 0, 0.1);
  p.state = normals(int64_t(p.sequences()) * heads * D * D, rng, 0, 0.3);
  for (int64_t t = 0; t < p.tokens(); ++t)
    for (int i = 0; i < heads * D; ++i) {
      float& x = p.x[t * heads * D + i];
      if (g.pattern == 1) x = i % 2 ? 25.f : -8.f;
      if (g.pattern == 2) x = t / 20 % 2 ? 25.f : -8.f;
      if (g.pattern == 3) p.k[t * heads * D + i] = p.k[i] + 1e-3f * float(rng.normal());
    }
  if (g.pattern == 3)
    for (float& b : p.b) b = float(3 + 4 * rng.uniform());
  auto round = [](std::vector<float>& v) {
    for (float& x : v) x = to_float(to_bf16(x));
  };
  round(p.q), round(p.k), round(p.v), round(p.x), round(p.b);
  return p;
}

// o (N, H, D) and the final states, in double
void recurrence(const Problem& p, double scale, bool with_state, std::vector<double>& o, std::vector<double>& states) {
  const int H = p.heads;
  o.assign(p.tokens() * H * D, 0), states.assign(int64_t(p.sequences()) * H * D * D, 0);
  std::vector<double> S(D * D), q(D), k(D), a(D);
  for (int s = 0; s < p.sequences(); ++s)
    for (int h = 0; h < H; ++h) {
      const int64_t at = (int64_t(s) * H + h) * D * D;
      for (int i = 0; i < D * D; ++i) S[i] = with_state ? p.state[at + i] : 0.;
      for (int t = p.begins[s]; t < p.begins[s + 1]; ++t) {
        const int64_t r = (int64_t(t) * H + h) * D;
        double nq = 1e-6, nk = 1e-6, rate = std::exp(double(p.A_log[h]));
        for (int i = 0; i < D; ++i) nq += double(p.q[r + i]) * p.q[r + i], nk += double(p.k[r + i]) * p.k[r + i];
        for (int i = 0; i < D; ++i) {
          double z = double(p.x[r + i]) + p.dt_bias[h * D + i];
          double g = p.gates.bounded ? -5 / (1 + std::exp(-rate * z)) : -rate * (z > 0 ? z + std::log1p(std::exp(-z)) : std::log1p(std::exp(z)));
          q[i] = p.q[r + i] / std::sqrt(nq), k[i] = p.k[r + i] / std::sqrt(nk), a[i] = std::exp(g);
        }
        double beta = 1 / (1 + std::exp(-double(p.b[int64_t(t) * H + h])));
        double u[D] = {}, out[D] = {};
        for (int i = 0; i < D; ++i)
          for (int j = 0; j < D; ++j) u[j] += k[i] * (S[i * D + j] *= a[i]);
        for (int j = 0; j < D; ++j) u[j] = beta * (p.v[r + j] - u[j]);
        for (int i = 0; i < D; ++i)
          for (int j = 0; j < D; ++j) out[j] += q[i] * (S[i * D + j] += k[i] * u[j]);
        for (int j = 0; j < D; ++j) o[r + j] = scale * out[j];
      }
      std::copy(S.begin(), S.end(), states.begin() + at);
    }
}

struct OnDevice {  // q, k, v, x side by side in rows of 4 H D + 8, as slices of one product's result
  Buffer<bf16> rows, b, o;
  Buffer<float> A_log, dt_bias, in, out;
  Buffer<int> begins;
  cuda::DeltaChunkArgs a{};
  explicit OnDevice(const Problem& p, bool with_state = true)
      : rows(p.tokens() * (4 * p.heads * D + 8)),
        b(gpu::to_bf16(p.b)),
        o(p.tokens() * p.heads * D),
        A_log(p.A_log),
        dt_bias(p.dt_bias),
        in(p.state),
        out(int64_t(p.state.size())),
        begins(p.begins) {
    const int64_t w = p.heads * D, stride = 4 * w + 8;
    std::vector<bf16> r(rows.size, bf16{0x7fff});
    for (int64_t t = 0; t < p.tokens(); ++t)
      for (int64_t i = 0; i < w; ++i) {
        r[t * stride + i] = k3::to_bf16(p.q[t * w + i]), r[t * stride + w + i] = k3::to_bf16(p.k[t * w + i]);
        r[t * stride + 2 * w + i] = k3::to_bf16(p.v[t * w + i]), r[t * stride + 3 * w + i] = k3::to_bf16(p.x[t * w + i]);
      }
    rows.upload(r);
    a.q = rows.data, a.k = rows.data + w, a.v = rows.data + 2 * w, a.x = rows.data + 3 * w, a.b = b.data;
    a.q_stride = a.k_stride = a.v_stride = a.x_stride = stride, a.b_stride = p.heads, a.o_stride = w;
    a.o = o.data;
    a.gate = {p.gates.bounded, -5.f, A_log.data, dt_bias.data};
    a.scale = 0.08838834764831845f;
    a.begins = begins.data, a.sequences = p.sequences(), a.heads = p.heads, a.tokens = p.tokens();
    a.state_in = with_state ? in.data : nullptr, a.state_out = out.data;
  }
};

void check_chunks() {
  const std::vector<int> lengths = {1, 15, 16, 17, 0, 31, 32, 33, 63, 64, 65, 130, 257};
  for (const Gates& g : kGates) {
    Problem p = make(lengths, 2, g, 7);
    std::vector<double> o, s;
    recurrence(p, 0.08838834764831845, true, o, s);
    OnDevice d(p);
    launched(delta_chunk_forward(d.a, nullptr));
    GPU(cudaDeviceSynchronize());
    auto first = d.o.download();
    auto first_state = d.out.download();
    expect(std::string("chunk, ") + g.name + ", output", error(widen(first), o), g.limit);
    expect(std::string("chunk, ") + g.name + ", state", error(widen(first_state), s), g.limit);
    d.o.poison(), d.out.poison();
    launched(delta_chunk_forward(d.a, nullptr));
    GPU(cudaDeviceSynchronize());
    expect_true(std::string("chunk, ") + g.name + ", two runs are bitwise equal",
                same_bits(first, d.o.download()) && same_bits(first_state, d.out.download()));
  }
  {  // the float32 recurrence on the device
    Problem p = make({1, 33, 130}, 2, kGates[0], 8);
    std::vector<double> o, s;
    recurrence(p, 0.08838834764831845, true, o, s);
    OnDevice d(p);
    Buffer<float> q(p.q), k(p.k), v(p.v), x(p.x), b(p.b), out(int64_t(p.q.size()));
    auto a = d.a;
    a.q = q.data, a.k = k.data, a.v = v.data, a.x = x.data, a.b = b.data, a.o = out.data;
    a.q_stride = a.k_stride = a.v_stride = a.x_stride = a.o_stride = p.heads * D;
    launched(delta_plain_forward(a, nullptr));
    GPU(cudaDeviceSynchronize());
    expect("plain float32, output", error(widen(out.download()), o), 2e-6);
    expect("plain float32, state", error(widen(d.out.download()), s), 2e-6);
  }
  // a prompt in two calls equals one call; a later token does not move earlier rows
  Problem p = make({130}, 2, kGates[0], 9);
  OnDevice whole(p, false);
  launched(delta_chunk_forward(whole.a, nullptr));
  auto right = widen(whole.o.download()), right_state = widen(whole.out.download());
  double worst = 0, worst_state = 0;
  for (int cut : {1, 31, 32, 33, 64, 100, 129}) {
    OnDevice d(p, false);
    std::vector<int> begins = {0, cut, 130};
    d.begins.upload({0, cut}), d.a.sequences = 1;
    launched(delta_chunk_forward(d.a, nullptr));
    GPU(cudaDeviceSynchronize());
    d.begins.upload({cut, 130}), d.a.state_in = d.out.data;
    launched(delta_chunk_forward(d.a, nullptr));
    GPU(cudaDeviceSynchronize());
    worst = std::max(worst, error(widen(d.o.download()), right)), worst_state = std::max(worst_state, error(widen(d.out.download()), right_state));
  }
  expect("chunk, prompt cut in two calls, output", worst, 5e-3);
  expect("chunk, prompt cut in two calls, state", worst_state, 5e-3);
  Problem later = p;
  for (int i = 0; i < 2 * D; ++i) later.x[21 * 2 * D + i] = 3.f, later.k[21 * 2 * D + i] += 1.f, later.v[21 * 2 * D + i] -= 1.f;
  OnDevice d(later, false);
  launched(delta_chunk_forward(d.a, nullptr));
  auto moved = widen(d.o.download());
  right.resize(21 * 2 * D), moved.resize(21 * 2 * D);
  expect("chunk, a later token's gate moves earlier rows by no more than a rare last bit", error(moved, right), 1e-3);
}

// Gradients of sum(o . d_o) + sum(final state . d_state), by the recurrence backwards (training.md 5.2, 5.5), in double.
struct Gradients {
  std::vector<double> q, k, v, x, b, A, dt, state;
};
Gradients recurrence_backward(const Problem& p, double scale, const std::vector<float>& d_o, const std::vector<float>& d_state) {
  const int H = p.heads;
  const int64_t n = p.tokens() * H * D;
  Gradients g{std::vector<double>(n),
              std::vector<double>(n),
              std::vector<double>(n),
              std::vector<double>(n),
              std::vector<double>(p.tokens() * H),
              std::vector<double>(H),
              std::vector<double>(H * D),
              std::vector<double>(p.state.size())};
  for (int s = 0; s < p.sequences(); ++s)
    for (int h = 0; h < H; ++h) {
      const int T = p.begins[s + 1] - p.begins[s];
      const int64_t at = (int64_t(s) * H + h) * D * D;
      std::vector<double> S((T + 1) * D * D), G(D * D), decayed(D * D);
      for (int i = 0; i < D * D; ++i) S[i] = p.state[at + i], G[i] = d_state[at + i];
      std::vector<double> Q(T * D), K(T * D), a(T * D), rq(T), rk(T), beta(T), e(T * D);
      const double rate = std::exp(double(p.A_log[h]));
      for (int t = 0; t < T; ++t) {
        const int64_t r = (int64_t(p.begins[s] + t) * H + h) * D;
        double nq = 1e-6, nk = 1e-6;
        for (int i = 0; i < D; ++i) nq += double(p.q[r + i]) * p.q[r + i], nk += double(p.k[r + i]) * p.k[r + i];
        rq[t] = 1 / std::sqrt(nq), rk[t] = 1 / std::sqrt(nk), beta[t] = 1 / (1 + std::exp(-double(p.b[r / D])));
        const double* in = &S[t * D * D];
        double* out = &S[(t + 1) * D * D];
        for (int i = 0; i < D; ++i) {
          Q[t * D + i] = p.q[r + i] * rq[t], K[t * D + i] = p.k[r + i] * rk[t];
          a[t * D + i] = std::exp(-5 / (1 + std::exp(-rate * (double(p.x[r + i]) + p.dt_bias[h * D + i]))));
        }
        for (int j = 0; j < D; ++j) e[t * D + j] = p.v[r + j];
        for (int i = 0; i < D; ++i)
          for (int j = 0; j < D; ++j) out[i * D + j] = a[t * D + i] * in[i * D + j], e[t * D + j] -= K[t * D + i] * out[i * D + j];
        for (int i = 0; i < D; ++i)
          for (int j = 0; j < D; ++j) out[i * D + j] += K[t * D + i] * beta[t] * e[t * D + j];
      }
      for (int t = T - 1; t >= 0; --t) {
        const int64_t r = (int64_t(p.begins[s] + t) * H + h) * D;
        double dq[D] = {}, dk[D] = {}, du[D] = {}, de[D], db = 0, qq = 0, kk = 0;
        for (int i = 0; i < D; ++i)
          for (int j = 0; j < D; ++j) {
            G[i * D + j] += scale * Q[t * D + i] * d_o[r + j];
            dq[i] += scale * S[((t + 1) * D + i) * D + j] * d_o[r + j];
            du[j] += G[i * D + j] * K[t * D + i];
            decayed[i * D + j] = a[t * D + i] * S[(t * D + i) * D + j];
          }
        for (int j = 0; j < D; ++j) db += du[j] * e[t * D + j], de[j] = beta[t] * du[j], g.v[r + j] = de[j];
        for (int i = 0; i < D; ++i) {
          double dg = 0;
          for (int j = 0; j < D; ++j) {
            dk[i] += G[i * D + j] * beta[t] * e[t * D + j] - decayed[i * D + j] * de[j];
            double dS = G[i * D + j] - K[t * D + i] * de[j];
            dg += dS * decayed[i * D + j];
            G[i * D + j] = a[t * D + i] * dS;
          }
          double z = rate * (double(p.x[r + i]) + p.dt_bias[h * D + i]), sg = 1 / (1 + std::exp(-z)), dz = dg * -5 * sg * (1 - sg);
          g.x[r + i] = dz * rate, g.dt[h * D + i] += dz * rate, g.A[h] += dz * z;
          qq += Q[t * D + i] * dq[i], kk += K[t * D + i] * dk[i];
        }
        for (int i = 0; i < D; ++i) g.q[r + i] = rq[t] * (dq[i] - Q[t * D + i] * qq), g.k[r + i] = rk[t] * (dk[i] - K[t * D + i] * kk);
        g.b[r / D] = db * beta[t] * (1 - beta[t]);
      }
      std::copy(G.begin(), G.end(), g.state.begin() + at);
    }
  return g;
}

void check_backward() {
  for (int which = 0; which < 7; ++which) {
    const Gates& gates = kGates[which];
    Problem p = make({1, 17, 0, 33, 64, 100}, 2, gates, 21 + which);
    Rng rng(31);
    const int64_t n = p.q.size();
    std::vector<float> d_o = normals(n, rng), d_state = normals(p.state.size(), rng, 0, 0.2);
    for (float& x : d_o) x = to_float(k3::to_bf16(x));
    Gradients right = recurrence_backward(p, 0.08838834764831845, d_o, d_state);
    OnDevice d(p);
    std::vector<int> chunk_begins = {0};
    for (int s = 0; s < p.sequences(); ++s) chunk_begins.push_back(chunk_begins.back() + (p.begins[s + 1] - p.begins[s] + 31) / 32);
    const int chunks = chunk_begins.back(), H = p.heads;
    Buffer<bf16> snapshots(int64_t(chunks) * H * D * D), d_snapshots(int64_t(chunks) * H * D * D), u(n), dd_o(gpu::to_bf16(d_o)), dq(n), dk(n), dv(n),
        dx(n), db(n / D);
    Buffer<float> ds(d_state), ds_in(int64_t(d_state.size())), dA(std::vector<float>(H, 0.f)), ddt(std::vector<float>(H * D, 0.f)),
        partial(cuda::delta_backward_partial(chunks, H));
    Buffer<int> cb(chunk_begins);
    d.a.snapshots = snapshots.data, d.a.u = u.data, d.a.chunk_begins = cb.data;
    cuda::DeltaBackwardArgs b{d.a,     chunks,  dd_o.data,  ds.data, dq.data,  dk.data,          dv.data,
                              dx.data, db.data, ds_in.data, dA.data, ddt.data, d_snapshots.data, partial.data};
    launched(delta_chunk_forward(d.a, nullptr));
    launched(delta_chunk_backward(b, nullptr));
    GPU(cudaDeviceSynchronize());
    const double limit = which == 6 ? 3e-2 : 1.5e-2;
    std::string name = std::string("backward, ") + gates.name + ", ";
    expect(name + "dq", error(widen(dq.download()), right.q), limit), expect(name + "dk", error(widen(dk.download()), right.k), limit);
    expect(name + "dv", error(widen(dv.download()), right.v), limit), expect(name + "db", error(widen(db.download()), right.b), limit);
    // a gate's gradient that is nearly nothing in double is measured against the keys'
    double size = 0, small = 0;
    for (int64_t i = 0; i < n; ++i) size += right.k[i] * right.k[i], small += right.x[i] * right.x[i];
    expect(name + "dx", error(widen(dx.download()), right.x) * std::min(1., std::sqrt(small / size) * 1e3), limit);
    expect(name + "initial state", error(widen(ds_in.download()), right.state), limit);
    auto A1 = dA.download(), t1 = ddt.download();
    auto q1 = dq.download(), x1 = dx.download();
    expect(name + "A_log", error(widen(A1), right.A) * std::min(1., std::sqrt(small / size) * 1e3),
           3e-2),  // a sum over tokens in which most cancels, while the noise of bf16 operands is alike within a chunk
        expect(name + "dt_bias", error(widen(t1), right.dt) * std::min(1., std::sqrt(small / size) * 1e3), 4e-2);
    dA.zero(), ddt.zero(), dq.poison(), dx.poison(), partial.poison(), d_snapshots.poison(), snapshots.poison();
    launched(delta_chunk_forward(d.a, nullptr));
    launched(delta_chunk_backward(b, nullptr));
    GPU(cudaDeviceSynchronize());
    expect_true(name + "two runs are bitwise equal",
                same_bits(A1, dA.download()) && same_bits(t1, ddt.download()) && same_bits(q1, dq.download()) && same_bits(x1, dx.download()));
  }
}

void time_backward() {
  for (const Gates& gates : {kGates[0], kGates[1]}) {
    const int T = 8192, H = 96, chunks = T / 32;
    Rng rng(3);
    const int64_t W = H * D, n = int64_t(T) * W;
    Buffer<bf16> q(many_normals(n, rng)), k(many_normals(n, rng)), v(many_normals(n, rng)), x(many_normals(n, rng, gates.mean, gates.deviation)),
        b(many_normals(T * H, rng)), o(n), d_o(many_normals(n, rng)), u(n), dq(n), dk(n), dv(n), dx(n), db(T * H);
    Buffer<bf16> snapshots(int64_t(chunks) * W * D), d_snapshots(int64_t(chunks) * W * D);
    Buffer<float> A(std::vector<float>(H, 0.f)), dt(std::vector<float>(W, 0.f)), out(W * D), dA(std::vector<float>(H, 0.f)),
        ddt(std::vector<float>(W, 0.f)), partial(cuda::delta_backward_partial(chunks, H));
    Buffer<int> begins(std::vector<int>{0, T}), cb(std::vector<int>{0, chunks});
    cuda::DeltaChunkArgs a{q.data,  k.data,      v.data, x.data, b.data, W,       W,       W, W, H, W, o.data, {true, -5.f, A.data, dt.data},
                           0.0884f, begins.data, 1,      H,      T,      nullptr, out.data};
    a.snapshots = snapshots.data, a.u = u.data, a.chunk_begins = cb.data;
    cuda::DeltaBackwardArgs g{a,       chunks,  d_o.data, nullptr, dq.data,  dk.data,          dv.data,
                              dx.data, db.data, nullptr,  dA.data, ddt.data, d_snapshots.data, partial.data};
    report(std::string("KDA forward for training, T 8192, 96 heads, ") + gates.name,
           time_us([&](int, cudaStream_t s) { launched(delta_chunk_forward(a, s)); }, 1, 15), 237 + 234);
    report(std::string("KDA backward, T 8192, 96 heads, ") + gates.name,
           time_us([&](int, cudaStream_t s) { launched(delta_chunk_backward(g, s)); }, 1, 15), 800);
    report(std::string("KDA forward + backward, T 8192, 96 heads, ") + gates.name,
           time_us([&](int, cudaStream_t s) { launched(delta_chunk_forward(a, s)), launched(delta_chunk_backward(g, s)); }, 1, 15), 1037);
  }
}

double silu(double x) { return x / (1 + std::exp(-x)); }

void check_step() {
  for (int which : {0, 1, 3, 7, 10}) {
    const Gates& g = kGates[which];
    const int rows = 5, slots = 7, H = 3, W = H * D;
    Problem p = make({rows}, H, g, 11);
    Rng rng(12);
    std::vector<float> conv[3], norm = normals(D, rng, 1, 0.1), state = normals(int64_t(slots) * W * D, rng, 0, 0.3),
                                window = normals(slots * 9 * W, rng), og = normals(rows * W, rng);
    for (auto& c : conv) c = normals(W * 4, rng, 0, 0.5);
    for (float& x : window) x = to_float(to_bf16(x));
    for (float& x : og) x = to_float(to_bf16(x));
    std::vector<int> slot = {4, -1, 0, 6, 2};
    std::vector<double> y(rows * W, 0.), S(state.begin(), state.end()), win(window.begin(), window.end());
    for (int r = 0; r < rows; ++r) {
      if (slot[r] < 0) continue;
      for (int h = 0; h < H; ++h) {
        std::vector<double> in[3];
        for (int i = 0; i < 3; ++i) {
          const auto& raw = i == 0 ? p.q : i == 1 ? p.k : p.v;
          for (int c = h * D; c < h * D + D; ++c) {
            double* w = &win[(int64_t(slot[r]) * 9 + i) * W + c];
            double now = raw[r * W + c];
            in[i].push_back(silu(conv[i][c * 4] * w[0] + conv[i][c * 4 + 1] * w[3 * W] + conv[i][c * 4 + 2] * w[6 * W] + conv[i][c * 4 + 3] * now));
            w[0] = w[3 * W], w[3 * W] = w[6 * W], w[6 * W] = now;
          }
        }
        double nq = 1e-6, nk = 1e-6, rate = std::exp(double(p.A_log[h])), beta = 1 / (1 + std::exp(-double(p.b[r * H + h]))), out[D] = {}, u[D] = {},
               square = 0;
        for (int i = 0; i < D; ++i) nq += in[0][i] * in[0][i], nk += in[1][i] * in[1][i];
        double* s = &S[(int64_t(slot[r]) * H + h) * D * D];
        for (int i = 0; i < D; ++i) {
          double z = double(p.x[r * W + h * D + i]) + p.dt_bias[h * D + i];
          double a = std::exp(g.bounded ? -5 / (1 + std::exp(-rate * z)) : -rate * (z > 0 ? z + std::log1p(std::exp(-z)) : std::log1p(std::exp(z))));
          for (int j = 0; j < D; ++j) u[j] += in[1][i] / std::sqrt(nk) * (s[i * D + j] *= a);
        }
        for (int j = 0; j < D; ++j) u[j] = beta * (in[2][j] - u[j]);
        for (int i = 0; i < D; ++i)
          for (int j = 0; j < D; ++j) out[j] += in[0][i] / std::sqrt(nq) * (s[i * D + j] += in[1][i] / std::sqrt(nk) * u[j]);
        for (double& x : out) x *= 0.08838834764831845, square += x * x;
        for (int j = 0; j < D; ++j)
          y[r * W + h * D + j] = out[j] / std::sqrt(square / D + 1e-5) * norm[j] / (1 + std::exp(-double(og[r * W + h * D + j])));
      }
    }
    Buffer<bf16> q(gpu::to_bf16(p.q)), k(gpu::to_bf16(p.k)), v(gpu::to_bf16(p.v)), x(gpu::to_bf16(p.x)), b(gpu::to_bf16(p.b)), gate(gpu::to_bf16(og)),
        w(gpu::to_bf16(window)), out(rows * W);
    Buffer<float> c0(conv[0]), c1(conv[1]), c2(conv[2]), ds(state), A(p.A_log), dt(p.dt_bias), n(norm);
    Buffer<int> sl(slot);
    cuda::DeltaStepArgs a{q.data,
                          k.data,
                          v.data,
                          x.data,
                          gate.data,
                          b.data,
                          W,
                          W,
                          W,
                          W,
                          W,
                          H,
                          W,
                          c0.data,
                          c1.data,
                          c2.data,
                          w.data,
                          ds.data,
                          sl.data,
                          {g.bounded, -5.f, A.data, dt.data},
                          0.08838834764831845f,
                          n.data,
                          1e-5f,
                          out.data,
                          rows,
                          H};
    launched(delta_step(a, nullptr));
    GPU(cudaDeviceSynchronize());
    expect(std::string("step, ") + g.name + ", y", error(widen(out.download()), y), 4e-3);  // y is rounded to bf16: 2^-9 at most, 1.7e-3 on average
    expect(std::string("step, ") + g.name + ", state", error(widen(ds.download()), S), 3e-6);
    expect(std::string("step, ") + g.name + ", windows", error(widen(w.download()), win), 0);
  }
}

void time_chunks() {
  struct Shape {
    const char* name;
    int sequences, tokens, heads;
    double floor;
  };
  for (Shape s : {Shape{"T 8192, 96 heads", 1, 8192, 96, 237}, Shape{"T 2048, 96 heads", 1, 2048, 96, 62},
                  Shape{"8 x 1024, 96 heads", 8, 1024, 96, 258}, Shape{"T 32768, 12 heads", 1, 32768, 12, 118}}) {
    for (const Gates& g : {kGates[0], kGates[1], kGates[7]}) {
      Rng rng(3);
      const int64_t W = s.heads * D, N = int64_t(s.sequences) * s.tokens;
      Buffer<bf16> q(many_normals(N * W, rng)), k(many_normals(N * W, rng)), v(many_normals(N * W, rng)),
          x(many_normals(N * W, rng, g.mean, g.deviation)), b(many_normals(N * s.heads, rng)), o(N * W);
      Buffer<float> A(std::vector<float>(s.heads, 0.f)), dt(std::vector<float>(W, 0.f)), out(int64_t(s.sequences) * W * D);
      std::vector<int> begins;
      for (int i = 0; i <= s.sequences; ++i) begins.push_back(i * s.tokens);
      Buffer<int> be(begins);
      cuda::DeltaChunkArgs a{
          q.data,  k.data,  v.data,      x.data,  b.data, W,       W,       W, W, s.heads, W, o.data, {g.bounded, -5.f, A.data, dt.data},
          0.0884f, be.data, s.sequences, s.heads, N,      nullptr, out.data};
      report(std::string("KDA forward, ") + s.name + ", " + g.name, time_us([&](int, cudaStream_t st) { launched(delta_chunk_forward(a, st)); }),
             s.floor);
    }
  }
}

void time_step() {
  struct Shape {
    int rows, heads, sets;
    double floor;
  };
  for (Shape s : {Shape{1, 96, 24, 3.1}, Shape{64, 96, 2, 196}, Shape{128, 12, 4, 49}, Shape{8, 96, 8, 24.5}}) {
    Rng rng(4);
    const int W = s.heads * D, slots = s.rows * s.sets;
    Buffer<bf16> in(many_normals(int64_t(5) * s.rows * W, rng)), b(many_normals(s.rows * s.heads, rng)), w(many_normals(int64_t(slots) * 9 * W, rng)),
        y(s.rows * W);
    Buffer<float> conv(normals(W * 12, rng, 0, 0.5)), state(int64_t(slots) * W * D), A(std::vector<float>(s.heads, 0.f)),
        dt(std::vector<float>(W, 0.f)), n(std::vector<float>(D, 1.f));
    state.zero();
    std::vector<Buffer<int>> sets;
    for (int i = 0; i < s.sets; ++i) {
      std::vector<int> v;
      for (int r = 0; r < s.rows; ++r) v.push_back(i * s.rows + r);
      sets.emplace_back(v);
    }
    cuda::DeltaStepArgs a{in.data,
                          in.data + s.rows * W,
                          in.data + 2 * s.rows * W,
                          in.data + 3 * s.rows * W,
                          in.data + 4 * s.rows * W,
                          b.data,
                          W,
                          W,
                          W,
                          W,
                          W,
                          s.heads,
                          W,
                          conv.data,
                          conv.data + W * 4,
                          conv.data + W * 8,
                          w.data,
                          state.data,
                          nullptr,
                          {true, -5.f, A.data, dt.data},
                          0.0884f,
                          n.data,
                          1e-5f,
                          y.data,
                          s.rows,
                          s.heads};
    double us = time_us(
        [&](int i, cudaStream_t st) {
          a.slots = sets[i % s.sets].data;
          launched(delta_step(a, st));
        },
        24);
    report("KDA decode step, B " + std::to_string(s.rows) + ", " + std::to_string(s.heads) + " heads", us, s.floor);
    a.chained = true;
    us = time_us(
        [&](int i, cudaStream_t st) {
          a.slots = sets[i % s.sets].data;
          launched(delta_step(a, st));
        },
        24);
    report("KDA decode step, chained launches, B " + std::to_string(s.rows) + ", " + std::to_string(s.heads) + " heads", us, s.floor);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (wants(argc, argv, "check")) check_chunks(), check_step(), check_backward();
  if (wants(argc, argv, "time")) time_chunks(), time_step(), time_backward();
  if (argc > 1 && !std::strcmp(argv[1], "profile")) {  // one launch, for a profiler
    Problem p = make({1024}, 96, kGates[0], 1);
    OnDevice d(p);
    launched(delta_chunk_forward(d.a, nullptr));
    GPU(cudaDeviceSynchronize());
  }
  std::printf("%d failures\n", failures);
  return failures != 0;
}

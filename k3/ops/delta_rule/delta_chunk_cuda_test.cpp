// KDA's chunk kernels in bfloat16 against the recurrence in double: every gate, length, packing and cut.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "k3/ops/delta_rule/delta_kernel_testing.h"

namespace k3::testing {
namespace {

using delta_chunk = kernel;

struct OnDevice {  // q, k, v, x side by side in rows of 4 H D + 8, as slices of one product's result
  There<bf16> rows, b, o;
  There<float> A_log, dt_bias, in, out;
  There<int> begins;
  There<char> ahead;
  cuda::DeltaChunkArgs a{};
  explicit OnDevice(const Problem& p, bool with_state = true)
      : rows(p.tokens() * (4 * p.heads * D + 8)),
        b(narrowed(p.b)),
        o(p.tokens() * p.heads * D),
        A_log(p.A_log),
        dt_bias(p.dt_bias),
        in(p.state),
        out(int64_t(p.state.size())),
        begins(p.begins),
        ahead(cuda::delta_ahead_bytes(p.heads, p.sequences())) {
    const int64_t w = p.heads * D, stride = 4 * w + 8;
    std::vector<bf16> r(rows.size, bf16{0x7fff});
    for (int64_t t = 0; t < p.tokens(); ++t)
      for (int64_t i = 0; i < w; ++i) {
        r[t * stride + i] = to_bf16(p.q[t * w + i]), r[t * stride + w + i] = to_bf16(p.k[t * w + i]);
        r[t * stride + 2 * w + i] = to_bf16(p.v[t * w + i]), r[t * stride + 3 * w + i] = to_bf16(p.x[t * w + i]);
      }
    rows.upload(r);
    a.q = rows.data, a.k = rows.data + w, a.v = rows.data + 2 * w, a.x = rows.data + 3 * w, a.b = b.data;
    a.q_stride = a.k_stride = a.v_stride = a.x_stride = stride, a.b_stride = p.heads, a.o_stride = w;
    a.o = o.data;
    a.gate = {p.gates.bounded, -5.f, A_log.data, dt_bias.data};
    a.scale = float(kScale);
    a.begins = begins.data, a.sequences = p.sequences(), a.heads = p.heads, a.tokens = p.tokens();
    a.state_in = with_state ? in.data : nullptr, a.state_out = out.data;
    a.ahead = ahead.data;
  }
};

// Who builds operands: every block its own; blocks without a memory so much of them; as suits.
struct Share {
  int own, period;
};
constexpr Share kShares[] = {{1, 1}, {1, 2}, {1, 3}, {3, 5}, {0, 1}, {0, 0}};

TEST_F(delta_chunk, cuda_equals_the_recurrence_for_every_gate_and_length) {
  const std::vector<int> lengths =
      few_shapes() ? std::vector<int>{1, 17, 0, 33, 64} : std::vector<int>{1, 15, 16, 17, 0, 31, 32, 33, 63, 64, 65, 130, 257};
  for (const Gates& g : kGates) {
    SCOPED_TRACE(g.name);
    const Problem p = make(lengths, few_shapes() ? 1 : 2, g, 7);
    std::vector<double> o, s;
    recurrence(p, true, o, s);
    OnDevice d(p);
    K3_LAUNCH(delta_chunk_forward(d.a, gpu::stream()));
    const auto first = d.o.download();
    const auto first_state = d.out.download();
    expect_error("o", error(widened(first), o), g.limit);
    expect_error("state", error(widened(first_state), s), g.limit);
    for (auto [own, period] : kShares) {
      if (few_shapes() && period != 2) continue;
      d.o.poison(), d.out.poison(), d.ahead.poison(), d.a.own = own, d.a.period = period;
      K3_LAUNCH(delta_chunk_forward(d.a, gpu::stream()));
      EXPECT_TRUE(same(first, d.o.download()) && same(first_state, d.out.download())) << "two runs differ, own " << own << " of " << period;
    }
  }
}

// More items for each pair than its ring and its stages have room for, many times over; and more pairs than groups that build.
TEST_F(delta_chunk, cuda_who_builds_operands_moves_no_bit) {
  for (const Gates& g : {kGates[0], kGates[7]})
    for (auto [tokens, heads] : {std::pair{1500, 2}, {700, 90}, {500, 104}}) {
      if (few_shapes() && heads > 2) continue;
      SCOPED_TRACE(fmt::format("{}, {} tokens of {} heads", g.name, tokens, heads));
      const Problem p = make({tokens}, heads, g, 77);
      OnDevice d(p);
      d.a.own = d.a.period = 1;
      K3_LAUNCH(delta_chunk_forward(d.a, gpu::stream()));
      const auto o = d.o.download();
      const auto state = d.out.download();
      for (auto [own, period] : {Share{1, 2}, {1, 3}, {2, 5}, {3, 5}, {7, 8}, {1, 8}, {0, 1}}) {
        d.o.poison(), d.out.poison(), d.ahead.poison(), d.a.own = own, d.a.period = period;
        K3_LAUNCH(delta_chunk_forward(d.a, gpu::stream()));
        EXPECT_TRUE(same(o, d.o.download()) && same(state, d.out.download())) << "own " << own << " of " << period;
      }
    }
}

// Every length to four chunks and a bit, with nothing allocated behind the last row. Operands in bfloat16 are 4e-3 off on average; of one head's few
// tokens a mean scatters by a third.
TEST_F(delta_chunk, cuda_every_length_equals_the_recurrence) {
  for (int T = 1; T <= 130; T += few_shapes() ? 43 : 1) {
    const Problem p = make({T}, 1, kGates[T % 2 ? 0 : 7], uint64_t(T));
    std::vector<double> o, s;
    recurrence(p, true, o, s);
    OnDevice d(p);
    K3_LAUNCH(delta_chunk_forward(d.a, gpu::stream()));
    expect_error(fmt::format("o of {} tokens", T), error(d.o, o), 6.5e-3);
    expect_error(fmt::format("state of {} tokens", T), error(d.out, s), 6.5e-3);
  }
}

TEST_F(delta_chunk, cuda_plain_kernel_in_float32_equals_the_recurrence) {
  const Problem p = make({1, 33, 130}, 2, kGates[0], 8);
  std::vector<double> o, s;
  recurrence(p, true, o, s);
  OnDevice d(p);
  There<float> q(p.q), k(p.k), v(p.v), x(p.x), b(p.b), out(int64_t(p.q.size()));
  auto a = d.a;
  a.q = q.data, a.k = k.data, a.v = v.data, a.x = x.data, a.b = b.data, a.o = out.data;
  a.q_stride = a.k_stride = a.v_stride = a.x_stride = a.o_stride = p.heads * D;
  K3_LAUNCH(delta_plain_forward(a, gpu::stream()));
  expect_error("o", error(out, o), 2e-6);
  expect_error("state", error(d.out, s), 2e-6);
}

// Memory that nothing forgets, written a hundred thousand times. Keys in all directions keep it bounded, and what a token's products round, 2^-9,
// does not add up, for every write pulls the memory toward its value.
TEST_F(delta_chunk, cuda_holds_what_it_should_after_a_hundred_thousand_tokens_without_decay) {
  const int T = few_shapes() ? 1000 : 100000;
  for (const Gates& none : {Gates{"bounded, none", true, -300, 0, 0, 1.2e-2}, Gates{"softplus, none", false, -300, 0, 0, 1.2e-2}}) {
    SCOPED_TRACE(none.name);
    const Problem p = make({T}, 1, none, 5);
    std::vector<double> S(p.state.begin(), p.state.end()), o(size_t(64 * D), 0.0), q(D), k(D), u(D);
    for (int t = 0; t < T; ++t) {
      const float *tq = &p.q[size_t(t) * D], *tk = &p.k[size_t(t) * D];
      double nq = 1e-6, nk = 1e-6;
      for (int i = 0; i < D; ++i) nq += double(tq[i]) * tq[i], nk += double(tk[i]) * tk[i];
      for (int i = 0; i < D; ++i) q[i] = tq[i] / std::sqrt(nq), k[i] = tk[i] / std::sqrt(nk), u[i] = p.v[size_t(t) * D + i];
      for (int i = 0; i < D; ++i)
        for (int j = 0; j < D; ++j) u[j] -= k[i] * S[i * D + j];
      const double beta = 1 / (1 + std::exp(-double(p.b[t])));
      for (double& x : u) x *= beta;
      for (int i = 0; i < D; ++i)
        for (int j = 0; j < D; ++j) S[i * D + j] += k[i] * u[j];
      for (int i = 0; i < D && t >= T - 64; ++i)
        for (int j = 0; j < D; ++j) o[size_t((t - T + 64) * D + j)] += kScale * q[i] * S[i * D + j];
    }
    OnDevice d(p);
    K3_LAUNCH(delta_chunk_forward(d.a, gpu::stream()));
    const std::vector<double> got = widened(d.o.download());
    expect_error("the last 64 tokens", error(std::vector<double>(got.end() - 64 * D, got.end()), o), none.limit);
    expect_error("state", error(d.out, S), none.limit);
  }
}

// Where chunks line up the second call does the very same; elsewhere the products of a chunk round in other places.
TEST_F(delta_chunk, cuda_a_prompt_in_two_calls_equals_one_call) {
  const Problem p = make({130}, 2, kGates[0], 9);
  OnDevice whole(p, false);
  K3_LAUNCH(delta_chunk_forward(whole.a, gpu::stream()));
  const auto bits = whole.o.download();
  const auto state_bits = whole.out.download();
  const auto right = widened(bits), right_state = widened(state_bits);
  for (int cut = 1; cut < 130; cut += few_shapes() ? 31 : 1) {
    OnDevice d(p, false);
    d.begins.upload({0, cut}), d.a.sequences = 1;
    K3_LAUNCH(delta_chunk_forward(d.a, gpu::stream()));
    gpu::synchronize();
    d.begins.upload({cut, 130}), d.a.state_in = d.out.data;
    K3_LAUNCH(delta_chunk_forward(d.a, gpu::stream()));
    expect_error(fmt::format("o, cut at {}", cut), error(d.o, right), 5e-3);
    expect_error(fmt::format("state, cut at {}", cut), error(d.out, right_state), 5e-3);
    if (cut % cuda::kDeltaChunk == 0) { EXPECT_TRUE(same(d.o.download(), bits) && same(d.out.download(), state_bits)) << "cut at " << cut; }
  }
}

// The chunk's anchor is a power of two, so what comes later in a chunk moves an earlier row by a rare last bit at most.
TEST_F(delta_chunk, cuda_a_later_token_leaves_earlier_rows) {
  const Problem p = make({130}, 2, kGates[0], 9);
  for (int at : {21, 64, 127}) {
    Problem later = p;
    for (int i = at * 2 * D; i < (at + 1) * 2 * D; ++i) later.x[i] = 3.f, later.k[i] += 1.f, later.v[i] -= 1.f;
    OnDevice one(p, false), other(later, false);
    K3_LAUNCH(delta_chunk_forward(one.a, gpu::stream()));
    K3_LAUNCH(delta_chunk_forward(other.a, gpu::stream()));
    auto right = widened(one.o.download()), moved = widened(other.o.download());
    right.resize(size_t(at * 2 * D)), moved.resize(size_t(at * 2 * D));
    expect_error(fmt::format("before token {}", at), error(moved, right), 1e-3);
  }
}

// Gradients of sum(o . d_o) + sum(final state . d_state), by the recurrence backwards (training.md 5.2, 5.5), in double.
struct Gradients {
  std::vector<double> q, k, v, x, b, A, dt, state;
};
Gradients recurrence_backward(const Problem& p, const std::vector<float>& d_o, const std::vector<float>& d_state) {
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
          a[t * D + i] = std::exp(log_decay(p, h, i, p.x[r + i]));
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
            G[i * D + j] += kScale * Q[t * D + i] * d_o[r + j];
            dq[i] += kScale * S[((t + 1) * D + i) * D + j] * d_o[r + j];
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
          const double x = double(p.x[r + i]) + p.dt_bias[h * D + i], sg = 1 / (1 + std::exp(-(p.gates.bounded ? rate * x : x)));
          const double dx = p.gates.bounded ? dg * -5 * sg * (1 - sg) * rate : dg * -rate * sg;
          g.x[r + i] = dx, g.dt[h * D + i] += dx, g.A[h] += p.gates.bounded ? dx * x : dg * log_decay(p, h, i, p.x[r + i]);
          qq += Q[t * D + i] * dq[i], kk += K[t * D + i] * dk[i];
        }
        for (int i = 0; i < D; ++i) g.q[r + i] = rq[t] * (dq[i] - Q[t * D + i] * qq), g.k[r + i] = rk[t] * (dk[i] - K[t * D + i] * kk);
        g.b[r / D] = db * beta[t] * (1 - beta[t]);
      }
      std::copy(G.begin(), G.end(), g.state.begin() + at);
    }
  return g;
}

TEST_F(delta_chunk, cuda_gradients_equal_the_recurrence) {
  uint64_t seed = 21;
  for (const Gates& gates : kGates) {
    SCOPED_TRACE(gates.name);
    const std::vector<int> lengths = few_shapes() ? std::vector<int>{1, 0, 40} : std::vector<int>{1, 17, 0, 33, 64, 100};
    const Problem p = make(lengths, few_shapes() ? 1 : 2, gates, seed++);
    Random rng(31);
    const int64_t n = int64_t(p.q.size());
    std::vector<float> d_o = rng.normals(n);
    const std::vector<float> d_state = rng.normals(int64_t(p.state.size()), 0, 0.2);
    for (float& x : d_o) x = rounded(x);
    const Gradients right = recurrence_backward(p, d_o, d_state);
    OnDevice d(p);
    std::vector<int> chunk_begins = {0};
    for (int s = 0; s < p.sequences(); ++s) chunk_begins.push_back(chunk_begins.back() + (p.begins[s + 1] - p.begins[s] + 31) / 32);
    const int chunks = chunk_begins.back(), H = p.heads;
    There<bf16> snapshots(int64_t(chunks) * H * D * D), d_snapshots(int64_t(chunks) * H * D * D), u(n), dd_o(narrowed(d_o)), dq(n), dk(n), dv(n),
        dx(n), db(n / D);
    There<float> ds(d_state), ds_in(int64_t(d_state.size())), dA(std::vector<float>(size_t(H), 0.f)), ddt(std::vector<float>(size_t(H * D), 0.f)),
        partial(cuda::delta_backward_partial(chunks, H));
    There<int> cb(chunk_begins);
    d.a.snapshots = snapshots.data, d.a.u = u.data, d.a.chunk_begins = cb.data;
    [[maybe_unused]] cuda::DeltaBackwardArgs b{d.a,     chunks,  dd_o.data,  ds.data, dq.data,  dk.data,          dv.data,
                                               dx.data, db.data, ds_in.data, dA.data, ddt.data, d_snapshots.data, partial.data};
    K3_LAUNCH(delta_chunk_forward(d.a, gpu::stream()));
    K3_LAUNCH(delta_chunk_backward(b, gpu::stream()));
    // What one rounding does to each gradient: its change when every number that enters is moved by up to 2^-9 of itself, as rounding an operand to
    // bfloat16 moves it. Four products in a row, both operands of each rounded: eight times that, if all pull the same way. Of aligned keys with beta
    // near 1 each token adds the small difference of large parts, and db and dv move four to eight times as much as with other keys. A gate's
    // gradient that is nearly nothing is measured against the keys'.
    Problem moved = p;
    std::vector<float> moved_o = d_o, moved_state = d_state;
    for (auto* v : {&moved.q, &moved.k, &moved.v, &moved.state, &moved_o, &moved_state})
      for (float& x : *v) x *= float(1 + (2 * rng.uniform() - 1) / 512);
    const Gradients near = recurrence_backward(moved, moved_o, moved_state);
    auto expect = [&](const char* name, double e, double one) { expect_error(name, e, 8 * one); };
    expect("dq", error(dq, right.q), error(near.q, right.q)), expect("dk", error(dk, right.k), error(near.k, right.k));
    expect("dv", error(dv, right.v), error(near.v, right.v)), expect("db", error(db, right.b), error(near.b, right.b));
    expect("first state", error(ds_in, right.state), error(near.state, right.state));
    // Those of A_log and dt_bias are sums over tokens in which most cancels, while the noise of bfloat16 operands is alike within a chunk.
    double size = 0, small = 0;
    for (size_t i = 0; i < size_t(n); ++i) size += right.k[i] * right.k[i], small += right.x[i] * right.x[i];
    const double share = std::min(1., std::sqrt(small / size) * 1e3);
    expect("dx", error(dx, right.x) * share, std::max(error(near.x, right.x) * share, 1.0 / 512));
    const auto A1 = dA.download(), t1 = ddt.download();
    if (few_shapes()) continue;  // of one head dA_log is one number, which may be nearly nothing
    expect_error("dA_log", error(widened(A1), right.A) * share, 3e-2), expect_error("ddt_bias", error(widened(t1), right.dt) * share, 4e-2);
    const auto q1 = dq.download(), k1 = dk.download(), v1 = dv.download(), x1 = dx.download();
    for (auto [own, period] : kShares) {
      dA.zero(), ddt.zero(), dq.poison(), dk.poison(), dv.poison(), dx.poison(), partial.poison(), d_snapshots.poison(), snapshots.poison();
      d.ahead.poison(), d.a.own = b.forward.own = own, d.a.period = b.forward.period = period;
      K3_LAUNCH(delta_chunk_forward(d.a, gpu::stream()));
      K3_LAUNCH(delta_chunk_backward(b, gpu::stream()));
      EXPECT_TRUE(same(A1, dA.download()) && same(t1, ddt.download())) << "dA_log or ddt_bias of two runs differ, own " << own << " of " << period;
      EXPECT_TRUE(same(q1, dq.download()) && same(k1, dk.download()) && same(v1, dv.download()) && same(x1, dx.download()))
          << "gradients of two runs differ, own " << own << " of " << period;
    }
  }
}

}  // namespace
}  // namespace k3::testing

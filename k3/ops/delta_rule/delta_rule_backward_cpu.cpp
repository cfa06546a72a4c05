// The backward: chunks from the last to the first with G, the gradient of the memory after the chunk. For each chunk of n rows, with the
// memory S before it, kd = k brought to the chunk's end, x = [K+; Q+] and y = [-dE; scale dO], two rows a token:
//
//   dU   = scale M^T dO + kd G                          gradient of what each token wrote
//   from the last row up:  dE_t = beta_t dU_t,  dU_s -= A_ts dE_t for s < t     (the adjoint of the forward's solve)
//   dbeta_t = dU_t . e_t;   dV = dE
//   dA, dM = y U^T    dx = y S^T    dkd = U G^T         tokens in lanes: S and G are read as they lie
//   dq, dk, dg        through the decays, channel by channel (pair_backward)
//   G <- Diag(all decays) G + x^T y
//
// 12 K V multiply-adds a token, and 3/2 more to form the memories between those that were kept.
#include "k3/core/threads.h"
#include "k3/ops/delta_rule/delta_rule_tiles.h"

namespace k3::cpu::K3_ISA {

// What a chunk's tokens see of each other in one register of channels, backwards. The forward comes down from k_t, q_t through the decays
// t, t-1, ... 0, meeting k_s after the decay s+1; the backward goes up again. A decay's log gradient is (gradient) x (value) just after it.
//   dx (2n, k)   dts (2n, 16): rows dA_t, dM_t   dkd (n, k)   d_all: gradient of the product of all decays
K3_INLINE void pair_backward(const float* q, const float* k, const float* decay, const float* dx, const float* dts, const float* dkd,
                             const float* d_all, int64_t n, int64_t ld, float* dq, float* dk, float* dg) {
  reg x[16], y[16], gk[16], gg[16];
  for (int64_t s = 0; s < n; ++s) gk[s] = gg[s] = reg{};
  for (int64_t t = 0; t < n; ++t) {
    x[t] = get(k + t * ld), y[t] = get(q + t * ld);
    for (int64_t s = t - 1; s >= 0; --s) {
      reg d = get(decay + (s + 1) * ld);
      x[s] = x[s + 1] * d, y[s] = y[s + 1] * d;
    }
    reg d = get(decay), gx = get(dx + 2 * t * ld), gy = get(dx + (2 * t + 1) * ld);
    gx *= d, gy *= d;
    gg[0] += gx * x[0] + gy * y[0];
    const float *da = dts + 32 * t, *dm = da + 16;
    for (int64_t s = 0; s < t; ++s) {
      reg ks = get(k + s * ld), next = get(decay + (s + 1) * ld);
      gk[s] += x[s] * da[s] + y[s] * dm[s];
      gx = (gx + ks * da[s]) * next, gy = (gy + ks * dm[s]) * next;
      gg[s + 1] += gx * x[s + 1] + gy * y[s + 1];
    }
    gk[t] += y[t] * dm[t] + gx;
    put(dq + t * ld, gy + get(k + t * ld) * dm[t]);
  }
  // the rows brought to the chunk's end: w_s is the product of the decays after s
  reg w[16], gw = get(d_all);
  w[n - 1] = reg{} + 1.0f;
  for (int64_t s = n - 2; s >= 0; --s) w[s] = w[s + 1] * get(decay + (s + 1) * ld);
  for (int64_t s = 0; s < n; ++s) {
    reg d = get(dkd + s * ld), ds = get(decay + s * ld);
    gw *= ds;
    gg[s] += gw * w[s];
    gk[s] += d * w[s];
    gw += d * get(k + s * ld);
  }
  for (int64_t s = 0; s < n; ++s) put(dk + s * ld, gk[s]), put(dg + s * ld, gg[s]);
}

// d_all[i] = sum over columns of (G * S)[i]
static inline void row_products(const float* g, const float* s, float* out, int64_t k, int64_t v) {
  for (int64_t i = 0; i < k; i += 16) {
    reg acc[16];
    for (int r = 0; r < 16; ++r) acc[r] = reg{};
    for (int64_t p = 0; p < v; p += kDeltaPanel)
      for (int r = 0; r < 16; ++r)
        for (int c = 0; c < kDeltaPanel; c += kWidth) {
          int64_t at = p * k + (i + r) * kDeltaPanel + c;
          acc[r] += get(g + at) * get(s + at);
        }
    sum16(acc, out + i);
  }
}

K3_INLINE float dot(const float* a, const float* b, int64_t n) {
  reg s = reg{};
  for (int64_t i = 0; i < n; i += kWidth) s += get(a + i) * get(b + i);
  float total = 0;
  for (int i = 0; i < kWidth; ++i) total += s[i];
  return total;
}
K3_INLINE void add_row(float* to, const float* from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] += from[i];
}

void delta_rule_backward(const DeltaArgs& a) {
  const int64_t H = a.heads, K = a.key_dim, V = a.value_dim, k = delta_k(K), v = delta_v(V), memory = k * v, floats = delta_head_floats(K, V);
  const int64_t pairs = a.sequences * H, tasks = delta_tasks(pairs);
  parallel_for(tasks, [&](int64_t task) {
    TinyIsZero tiny;
    float* at = a.scratch + task * delta_backward_scratch(K, V);
    auto take = [&](int64_t n) {
      float* p = at;
      at += n;
      return p;
    };
    Head heads[kDeltaKept];
    for (Head& h : heads) h = head_at(take(floats), k, v);
    float *G = take(memory), *x = take(32 * k), *y = take(32 * v), *kd = take(16 * k), *all = take(k), *d_all = take(k);
    float *q = take(16 * k), *dx = take(32 * k), *dkd = take(16 * k), *dx_t = take(32 * k), *dkd_t = take(16 * k), *grads = take(48 * k);
    float *y_t = take(32 * v), *u_t = take(16 * v), *e = take(16 * v), *du = take(16 * v), *ts = take(512), *dts = take(512);
    for (int64_t pair = pairs * task / tasks; pair < pairs * (task + 1) / tasks; ++pair) {
      const int64_t s = pair / H, h = pair % H, length = a.first[s + 1] - a.first[s], chunks = (length + kDeltaChunk - 1) / kDeltaChunk;
      auto row_of = [&](int64_t i) { return int64_t(a.rows ? a.rows[a.first[s] + i] : a.first[s] + i) * H + h; };
      auto rows_in = [&](int64_t c) { return c == chunks - 1 ? length - c * kDeltaChunk : kDeltaChunk; };
      bool settled = !a.d_final;  // G is zero
      if (a.d_final) copy(G, a.d_final + pair * memory, memory);

      for (int64_t group = (chunks - 1) / kDeltaKept * kDeltaKept; chunks && group >= 0; group -= kDeltaKept) {
        const int64_t end = group + kDeltaKept < chunks ? group + kDeltaKept : chunks;
        // forward through the group again, for the memories between
        if (group || a.initial)
          copy(heads[0].memory,
               group ? a.kept + (a.kept_first[s] * H + h * delta_kept(length) + group / kDeltaKept - 1) * memory : a.initial + pair * memory, memory);
        for (int64_t c = group; c < end; ++c) {
          const Head& head = heads[c - group];
          for (int64_t t = 0; t < rows_in(c); ++t) {
            const int64_t row = row_of(c * kDeltaChunk + t);
            read_row(head.k + t * k, a.k + row * K, K, k);
            read_decay(head.decay + t * k, a.g + row * a.gate_columns, a.gate_columns, K, k);
            read_row(head.u + t * v, a.errors + row * V, V, v);
            for (int64_t i = 0; i < v; ++i) head.u[t * v + i] *= a.beta[row];
          }
          if (c + 1 == end) break;
          bring_to_end(head.k, head.decay, kDeltaChunk, k, kd, all);
          update_memory(c || a.initial ? head.memory : nullptr, all, heads[c - group + 1].memory, kd, head.u, kDeltaChunk, k, v);
        }

        for (int64_t c = end - 1; c >= group; --c) {
          const Head& head = heads[c - group];
          const int64_t n = rows_in(c), begin = c * kDeltaChunk;
          const bool empty = c == 0 && !a.initial;
          for (int64_t t = 0; t < n; ++t) {
            const int64_t row = row_of(begin + t);
            float *xk = x + 2 * t * k, *xq = xk + k;
            if (c > 0) {
              const int64_t next = row_of(begin + t - kDeltaChunk);
              expect_row(a.q + next * K, K), expect_row(a.dq + next * K, K), expect_row(a.dk + next * K, K);
              expect_row(a.d_out + next * V, V), expect_row(a.dv + next * V, V);
              if (a.gate_columns > 1) expect_row(a.dg + next * K, K);
            }
            if (c >= kDeltaKept) {
              const int64_t next = row_of(begin + t - kDeltaKept * kDeltaChunk);
              expect_row(a.k + next * K, K), expect_row(a.errors + next * V, V);
              if (a.gate_columns > 1) expect_row(a.g + next * K, K);
            }
            read_row(q + t * k, a.q + row * K, K, k);
            for (int64_t i = 0; i < k; ++i) xk[i] = head.k[t * k + i], xq[i] = q[t * k + i];
            pair_row(head.k, head.decay, k, t, xk, xq, ts + t * 32);
            read_row(e + t * v, a.errors + row * V, V, v);
            read_row(y + (2 * t + 1) * v, a.d_out + row * V, V, v);
            for (int64_t i = 0; i < v; ++i) y[(2 * t + 1) * v + i] *= a.scale;
          }
          bring_to_end(head.k, head.decay, n, k, kd, all);

          if (settled)
            for (int64_t i = 0; i < n * v; ++i) du[i] = 0;
          else
            times_memory(n, kd, G, du, k, v);
          for (int64_t t = n - 1; t >= 0; --t) {
            const int64_t row = row_of(begin + t);
            const float beta = a.beta[row];
            float* minus_de = y + 2 * t * v;
            for (int64_t i = 0; i < v; i += 2 * kWidth) {
              reg d[2] = {get(du + t * v + i), get(du + t * v + i + kWidth)};
              for (int64_t r = t; r < n; ++r)
                for (int j = 0; j < 2; ++j) {
                  const float* yr = y + 2 * r * v + i + j * kWidth;
                  d[j] += get(yr + v) * ts[r * 32 + 16 + t];
                  if (r > t) d[j] += get(yr) * ts[r * 32 + t];
                }
              for (int j = 0; j < 2; ++j) put(du + t * v + i + j * kWidth, d[j]), put(minus_de + i + j * kWidth, d[j] * -beta);
            }
            a.dbeta[row] += dot(du + t * v, e + t * v, v);
            for (int64_t i = 0; i < V; ++i) a.dv[row * V + i] -= minus_de[i];
          }

          transpose(head.u, v, n, v, u_t, 16);
          product(2 * n, 16, v, plain_rows(y, v), u_t, 16, dts, 16);
          if (empty) {
            for (int64_t i = 0; i < 2 * n * k; ++i) dx[i] = 0;
          } else {
            transpose(y, v, 2 * n < 16 ? 2 * n : 16, v, y_t, 32);
            transpose(y + 16 * v, v, 2 * n - 16, v, y_t + 16, 32);
            product(k, 32, v, panels(head.memory, k), y_t, 32, dx_t, 32);
            for (int64_t i = 0; i < k; i += 16) transpose(dx_t + i * 32, 32, 16, 32, dx + i, k);
          }
          if (settled) {
            for (int64_t i = 0; i < n * k; ++i) dkd[i] = 0;
          } else {
            product(k, 16, v, panels(G, k), u_t, 16, dkd_t, 16);
            for (int64_t i = 0; i < k; i += 16) transpose(dkd_t + i * 16, 16, 16, 16, dkd + i, k);
          }
          if (settled || empty)
            for (int64_t i = 0; i < k; ++i) d_all[i] = 0;
          else
            row_products(G, head.memory, d_all, k, v);

          float *dq = grads, *dk = grads + 16 * k, *dg = grads + 32 * k;
          for (int64_t i = 0; i < k; i += kWidth)
            pair_backward(q + i, head.k + i, head.decay + i, dx + i, dts, dkd + i, d_all + i, n, k, dq + i, dk + i, dg + i);
          for (int64_t t = 0; t < n; ++t) {
            const int64_t row = row_of(begin + t);
            add_row(a.dq + row * K, dq + t * k, K);
            add_row(a.dk + row * K, dk + t * k, K);
            if (a.gate_columns > 1) add_row(a.dg + row * K, dg + t * k, K);
            if (a.gate_columns == 1)
              for (int64_t i = 0; i < K; ++i) a.dg[row] += dg[t * k + i];
          }

          if (c || a.d_initial) {
            update_memory(settled ? nullptr : G, all, G, x, y, 2 * n, k, v);
            settled = false;
          }
        }
      }
      if (a.d_initial) {
        if (settled)
          for (int64_t i = 0; i < memory; ++i) G[i] = 0;
        copy(a.d_initial + pair * memory, G, memory);
      }
    }
  });
}

}  // namespace k3::cpu::K3_ISA

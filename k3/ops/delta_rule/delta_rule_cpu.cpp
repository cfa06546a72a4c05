// The forward. A pair is a head of a sequence; its tokens go through chunk by chunk, up to the chunk's border or the end of the call:
//
//   row by row     A, M = the token against the rows before it; K+, Q+ = k, q brought to the chunk's start        (pair_row)
//   all rows       P, O = [K+; Q+] S                                     bound by FMA: 32 x K x V a chunk; by reading S when decoding
//   row by row     e_t = v_t - P_t - sum_{s<t} A_ts u_s;   u_t = beta_t e_t;   o_t = scale (O_t + sum_{s<=t} M_ts u_s)
//   once a chunk   S <- Diag(all decays) S + sum_s (k_s brought to the end) u_s^T
#include "k3/core/threads.h"
#include "k3/ops/delta_rule/delta_rule_tiles.h"

namespace k3::cpu::K3_ISA {

// Closes a chunk of n rows: the memory after it, into `to` (which may be the head's own).
static inline void close(const Head& h, bool empty, int64_t n, float* to, float* kd, float* all, int64_t k, int64_t v) {
  bring_to_end(h.k, h.decay, n, k, kd, all);
  update_memory(empty ? nullptr : h.memory, all, to, kd, h.u, n, k, v);
}

// One token's row of the solve and of the output. p: S^T K+ on entry, e on return; o: S^T Q+, then o_t. a: a (16) then m (16).
static inline void write_row(const float* v, float* p, float* o, const float* a, float* u, int64_t t, float beta, float scale, int64_t vp) {
  for (int64_t c = 0; c < vp; c += 2 * kWidth) {
    reg e[2], out[2];
    for (int i = 0; i < 2; ++i) e[i] = get(v + c + i * kWidth) - get(p + c + i * kWidth), out[i] = get(o + c + i * kWidth);
    for (int64_t s = 0; s < t; ++s)
      for (int i = 0; i < 2; ++i) {
        reg us = get(u + s * vp + c + i * kWidth);
        e[i] -= us * a[s], out[i] += us * a[16 + s];
      }
    for (int i = 0; i < 2; ++i) {
      reg ut = e[i] * beta;
      out[i] += ut * a[16 + t];
      put(p + c + i * kWidth, e[i]), put(u + t * vp + c + i * kWidth, ut), put(o + c + i * kWidth, out[i] * scale);
    }
  }
}

static void forward(const DeltaArgs& a) {
  const int64_t H = a.heads, K = a.key_dim, V = a.value_dim, k = delta_k(K), v = delta_v(V), memory = k * v, floats = delta_head_floats(K, V);
  const int64_t pairs = a.sequences * H, tasks = delta_tasks(pairs);
  parallel_for(tasks, [&](int64_t task) {
    TinyIsZero tiny;
    float* own = a.scratch + task * delta_forward_scratch(K, V);
    float *x = own + floats, *po = x + 32 * k, *ts = po + 32 * v, *kd = ts + 512, *all = kd + 16 * k, *value = all + k;
    for (int64_t pair = pairs * task / tasks; pair < pairs * (task + 1) / tasks; ++pair) {
      const int64_t s = pair / H, h = pair % H, length = a.first[s + 1] - a.first[s];
      const Head head = head_at(a.slots ? a.slots[s] + h * floats : own, k, v);
      int64_t n = a.slots ? a.read[s] : 0, open = a.slots ? a.open[s] : 0;
      bool empty = n == open && !a.initial;  // no chunk was closed yet
      if (a.initial) copy(head.memory, a.initial + pair * memory, memory);
      auto token = [&](int64_t i) { return int64_t(a.rows ? a.rows[a.first[s] + i] : a.first[s] + i); };
      for (int64_t i = 0; i < length;) {
        if (open == kDeltaChunk) {
          close(head, empty, open, head.memory, kd, all, k, v);
          empty = false, open = 0;
          if (int64_t chunk = n / kDeltaChunk; a.kept && chunk % kDeltaKept == 0)
            copy(a.kept + (a.kept_first[s] * H + h * delta_kept(length) + chunk / kDeltaKept - 1) * memory, head.memory, memory);
        }
        const int64_t m = kDeltaChunk - open < length - i ? kDeltaChunk - open : length - i;
        for (int64_t j = 0; j < m; ++j) {
          const int64_t t = open + j, row = token(i + j) * H + h;
          float *xk = x + 2 * j * k, *xq = xk + k;
          if (i + j + kDeltaChunk < length) {
            const int64_t next = token(i + j + kDeltaChunk) * H + h;
            expect_row(a.q + next * K, K), expect_row(a.k + next * K, K), expect_row(a.v + next * V, V), expect_row(a.out + next * V, V);
            if (a.gate_columns) expect_row(a.g + next * a.gate_columns, a.gate_columns);
            if (a.errors) expect_row(a.errors + next * V, V);
          }
          read_row(head.k + t * k, a.k + row * K, K, k);
          read_row(xk, a.k + row * K, K, k);
          read_row(xq, a.q + row * K, K, k);
          read_decay(head.decay + t * k, a.g + row * a.gate_columns, a.gate_columns, K, k);
          pair_row(head.k, head.decay, k, t, xk, xq, ts + j * 32);
        }
        if (empty)
          for (int64_t c = 0; c < 2 * m * v; ++c) po[c] = 0;
        else
          times_memory(2 * m, x, head.memory, po, k, v);
        for (int64_t j = 0; j < m; ++j) {
          const int64_t t = open + j, row = token(i + j) * H + h;
          float *p = po + 2 * j * v, *o = p + v;
          read_row(value, a.v + row * V, V, v);
          write_row(value, p, o, ts + j * 32, head.u, t, a.beta[row], a.scale, v);
          for (int64_t c = 0; c < V; ++c) a.out[row * V + c] = o[c];
          if (a.errors)
            for (int64_t c = 0; c < V; ++c) a.errors[row * V + c] = p[c];
        }
        i += m, n += m, open += m;
      }
    }
  });
}

static void memory_now(const float* head, int64_t key_dim, int64_t value_dim, int64_t open, bool closed, float* memory, float* scratch) {
  const int64_t k = delta_k(key_dim), v = delta_v(value_dim);
  TinyIsZero tiny;
  close(head_at(const_cast<float*>(head), k, v), !closed, open, memory, scratch, scratch + 16 * k, k, v);
}

}  // namespace k3::cpu::K3_ISA

K3_KERNELS(DeltaKernels, delta, forward, delta_rule_backward, memory_now)

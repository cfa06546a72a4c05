// Exact identities: no training, each an error against what rounding allows, or a count.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <map>

#include "k3/core/rng.h"
#include "k3/lab/learn.h"
#include "k3/model/choices.h"
#include "k3/model/init.h"
#include "k3/ops/activation/activation_ref.h"
#include "k3/ops/delta_rule/delta_rule.h"
#include "k3/ops/delta_rule/delta_rule_ref.h"
#include "k3/ops/loss/loss.h"

namespace k3::lab {

namespace {

// {"name", "error", "limit", "note"}: holds when error <= limit.
json fact(const std::string& name, double error, double limit, const std::string& note) {
  return json{{"name", name}, {"error", error}, {"limit", limit}, {"note", note}};
}

std::vector<double> normals(int64_t n, uint64_t stream, double scale = 1) {
  std::vector<double> v(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) v[size_t(i)] = scale * Rng{1, stream}.normal(uint64_t(i));
  return v;
}
Var input(Context& c, const std::vector<double>& v, Shape s) {
  Var x(c, DType::f32, s);
  for (int64_t i = 0; i < x.size(); ++i) x.f32()[i] = float(v[size_t(i)]);
  return x;
}
template <class Want>
double relative(const float* got, const Want* want, int64_t n) {
  double difference = 0, size = 0;
  for (int64_t i = 0; i < n; ++i) difference += std::pow(double(got[i]) - double(want[i]), 2), size += std::pow(double(want[i]), 2);
  return std::sqrt(difference / size);
}

// The delta rule under the three gates: the chunked operator against the plain recurrence, and the coarse gates as cases of the fine one.
json delta_rule_facts() {
  const int64_t T = 200, H = 3, K = 32, V = 24;
  const DeltaShape shape{H, K, V, float(1 / std::sqrt(double(K)))};
  std::vector<double> q = normals(T * H * K, 1), k = normals(T * H * K, 2), v = normals(T * H * V, 3), beta = normals(T * H, 4),
                      fine = normals(T * H * K, 5), coarse = normals(T * H, 6);
  for (std::vector<double>* x : {&q, &k})
    for (int64_t r = 0; r < T * H; ++r) {
      double n = 0;
      for (int64_t i = 0; i < K; ++i) n += (*x)[size_t(r * K + i)] * (*x)[size_t(r * K + i)];
      for (int64_t i = 0; i < K; ++i) (*x)[size_t(r * K + i)] /= std::sqrt(n);
    }
  for (double& b : beta) b = 1 / (1 + std::exp(-b));
  for (double& g : fine) g = -0.1 * std::abs(g);
  for (double& g : coarse) g = -0.1 * std::abs(g);
  std::vector<double> spread_out(size_t(T * H * K), 0.0), zeros(size_t(T * H * K), 0.0);
  for (size_t i = 0; i < spread_out.size(); ++i) spread_out[i] = coarse[i / size_t(K)];
  Arena arena(size_t(256) << 20);
  Context c{.arena = &arena};
  auto run = [&](const std::vector<double>& g, int64_t columns) {
    Var gate = columns ? input(c, g, {T, columns}) : Var();
    return delta_rule(input(c, q, {T, H * K}), input(c, k, {T, H * K}), input(c, v, {T, H * V}), gate, input(c, beta, {T, H}), shape, Batch::one(T),
                      nullptr);
  };
  std::vector<double> want(size_t(T * H * V), 0.0);  // in double, one head after the other
  for (int64_t h = 0; h < H; ++h) {
    auto head = [&](const std::vector<double>& x, int64_t w) {
      std::vector<double> out;
      for (int64_t t = 0; t < T; ++t) out.insert(out.end(), x.begin() + (t * H + h) * w, x.begin() + (t * H + h + 1) * w);
      return out;
    };
    std::vector<double> s(size_t(K * V), 0.0), o(size_t(T * V), 0.0);
    ref::delta_rule(ref::DeltaGate::channel, head(q, K).data(), head(k, K).data(), head(v, V).data(), head(fine, K).data(), head(beta, 1).data(),
                    s.data(), o.data(), T, K, V, double(shape.scale));
    for (int64_t t = 0; t < T; ++t) std::copy_n(o.begin() + t * V, V, want.begin() + (t * H + h) * V);
  }
  const double eps = 6e-8 * std::sqrt(double(T + K));  // float32 sums of that many terms
  Var kda = run(fine, H * K), gdn = run(coarse, H), gdn_as_kda = run(spread_out, H * K), deltanet = run({}, 0), deltanet_as_kda = run(zeros, H * K);
  return json::array(
      {fact("chunks of 16 = the recurrence", relative(kda.f32(), want.data(), kda.size()), 10 * eps,
            "KDA, 200 tokens, float32 chunks against the plain loop in double"),
       fact("GDN = KDA with one gate a head", relative(gdn.f32(), gdn_as_kda.f32(), gdn.size()), 10 * eps, "the same gate in all channels of a head"),
       fact("DeltaNet = KDA without forgetting", relative(deltanet.f32(), deltanet_as_kda.f32(), deltanet.size()), 10 * eps, "log decay 0")});
}

// MLA's wide form, which decode uses, against the expanded one.
json absorbed_fact() {
  Config c = base();
  c.mixers = {"mla"}, c.num_hidden_layers = 1;
  c.finish();
  ParamSet params;
  auto mixer = make_mixer(c, {params, "self_attn."}, 0);
  params.allocate(Device::cpu);
  uint64_t stream = 20;
  for (Param& p : params.all()) {
    std::vector<double> v = normals(p.value.size(), stream++, 1 / std::sqrt(double(p.shape[p.shape.rank - 1])));
    for (int64_t i = 0; i < p.value.size(); ++i) p.value.f32()[i] = p.role.kind == Role::Kind::vector ? 1.0f : float(v[size_t(i)]);
  }
  Arena arena(size_t(256) << 20);
  Context exact{.arena = &arena}, fast{.arena = &arena, .deterministic = false};
  const int64_t d = c.hidden_size, n = 130;
  std::vector<double> x = normals(n * d, 19);
  auto a = mixer->new_state(1, Device::cpu, true), b = mixer->new_state(1, Device::cpu, false);
  double worst = 0;
  for (int64_t t = 0; t < n; ++t) {
    Batch batch = Batch::one(1);
    batch.slots = {0};
    std::vector<double> row(x.begin() + t * d, x.begin() + (t + 1) * d);
    Var want = mixer->forward(input(exact, row, {1, d}), batch, a.get()), got = mixer->forward(input(fast, row, {1, d}), batch, b.get());
    worst = std::max(worst, relative(got.f32(), want.f32(), d));
  }
  return json::array({fact("absorbed MLA = expanded", worst, 2e-5, "130 tokens decoded one by one, both forms")});
}

// Queries of attention over depth start at zero: a mean of all sources, which the norm behind it makes the sum.
json attnres_fact() {
  auto logits_with = [](int64_t block) {
    Config c = base();
    c.num_hidden_layers = 6, c.mixers = {"kda", "mla"}, c.attn_res_block_size = block, c.vocab_size = 50;
    c.finish();
    Model model(c);
    model.params().allocate(Device::cpu);
    initialize(model, 1);
    Arena arena(size_t(256) << 20);
    Context x{.arena = &arena};
    Tensor ids = arena.lend(DType::i32, {64});
    for (int i = 0; i < 64; ++i) ids.i32()[i] = i * 7 % 50;
    Tensor l = logits(model.forward(x, ids, Batch::one(64)), model.lm_head());
    return std::vector<float>(l.f32(), l.f32() + l.size());
  };
  std::vector<float> plain = logits_with(0), blocks = logits_with(2);
  return json::array({fact("attention over depth at zero queries = plain residuals", relative(blocks.data(), plain.data(), int64_t(plain.size())),
                           1e-4, "logits, six layers in blocks of two; the mean differs from the sum by the norm's epsilon only")});
}

json situ_fact() {
  auto worst = [](double beta) {
    Activation s, w;
    s.kind = Activation::Kind::situ, s.beta = float(beta), s.linear_beta = float(beta);
    double e = 0;
    for (double g = -3; g <= 3; g += 0.25)
      for (double u = -3; u <= 3; u += 0.25) e = std::max(e, std::abs(ref::glu(g, u, s) - ref::glu(g, u, w)));
    return e;
  };
  const double ratio = worst(64) / worst(128);
  return json::array({fact("SiTU goes to SwiGLU as beta grows, like 1 / beta^2", std::abs(ratio - 4), 0.1,
                           fmt::format("largest difference on [-3, 3]^2: {:.2g} at 64, {:.2g} at 128", worst(64), worst(128)))});
}

// The PaTH identity (training.md 7.2): logits of attention over Q - DeltaNet(Q,W,W) and K - DeltaNet(K,W,W) against q^T H_t ... H_{i+1} k.
double path_error(const std::function<double(int64_t t, double ww)>& eta, bool exclusive) {
  const int64_t T = 96, d = 16;
  auto unit = [&](uint64_t stream) {
    std::vector<double> v = normals(T * d, stream);
    for (int64_t t = 0; t < T; ++t) {
      double n = 0;
      for (int64_t i = 0; i < d; ++i) n += v[size_t(t * d + i)] * v[size_t(t * d + i)];
      for (int64_t i = 0; i < d; ++i) v[size_t(t * d + i)] /= std::sqrt(n);
    }
    return v;
  };
  const std::vector<double> w = unit(31), q = unit(32), k = unit(33);
  auto reflect = [&](int64_t s, double* x) {  // H_s x
    double dot = 0;
    for (int64_t i = 0; i < d; ++i) dot += w[size_t(s * d + i)] * x[i];
    for (int64_t i = 0; i < d; ++i) x[i] -= eta(s, 1) * dot * w[size_t(s * d + i)];
  };
  auto transformed = [&](const std::vector<double>& x) {  // H_1 ... H_t x_t: the last one first
    std::vector<double> out = x;
    for (int64_t t = 0; t < T; ++t)
      for (int64_t s = exclusive ? t - 1 : t; s >= 0; --s) reflect(s, &out[size_t(t * d)]);
    return out;
  };
  const std::vector<double> a = transformed(q), b = transformed(k);
  double worst = 0;
  for (int64_t i = 0; i < T; ++i) {
    std::vector<double> x(k.begin() + i * d, k.begin() + (i + 1) * d);
    for (int64_t t = i; t < T; ++t) {
      if (t > i) reflect(t, x.data());
      double want = 0, got = 0;
      for (int64_t j = 0; j < d; ++j) want += q[size_t(t * d + j)] * x[size_t(j)], got += a[size_t(t * d + j)] * b[size_t(i * d + j)];
      worst = std::max(worst, std::abs(got - want));
    }
  }
  return worst;
}
json path_facts() {
  auto breaks = [](const char* name, double error) {
    return fact(name, error > 1e-3 ? 0 : 1, 0.5, fmt::format("as it should not hold: largest logit error {:.2g}", error));
  };
  return json::array(
      {fact("PaTH = attention after a DeltaNet, for reflections (eta |w|^2 = 2)", path_error([](int64_t, double) { return 2.0; }, false), 1e-12,
            "96 tokens, width 16, double"),
       fact("PaTH, eta 0 and 2 mixed", path_error([](int64_t t, double) { return t % 3 ? 2.0 : 0.0; }, false), 1e-12, "identity or reflection"),
       breaks("PaTH breaks at eta 1.999", path_error([](int64_t, double) { return 1.999; }, false)),
       breaks("PaTH breaks at eta 1", path_error([](int64_t, double) { return 1.0; }, false)),
       breaks("PaTH breaks at eta = 2 sigmoid", path_error(
                                                    [](int64_t t, double) {
                                                      return 2 / (1 + std::exp(-Rng{1, 34}.normal(uint64_t(t))));
                                                    },
                                                    false)),
       breaks("PaTH breaks when the own position is left out", path_error([](int64_t, double) { return 2.0; }, true))});
}

// Balanced assignment of m tokens to n experts, k each, q = m k / n an expert: the optimum by dynamic programming over loads.
struct Assignment {
  int64_t m, n, k;
  std::vector<double> s;
  double optimum() const {
    const int64_t q = m * k / n;
    std::map<std::vector<int8_t>, double> best = {{std::vector<int8_t>(size_t(n), 0), 0.0}};
    for (int64_t i = 0; i < m; ++i) {
      std::map<std::vector<int8_t>, double> next;
      for (const auto& [load, value] : best)
        for (uint32_t set = 0; set < (1u << n); ++set) {
          if (std::popcount(set) != int(k)) continue;
          std::vector<int8_t> l = load;
          double v = value;
          bool fits = true;
          for (int64_t j = 0; j < n; ++j)
            if (set >> j & 1) v += s[size_t(i * n + j)], fits &= ++l[size_t(j)] <= q;
          if (!fits) continue;
          auto [it, fresh] = next.emplace(l, v);
          if (!fresh) it->second = std::max(it->second, v);
        }
      best = std::move(next);
    }
    return best.begin()->second;
  }
  // Algorithm 1 of the report: alternating exact minimisation of the dual; its value after `rounds`.
  double dual(int64_t rounds, bool* never_rose) const {
    const int64_t q = m * k / n;
    std::vector<double> a(static_cast<size_t>(m)), b(static_cast<size_t>(n), 0.0), column;
    double value = 1e300;
    for (int64_t r = 0; r < rounds; ++r) {
      for (int64_t i = 0; i < m; ++i) {
        column.clear();
        for (int64_t j = 0; j < n; ++j) column.push_back(s[size_t(i * n + j)] - b[size_t(j)]);
        std::sort(column.rbegin(), column.rend()), a[size_t(i)] = column[size_t(k)];
      }
      for (int64_t j = 0; j < n; ++j) {
        column.clear();
        for (int64_t i = 0; i < m; ++i) column.push_back(s[size_t(i * n + j)] - a[size_t(i)]);
        std::sort(column.rbegin(), column.rend()), b[size_t(j)] = column[size_t(q)];
      }
      double now = 0;
      for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < n; ++j) now += std::max(0.0, s[size_t(i * n + j)] - a[size_t(i)] - b[size_t(j)]);
      for (double x : a) now += double(k) * x;
      for (double x : b) now += double(q) * x;
      *never_rose &= now <= value + 1e-12;
      value = now;
    }
    return value;
  }
};
json assignment_facts() {
  int reached = 0, near = 0, below = 0;
  bool never_rose = true;
  constexpr int kCases = 200;
  for (int i = 0; i < kCases; ++i) {
    Assignment a{8, 4, 1 + i % 2, {}};
    for (int64_t e = 0; e < a.m * a.n; ++e) a.s.push_back(Rng{uint64_t(i + 1), 40}.uniform(uint64_t(e)));
    const double best = a.optimum(), dual = a.dual(200, &never_rose);
    reached += dual <= best + 1e-9, near += dual <= best * 1.01, below += dual < best - 1e-9;
  }
  return json::array(
      {fact("quantile balancing lowers the dual in every half step", never_rose ? 0 : 1, 0.5,
            "Algorithm 1 on 200 random cases, 8 tokens, 4 experts, 1 or 2 each"),
       fact("the dual never falls below the balanced optimum", below, 0.5, "the optimum by dynamic programming over all loads"),
       fact("Algorithm 1 comes within 1 % of the balanced optimum in most small cases", 1 - double(near) / kCases, 0.5,
            fmt::format("reached exactly in {} of {}, within 1 % in {}; elsewhere it stands still above the optimum: the dual has kinks, "
                        "and descent along coordinates can end at one",
                        reached, kCases, near))});
}

std::vector<Unit> units(const Setting&) {
  auto unit = [](const char* key, json (*f)()) { return Unit{key, 0.5, {{"version", 2}}, [f](const Tick&) { return f(); }}; };
  return {unit("delta-rule", delta_rule_facts),
          unit("absorbed", absorbed_fact),
          unit("attnres", attnres_fact),
          unit("situ", situ_fact),
          unit("path", path_facts),
          unit("assignment", assignment_facts)};
}

Findings conclude(const Setting&, const Results& r) {
  Findings f;
  Table t{"Identities", {"identity", "holds", "error", "limit", "how"}, {}};
  int good = 0, all = 0;
  std::string broken;
  for (const auto& [key, facts] : r)
    for (const json& x : facts) {
      const bool holds = x["error"].get<double>() <= x["limit"].get<double>();
      good += holds, ++all;
      if (!holds) broken += " Not: " + x["name"].get<std::string>() + ".";
      t.rows.push_back({x["name"], holds ? "yes" : "no", fmt::format("{:.2g}", x["error"].get<double>()),
                        fmt::format("{:.2g}", x["limit"].get<double>()), x["note"]});
    }
  f.answer = fmt::format("{} of {} statements hold.{}", good, all, broken);
  f.notes = {"The notes say that PaTH rewrites attention exactly; it does for reflections only, and nothing in K3 computes it."};
  f.tables = {t};
  return f;
}

}  // namespace

const Experiment kIdentity{"identity", "Which forms are exactly the same, and within which limits?", units, conclude};

}  // namespace k3::lab

#include "k3/model/residual.h"

#include "k3/ops/activation/activation.h"
#include "k3/ops/depth_mix/depth_mix.h"

namespace k3 {

namespace {

// x + f(x)
class PlainResidual : public Residual {
 public:
  void begin(Var embedding) override { sum_ = embedding; }
  std::vector<Var> sources(int64_t) const override { return {sum_}; }
  Var read(int64_t, const std::vector<Var>& s) override { return s[0]; }
  Var combine(int64_t, const std::vector<Var>& s, Var output) const override { return add(s[0], output); }
  void advance(int64_t, Var sum) override { sum_ = sum; }

 private:
  Var sum_;
};

// Attention over depth in blocks (K3 report eq. 10, model.md 2.3): the sources are the finished blocks (the first is the embedding) and the
// running sum of the block in progress. A block opens at layers 0, S, 2S, ...: after that layer's mixer has read, before its output is added.
class BlockAttnRes : public Residual {
 public:
  BlockAttnRes(const Config& c, ParamSet& params) : block_(c.attn_res_block_size), eps_(float(c.rms_norm_eps)) {
    auto declare = [&](const Scope& s, const std::string& name) {
      queries_.push_back({&s.gain(name + "_norm", c.hidden_size), &s.vector(name + "_proj.weight", {1, c.hidden_size})});
    };
    for (int64_t l = 0; l < c.num_hidden_layers; ++l) {
      Scope layer{params, "model.layers." + std::to_string(l) + "."};
      declare(layer, "self_attention_res"), declare(layer, "mlp_res");
    }
    declare({params, "model."}, "output_attn_res");
  }
  void begin(Var embedding) override { blocks_.clear(), sum_ = embedding; }
  std::vector<Var> sources(int64_t) const override {
    std::vector<Var> s = blocks_;
    s.push_back(sum_);
    return s;
  }
  Var read(int64_t i, const std::vector<Var>& s) override {
    Query& q = queries_[size_t(i)];
    return depth_mix(s, *q.norm, *q.proj, eps_);
  }
  Var combine(int64_t i, const std::vector<Var>& s, Var output) const override { return opens_block(i) ? output : add(s.back(), output); }
  void advance(int64_t i, Var sum) override {
    if (opens_block(i)) blocks_.push_back(sum_);
    sum_ = sum;
  }

 private:
  struct Query {
    Param *norm, *proj;
  };
  bool opens_block(int64_t i) const { return i % (2 * block_) == 0; }

  int64_t block_;
  float eps_;
  std::vector<Query> queries_;
  std::vector<Var> blocks_;
  Var sum_;
};

}  // namespace

std::unique_ptr<Residual> make_residual(const Config& c, ParamSet& params) {
  if (c.attn_res_block_size == 0) return std::make_unique<PlainResidual>();
  return std::make_unique<BlockAttnRes>(c, params);
}

}  // namespace k3

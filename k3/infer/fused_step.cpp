#include "k3/infer/fused_step.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "k3/core/error.h"
#include "k3/core/gpu.h"
#include "k3/model/choices.h"
#include "k3/model/loading.h"
#include "k3/model/mixers/delta_state.h"
#include "k3/model/mixers/latent_state.h"
#include "k3/ops/embedding/embedding.h"
#include "k3/ops/linear/weight_product.h"
#include "k3/ops/step/experts_cuda.h"
#include "k3/ops/step/kda_cuda.h"
#include "k3/ops/step/latent_cuda.h"
#include "k3/ops/step/product_cuda.h"
#include "k3/ops/step/whole_cuda.h"

namespace k3 {

namespace {

bool is_product(const Param& p) {
  return p.scale.empty() && p.shape[1] % 8 == 0 && (p.value.dtype() == DType::bf16 || p.value.dtype() == DType::f32);
}
bool is_bf16(const Param* p) { return !p || (p->value.dtype() == DType::bf16 && p->scale.empty()); }

std::string layer_prefix(int64_t l) { return "model.layers." + std::to_string(l) + "."; }

}  // namespace

std::string FusedStep::why_not(const Model& model) {
  const Config& c = model.config();
  auto find = [&](const std::string& name) { return const_cast<Model&>(model).params().find(name); };
  if (!gpu::kBuilt || model.params().device() != Device::cuda || !model.bf16_products) return "it is for bfloat16 on a GPU";
  if (c.hidden_size % 8) return "the hidden size is no multiple of 8";
  for (const std::string& m : c.mixer_of_layer)
    if (m != "kda" && m != "mla") return "layers of kind " + m + " have no fused step";
  if (c.short_conv_kernel_size > 8 || !std::set<int64_t>{16, 32, 64, 128}.count(c.kda_head_dim))
    return "KDA heads are not of 16, 32, 64 or 128 channels";
  if (!c.mla_use_nope) return "positions rotate";
  if (c.kv_lora_rank > 512 || c.qk_rope_head_dim > 64 || c.qk_nope_head_dim > 256 || c.kv_lora_rank % 4 || c.qk_rope_head_dim % 4)
    return "the latent is of another size";
  if (c.attn_res_block_size && (c.num_hidden_layers + c.attn_res_block_size - 1) / c.attn_res_block_size + 1 > cuda::kStepSources)
    return "more than 16 sources are mixed over depth";
  if (c.num_experts && c.moe_router_activation_func != "sigmoid") return "the router's scores are no sigmoids";
  if (c.num_experts && (c.num_expert_group > 1 || c.num_experts_per_token > 64 || c.num_experts > 12000 || c.latent_size() > 1024 * 16))
    return "experts come in groups or are too many";
  if (c.num_experts && c.routed_expert_hidden_size == 0 && (c.num_shared_experts == 0 || c.latent_moe_norm == "up" || c.latent_moe_norm == "both"))
    return "experts at full width have a norm or no shared ones";
  for (const Param& p : model.params().all()) {
    const bool expert = is_routed_expert(p.name) || p.name.find(".experts.") != std::string::npos;
    if (p.shape.rank != 2 || p.role.kind == Role::Kind::vector || p.name == "model.embed_tokens.weight") continue;
    if (expert) {
      const bool codes = !p.scale.empty() && p.scale.dtype() == DType::u8;
      if (codes ? p.shape[1] % 32 != 0 : !(is_bf16(&p) && p.shape[1] % 8 == 0)) return p.name + " is neither bfloat16 nor MXFP4 of whole groups";
    } else if (!is_product(p)) {
      return p.name + " is of a width that is no multiple of 8, or quantised";
    }
  }
  for (int64_t l = 0; l < c.num_hidden_layers; ++l)
    for (const char* name : {"f_b_proj", "g_b_proj", "kv_b_proj"})
      if (!is_bf16(find(layer_prefix(l) + "self_attn." + name + ".weight"))) return std::string(name) + " is not bfloat16";
  return "";
}

struct FusedStep::Parts {
  Model& model;
  const Config& config;
  struct Depth {
    const Param *norm = nullptr, *query = nullptr;
  };
  struct Experts {
    Buffer tables[3], scales[3];
    bool codes = false;
  };
  struct Layer {
    Depth attention, mlp;
    const Param *input_norm, *post_norm;
    DeltaLayerState* delta = nullptr;
    LatentState* latent = nullptr;
    Experts experts;
    std::string at;
  };
  std::vector<Layer> layers;
  Depth output;
  // of steps in one kernel
  bool whole = false;
  Buffer counters{2 * sizeof(uint32_t), Device::cuda};
  std::vector<Buffer> stamped;  // where a step's stamped vectors lie, one after the other; nothing else is ever there
  Buffer list;                  // phases of a step that is not captured
  Activation activation;

  const Param* find(const std::string& name) const { return model.params().find(name); }
  const Param& get(const std::string& name) const {
    const Param* p = find(name);
    K3_CHECK(p, "[fused step] the model has no {}", name);
    return *p;
  }

  Parts(Model& m, ModelState& state) : model(m), config(m.config()), activation(activation_of(m.config())) {
    const bool mixes = config.attn_res_block_size > 0;
    auto depth = [&](const std::string& name) { return mixes ? Depth{&get(name + "_norm.weight"), &get(name + "_proj.weight")} : Depth{}; };
    for (int64_t l = 0; l < config.num_hidden_layers; ++l) {
      Layer& layer = layers.emplace_back();
      layer.at = layer_prefix(l);
      layer.attention = depth(layer.at + "self_attention_res"), layer.mlp = depth(layer.at + "mlp_res");
      layer.input_norm = &get(layer.at + "input_layernorm.weight"), layer.post_norm = &get(layer.at + "post_attention_layernorm.weight");
      layer.delta = dynamic_cast<DeltaLayerState*>(state.layer(l)), layer.latent = dynamic_cast<LatentState*>(state.layer(l));
      K3_CHECK(layer.delta || (layer.latent && !layer.latent->cache.keep_expanded()), "[fused step] layer {} has another state than it works on", l);
      if (const ExpertWeights* w = expert_weights(model.ffn(l))) {
        const std::vector<Param*>* lists[] = {&w->gate, &w->up, &w->down};
        layer.experts.codes = !w->gate[0]->scale.empty();
        for (int i = 0; i < 3; ++i) {
          std::vector<const void*> values, scales;
          for (const Param* p : *lists[i]) values.push_back(p->value.data()), scales.push_back(p->scale.data());
          auto send = [&](Buffer& to, const std::vector<const void*>& v) {
            to = Buffer(v.size() * sizeof(void*), Device::cuda);
            gpu::upload(to.data(), v.data(), to.bytes());
          };
          send(layer.experts.tables[i], values);
          if (layer.experts.codes) send(layer.experts.scales[i], scales);
        }
      }
    }
    output = depth("model.output_attn_res");
    const bool has_kda = std::count(config.mixer_of_layer.begin(), config.mixer_of_layer.end(), "kda") > 0;
    const int64_t widest = std::max({2 * config.hidden_size, config.intermediate_size, config.kda_num_heads * config.kda_head_dim,
                                     config.num_attention_heads * config.v_head_dim, config.num_experts_per_token * config.moe_intermediate_size,
                                     config.latent_size() + config.num_shared_experts * config.moe_intermediate_size});
    const int64_t sources = mixes ? (config.num_hidden_layers + config.attn_res_block_size - 1) / config.attn_res_block_size + 1 : 1;
    whole = widest <= 4096 && (!has_kda || config.kda_head_dim <= 64) && config.kv_lora_rank + config.qk_rope_head_dim <= 160 &&
            config.num_experts <= 32 && sources <= 4;
    if constexpr (gpu::kBuilt) whole = whole && cuda::whole_fits();
  }

  // One step. What a launch reads and writes lies in the arena; sums over depth are kept as the model keeps them.
  struct Run {
    Parts& p;
    Context& c;
    const DeviceStep& step;
    int rows;
    std::vector<const float*> blocks;
    const float* sum;
    float* normed;
    cuda::StepList* list;         // to be filled, or null: everything is launched at once
    size_t buffer = 0, used = 0;  // of p.stamped

    float* room(int64_t width) {
      if (!list) return c.arena->lend(DType::f32, {rows, width}).f32();
      const size_t bytes = (size_t(rows * width) * 8 + 255) / 256 * 256;
      if (buffer < p.stamped.size() && used + bytes > p.stamped[buffer].bytes()) ++buffer, used = 0;
      while (buffer < p.stamped.size() && bytes > p.stamped[buffer].bytes()) ++buffer;
      if (buffer == p.stamped.size()) p.stamped.emplace_back(std::max(bytes, size_t(4) << 20), Device::cuda);
      used += bytes;
      return reinterpret_cast<float*>(p.stamped[buffer].data() + used - bytes);
    }
    void run(const cuda::StepProductArgs& a) {
      if constexpr (gpu::kBuilt) gpu::check(list ? list->product(a) : cuda::step_product(a, gpu::stream()));
    }
    void run(const cuda::StepInput& x, float* to) {
      if constexpr (gpu::kBuilt) gpu::check(list ? list->input(x, rows, to, false) : cuda::step_input(x, rows, to, gpu::stream()));
    }
    void run(const cuda::StepKdaArgs& a) {
      if constexpr (gpu::kBuilt) gpu::check(list ? list->kda(a) : cuda::step_kda(a, gpu::stream()));
    }
    void run(const cuda::StepLatentArgs& a) {
      if constexpr (gpu::kBuilt) gpu::check(list ? list->latent(a) : cuda::step_latent(a, gpu::stream()));
    }
    void run(const cuda::StepExpertsArgs& a) {
      if constexpr (gpu::kBuilt) gpu::check(list ? list->experts(a) : cuda::step_experts(a, gpu::stream()));
    }
    cuda::StepInput plain(const float* x, int64_t width) const {
      cuda::StepInput in;
      in.width = int(width), in.stride = width, in.v[0] = x;
      return in;
    }
    cuda::StepInput normal(const float* x, const Param& gain, double eps, int64_t width, int64_t stride) const {
      cuda::StepInput in = plain(x, width);
      in.stride = stride, in.gain = gain.value.f32(), in.eps = float(eps);
      return in;
    }
    cuda::StepInput unit(const float* gate, const float* up, int64_t width) const {
      cuda::StepInput in = plain(gate, width);
      in.v[1] = up, in.gated = true, in.activation = p.activation;
      return in;
    }
    // What a sublayer reads: the sources mixed, normed.
    cuda::StepInput read(const Depth& depth, const Param& gain) const {
      cuda::StepInput in = normal(sum, gain, p.config.rms_norm_eps, p.config.hidden_size, p.config.hidden_size);
      if (!depth.norm || blocks.empty()) return in;
      in.sources = int(blocks.size()) + 1;
      for (size_t i = 0; i < blocks.size(); ++i) in.v[i] = blocks[i];
      in.v[blocks.size()] = sum;
      in.mix_gain = depth.norm->value.f32(), in.query = depth.query->value.f32(), in.mix_eps = float(p.config.rms_norm_eps);
      return in;
    }
    cuda::StepProductArgs product(const cuda::StepInput& x) {
      cuda::StepProductArgs a;
      a.rows = rows, a.x = x, a.normed = normed;
      return a;
    }
    float* part(cuda::StepProductArgs& a, const Param& w, bool exact = false) {
      K3_CHECK(a.parts < cuda::kStepParts, "[fused step] more than {} parts", cuda::kStepParts);
      cuda::StepPart& q = a.part[a.parts++];
      q.w = w.value.data(), q.bf16 = w.value.dtype() == DType::bf16, q.exact = exact, q.out = int(w.shape[0]), q.stride = w.shape[0];
      return q.y = room(w.shape[0]);
    }
    // The sublayer's output joins the residual.
    void join(int64_t sublayer, cuda::StepProductArgs& a, const Param& w, const float* also = nullptr) {
      const bool opens = p.config.attn_res_block_size && sublayer % (2 * p.config.attn_res_block_size) == 0;
      const float* y = part(a, w);
      a.part[0].add = opens ? nullptr : sum, a.part[0].add2 = also;
      run(a);
      if (opens) blocks.push_back(sum);
      sum = y;
    }

    void kda(int64_t l, const Layer& layer) {
      const std::string at = layer.at + "self_attn.";
      auto get = [&](const char* name) -> const Param& { return p.get(at + name); };
      const bool full = p.config.use_full_rank_gate;
      cuda::StepProductArgs a = product(read(layer.attention, *layer.input_norm));
      cuda::StepKdaArgs k{};
      k.step = step, k.rows = rows, k.heads = int(p.config.kda_num_heads), k.dim = int(p.config.kda_head_dim);
      k.width = int(p.config.short_conv_kernel_size), k.history = int(layer.delta->q.history());
      k.q = {part(a, get("q_proj.weight")), get("q_conv1d.weight").value.f32(), layer.delta->q.rows().f32()};
      k.k = {part(a, get("k_proj.weight")), get("k_conv1d.weight").value.f32(), layer.delta->k.rows().f32()};
      k.v = {part(a, get("v_proj.weight")), get("v_conv1d.weight").value.f32(), layer.delta->v.rows().f32()};
      k.beta = part(a, get("b_proj.weight"));
      k.f = part(a, get("f_a_proj.weight")), k.f_b = get("f_b_proj.weight").value.data();
      k.g = part(a, get(full ? "g_proj.weight" : "g_a_proj.weight")), k.g_b = full ? nullptr : get("g_b_proj.weight").value.data();
      run(a);
      k.bounded = p.config.gate_lower_bound.has_value(), k.bound = float(p.config.gate_lower_bound.value_or(0));
      k.A_log = get("A_log").value.f32(), k.dt_bias = get("dt_bias").value.f32(), k.norm = get("o_norm.weight").value.f32();
      k.scale = layer.delta->memory.shape().scale, k.eps = float(p.config.rms_norm_eps);
      k.memory = layer.delta->memory.memory(), k.slot_floats = layer.delta->memory.bytes_per_slot() / 4;
      k.y = room(p.config.kda_num_heads * p.config.kda_head_dim);
      run(k);
      a = product(plain(k.y, p.config.kda_num_heads * p.config.kda_head_dim));
      join(2 * l, a, get("o_proj.weight"));
    }

    void mla(int64_t l, const Layer& layer) {
      const std::string at = layer.at + "self_attn.";
      auto get = [&](const char* name) -> const Param& { return p.get(at + name); };
      const Config& c = p.config;
      cuda::StepProductArgs a = product(read(layer.attention, *layer.input_norm));
      cuda::StepLatentArgs m{};
      const float* q = part(a, get(c.q_lora_rank ? "q_a_proj.weight" : "q_proj.weight"));
      m.kv = part(a, get("kv_a_proj_with_mqa.weight"));
      if (c.mla_use_output_gate) m.gate = part(a, get("g_proj.weight"));
      run(a);
      if (c.q_lora_rank) {
        a = product(normal(q, get("q_a_layernorm.weight"), kLatentNormEps, c.q_lora_rank, c.q_lora_rank));
        q = part(a, get("q_b_proj.weight"));
        run(a);
      }
      m.step = step, m.rows = rows, m.heads = int(c.num_attention_heads), m.nope = int(c.qk_nope_head_dim), m.rope = int(c.qk_rope_head_dim);
      m.value = int(c.v_head_dim), m.rank = int(c.kv_lora_rank), m.eps = kLatentNormEps;
      m.scale = float(1 / std::sqrt(double(c.qk_nope_head_dim + c.qk_rope_head_dim)));
      m.q = q, m.gain = get("kv_a_layernorm.weight").value.f32(), m.kv_b = get("kv_b_proj.weight").value.data();
      m.table = layer.latent->cache.table(), m.table_blocks = TokenCache::kTableBlocks;
      m.q_latent = room(m.heads * (m.rank + m.rope)), m.partial = room(int64_t(m.heads) * cuda::kStepSplits * (m.rank + 2));
      m.y = room(m.heads * m.value);
      run(m);
      a = product(plain(m.y, m.heads * m.value));
      join(2 * l, a, get("o_proj.weight"));
    }

    void moe(int64_t l, const Layer& layer) {
      const std::string at = layer.at + "block_sparse_moe.";
      auto get = [&](const char* name) -> const Param& { return p.get(at + name); };
      const Config& c = p.config;
      const bool latent = c.routed_expert_hidden_size > 0;
      cuda::StepInput x = read(layer.mlp, *layer.post_norm);
      float* whole = nullptr;  // the experts read it too when they have no latent space
      if (!latent) {
        whole = room(c.hidden_size);
        run(x, whole);
        x = plain(whole, c.hidden_size);
      }
      cuda::StepProductArgs a = product(x);
      cuda::StepExpertsArgs e{};
      e.logits = part(a, get("gate.weight"), true);
      const float* z = latent ? part(a, get("routed_expert_down_proj.weight")) : whole;
      const bool shares = c.num_shared_experts > 0;
      const float* gate = shares ? part(a, get("shared_experts.gate_proj.weight")) : nullptr;
      const float* up = shares ? part(a, get("shared_experts.up_proj.weight")) : nullptr;
      run(a);
      e.step = step, e.rows = rows, e.experts = int(c.num_experts), e.top_k = int(c.num_experts_per_token), e.latent = int(c.latent_size());
      e.inner = int(c.moe_intermediate_size);
      e.renormalize = c.moe_renormalize && e.top_k > 1, e.scale = float(c.routed_scaling_factor);
      e.bias = get("gate.e_score_correction_bias").value.f32();
      e.z = plain(z, e.latent);
      if (const Param* g = p.find(at + "routed_expert_down_norm.weight")) e.z.gain = g->value.f32(), e.z.eps = float(c.rms_norm_eps);
      e.activation = p.activation;
      auto matrix = [&](int i) {
        return cuda::StepExpertMatrix{reinterpret_cast<const void* const*>(layer.experts.tables[i].data()),
                                      reinterpret_cast<const uint8_t* const*>(layer.experts.scales[i].data())};
      };
      e.w1 = matrix(0), e.w3 = matrix(1), e.w2 = matrix(2);
      e.chosen = room(e.top_k), e.h = room(int64_t(e.top_k) * e.inner), e.u = room(e.latent);
      run(e);
      const Param* up_norm = p.find(at + "routed_expert_norm.weight");
      cuda::StepInput u = up_norm ? normal(e.u, *up_norm, c.rms_norm_eps, e.latent, e.latent) : plain(e.u, e.latent);
      const cuda::StepInput shared = shares ? unit(gate, up, get("shared_experts.down_proj.weight").shape[1]) : cuda::StepInput{};
      if (latent) {
        a = product(u);
        if (shares) a.x2 = shared, a.w2 = get("shared_experts.down_proj.weight").value.data();
        join(2 * l + 1, a, get("routed_expert_up_proj.weight"));
        return;
      }
      K3_CHECK(shares && !up_norm, "[fused step] experts at full width come with shared ones and no norm");
      a = product(shared);
      join(2 * l + 1, a, get("shared_experts.down_proj.weight"), e.u);
    }

    void dense(int64_t l, const Layer& layer) {
      auto get = [&](const char* name) -> const Param& { return p.get(layer.at + "mlp." + name); };
      cuda::StepProductArgs a = product(read(layer.mlp, *layer.post_norm));
      const float *gate = part(a, get("gate_proj.weight")), *up = part(a, get("up_proj.weight"));
      run(a);
      a = product(unit(gate, up, get("down_proj.weight").shape[1]));
      join(2 * l + 1, a, get("down_proj.weight"));
    }
  };
};

FusedStep::FusedStep(Model& model, ModelState& state) {
  const std::string why = why_not(model);
  K3_CHECK(why.empty(), "[fused step] {}", why);
  parts_ = std::make_unique<Parts>(model, state);
}
FusedStep::~FusedStep() = default;

Tensor FusedStep::logits(Context& c, const Tensor& ids, const DeviceStep& step) {
  Parts& p = *parts_;
  const int rows = int(ids.size());
  Param& table = *p.model.params().find("model.embed_tokens.weight");
  cuda::StepList list;
  const bool whole = p.whole && rows <= cuda::kStampedRows;
  Parts::Run r{p, c, step, rows, {}, nullptr, nullptr, whole ? &list : nullptr};
  if (whole) {
    float* x = r.room(p.config.hidden_size);
    if constexpr (gpu::kBuilt)
      gpu::check(list.begin({rows, int(p.config.hidden_size), ids.i32(), table.value.data(), table.value.dtype() == DType::bf16, x}));
    r.sum = x;
  } else {
    r.sum = embedding(c, ids, table).f32();
    r.normed = r.room(std::max(p.config.hidden_size, std::max(p.config.intermediate_size, p.config.latent_size())));
  }
  for (int64_t l = 0; l < p.config.num_hidden_layers; ++l) {
    const Parts::Layer& layer = p.layers[size_t(l)];
    layer.delta ? r.kda(l, layer) : r.mla(l, layer);
    p.config.is_moe(l) ? r.moe(l, layer) : r.dense(l, layer);
  }
  cuda::StepInput last = r.read(p.output, *p.find("model.norm.weight"));
  if (whole) {
    float* x = c.arena->lend(DType::f32, {rows, p.config.hidden_size}).f32();
    if constexpr (gpu::kBuilt) {
      gpu::check(list.input(last, rows, x, true));
      const size_t bytes = list.phases().size() * sizeof(cuda::StepPhase);
      const void* phases = p.list.data();
      if (gpu::capturing()) {
        phases = gpu::kept(list.phases().data(), bytes);
      } else {
        if (p.list.bytes() < bytes) p.list = Buffer(bytes, Device::cuda);
        phases = p.list.data();
        gpu::upload(p.list.data(), list.phases().data(), bytes);
      }
      gpu::check(cuda::step_whole(list, phases, reinterpret_cast<uint32_t*>(p.counters.data()), gpu::stream()));
    }
    last = r.plain(x, p.config.hidden_size);
    r.list = nullptr;
  }
  cuda::StepProductArgs a = r.product(last);
  Tensor y = c.arena->lend(DType::f32, {rows, p.config.vocab_size});
  const Param& head = p.model.lm_head();
  a.parts = 1;
  a.part[0].w = head.value.data(), a.part[0].bf16 = head.value.dtype() == DType::bf16, a.part[0].out = int(head.shape[0]);
  a.part[0].y = y.f32(), a.part[0].stride = head.shape[0];
  r.run(a);
  return y;
}

}  // namespace k3

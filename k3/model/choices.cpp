#include "k3/model/choices.h"

#include "k3/core/error.h"
#include "k3/core/nearest.h"

namespace k3 {

namespace {

struct MixerChoice {
  const char* name;
  std::unique_ptr<Mixer> (*make)(const Config&, const Scope&, int64_t layer);
};
constexpr MixerChoice kMixers[] = {
    {"kda", make_kda}, {"gdn", make_gdn}, {"deltanet", make_deltanet},  //
    {"mla", make_mla}, {"gqa", make_gqa}, {"mqa", make_mqa},            //
    {"mfa", make_mfa},
};

}  // namespace

std::vector<std::string> mixer_names() {
  std::vector<std::string> names;
  for (const auto& m : kMixers) names.push_back(m.name);
  return names;
}

std::unique_ptr<Mixer> make_mixer(const Config& c, const Scope& scope, int64_t layer) {
  const std::string& name = c.mixer_of_layer[size_t(layer)];
  for (const auto& m : kMixers)
    if (name == m.name) return m.make(c, scope, layer);
  fail("[config] layer {} has mixer '{}', which is unknown; the nearest known one is '{}'", layer, name, nearest(name, mixer_names()));
}

std::unique_ptr<Ffn> make_ffn(const Config& c, const Scope& layer_scope, int64_t layer) {
  if (c.is_moe(layer)) return make_latent_moe(c, layer_scope.in("block_sparse_moe"), layer);
  return make_glu(c, layer_scope.in("mlp"), c.intermediate_size);
}

Activation activation_of(const Config& c) {
  Activation a;
  a.kind = c.hidden_act == "situ" ? Activation::Kind::situ : c.hidden_act == "clipped" ? Activation::Kind::clipped : Activation::Kind::swiglu;
  a.beta = float(c.activation_situ_beta), a.linear_beta = float(c.activation_situ_linear_beta), a.limit = float(c.activation_limit);
  return a;
}

}  // namespace k3

#pragma once
// The choices a config can name, and who makes them. choices.cpp is the only place that compares names.
#include <memory>
#include <string>
#include <vector>

#include "k3/model/ffn.h"
#include "k3/model/mixer.h"
#include "k3/ops/activation/activation_kernels.h"

namespace k3 {

std::unique_ptr<Mixer> make_mixer(const Config& config, const Scope& scope, int64_t layer);
std::unique_ptr<Ffn> make_ffn(const Config& config, const Scope& layer_scope, int64_t layer);
Activation activation_of(const Config& config);
std::vector<std::string> mixer_names();

// One a file in mixers/ and ffns/.
std::unique_ptr<Mixer> make_kda(const Config& c, const Scope& s, int64_t layer);
std::unique_ptr<Mixer> make_gdn(const Config& c, const Scope& s, int64_t layer);
std::unique_ptr<Mixer> make_deltanet(const Config& c, const Scope& s, int64_t layer);
std::unique_ptr<Mixer> make_mla(const Config& c, const Scope& s, int64_t layer);
std::unique_ptr<Mixer> make_gqa(const Config& c, const Scope& s, int64_t layer);
std::unique_ptr<Mixer> make_mqa(const Config& c, const Scope& s, int64_t layer);
std::unique_ptr<Mixer> make_mfa(const Config& c, const Scope& s, int64_t layer);
std::unique_ptr<Ffn> make_glu(const Config& c, const Scope& s, int64_t width);
std::unique_ptr<Ffn> make_latent_moe(const Config& c, const Scope& s, int64_t layer);

}  // namespace k3

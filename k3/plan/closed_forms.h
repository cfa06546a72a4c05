#pragma once
// What a model costs, from its config alone. These formulas are the independent check of the counts taken from the running code (counts.h);
// neither copies from the other.
//
// A multiply-add is 2 FLOPs. "FLOPs" are matrix products and the cores of attention and KDA. "active" counts every parameter that a token
// multiplies, the vocabulary projection included, the embedding table (a lookup) excluded.
//
//   MLA core   expanded 2 H (d_n + d_r + d_v) FLOPs a query-key pair; a causal prompt of T has T^2/2 pairs; absorbed 2 H (2 r_kv + d_r) a cached
//   token KDA core   chunks of C: H (6 d_k^2 + 3 C d_k + C^2) a token; one token at a time: 7 H d_k d_v
#include <cstdint>
#include <string>

#include "k3/plan/architecture.h"

namespace k3::plan {

inline constexpr int64_t kPlannedChunk = 64;  // C of the KDA core in printed FLOPs

// One layer of a mixer.
struct MixerForm {
  int64_t matrices = 0;    // weights in matrix products
  int64_t replicated = 0;  // of these, kept whole on every rank under tensor parallelism
  int64_t small = 0;       // convolutions, gains, biases
  int64_t cached = 0;      // numbers a token leaves for later ones
  int64_t state = 0;       // numbers of the recurrent state of a sequence
  int64_t window = 0;      // numbers of the convolutions' windows
  int64_t heads = 0;
  double pair_prefill = 0, pair_decode = 0;    // FLOPs of a query-key pair, all heads
  double token_prefill = 0, token_decode = 0;  // FLOPs a token whatever the context
};
MixerForm mixer_form(const Config& config, const std::string& mixer, int64_t chunk = kPlannedChunk);

struct Parameters {
  int64_t total = 0, active = 0, embedding = 0, head = 0;
  int64_t routed = 0, expert = 0;                              // all experts of all layers; one expert
  int64_t shared = 0, latent_pair = 0, router = 0, dense = 0;  // one layer
  int64_t small = 0;                                           // everything that is in no matrix
  int64_t active_matrices = 0;
  int64_t replicated = 0;       // matrices kept whole under TP, whole model
  int64_t trunk_matrices = 0;   // all but the experts and the embedding
  double checkpoint_bytes = 0;  // experts and trunk in their formats, everything small in 2 bytes
};
Parameters parameters(const Architecture& a);

// U(t): experts of one layer that t tokens touch, each choosing K of N by itself. rho < 1: tokens that choose alike, as in real text.
double experts_touched(double experts, double chosen, double tokens, double rho = 1);

struct Flops {
  double linear = 0, attention = 0, recurrent = 0;
  double total() const { return linear + attention + recurrent; }
};
Flops decode_flops(const Architecture& a, double context, double tokens = 1);  // of `tokens` tokens of one sequence at `context`
Flops prefill_flops(const Architecture& a, double tokens, double cached = 0);  // one prompt; logits for its last token
Flops training_flops(const Architecture& a, double context);                   // a token, forward and backward
double linear_flops(const Architecture& a);                                    // a token

double cache_bytes_per_token(const Architecture& a, double bytes = 2);
double state_bytes(const Architecture& a, double bytes = 4);  // a sequence; windows in 2 bytes

// Context at which two models cost the same, by bisection on [1, 1e8]; NaN when they never do.
double decode_crossover(const Architecture& a, const Architecture& b);
double prefill_crossover(const Architecture& a, const Architecture& b);
// Prompt length below which an MLA layer does fewer FLOPs than a KDA layer, projections included.
double mixer_crossover(const Config& config);

// Newton-Schulz, 5 iterations on an n x k matrix: 5 (4 n^2 k + 2 n^3), n <= k.
double newton_schulz_flops(double n, double k);
double muon_expert_flops(const Architecture& a);

// Vectors of width d that attention over depth reads for one token, whole network.
int64_t depth_sources(const Config& config);
int64_t activated_elements(const Architecture& a);  // gated activations of a token

}  // namespace k3::plan

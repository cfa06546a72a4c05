#include "k3/infer/decoder.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "k3/core/error.h"
#include "k3/core/memory.h"
#include "k3/ops/delta_rule/delta_rule_kernels.h"
#include "k3/ops/loss/loss.h"

namespace k3 {

Decoder::Decoder(Model& model, ModelState& state, const DecoderOptions& options)
    : model_(model), state_(state), options_(options), arena_(address_space(), model.params().device()) {
  const std::string why = why_not(model, options);
  K3_CHECK(why.empty(), "[decoder] {}", why);
  if (!options.deterministic) fused_ = std::make_unique<FusedStep>(model, state);
}

Decoder::~Decoder() {
  for (auto& [rows, size] : sizes_) gpu::release_shared(reinterpret_cast<char*>(size.results));
}

std::string Decoder::why_not(const Model& model, const DecoderOptions& options) {
  const Config& c = model.config();
  if (!gpu::kBuilt || model.params().device() != Device::cuda) return "the model is not on a GPU";
  if (options.deterministic && model.bf16_products) return "products in bfloat16 give other bits in other numbers of rows";
  if (!options.deterministic) {
    if (const std::string why = FusedStep::why_not(model); !why.empty()) return why;
  }
  const bool has_mla = std::find(c.mixer_of_layer.begin(), c.mixer_of_layer.end(), "mla") != c.mixer_of_layer.end();
  if (has_mla && !c.mla_use_nope) return "positions that rotate are made by the host in each step";
  if (c.vocab_size > cuda::kSampleVocabulary) return fmt::format("the vocabulary is beyond {} tokens", cuda::kSampleVocabulary);
  return "";
}

int64_t Decoder::rows_of(int64_t rows) {
  for (int64_t n : {1, 2, 4})
    if (rows <= n) return n;
  return (rows + 7) / 8 * 8;
}

namespace {

// Where the lists of `rows` rows lie in their buffer.
struct Layout {
  int64_t rows;
  size_t at(int i) const { return size_t(i * rows) * 4; }  // ids, slots, tokens, open, steps: 4 bytes a row each
  size_t padding() const { return at(5); }
  size_t options() const { return (padding() + size_t(rows) + 7) / 8 * 8; }
  size_t bytes() const { return options() + size_t(rows) * sizeof(cuda::SampleRow); }
};

}  // namespace

Decoder::Size& Decoder::size_of(int64_t rows) {
  Size& s = sizes_[rows];
  if (s.rows) return s;
  const Layout l{rows};
  s.control = Buffer(l.bytes(), arena_.device());
  s.results = reinterpret_cast<cuda::SampleResult*>(gpu::allocate_shared(size_t(kResults * rows) * sizeof(cuda::SampleResult)));
  auto list = [&](int i) { return reinterpret_cast<int32_t*>(s.control.data() + l.at(i)); };
  s.step = {list(0), list(1), list(2), list(3), reinterpret_cast<uint8_t*>(s.control.data() + l.padding())};
  s.rows = rows;
  return s;
}

void Decoder::begin(std::span<const DecodeRow> rows) {
  K3_CHECK(!rows.empty(), "[decoder] no rows to decode");
  std::vector<uint8_t> taken(size_t(state_.slots()));
  gpu::synchronize();  // results of a run before may still be on their way
  Size& s = size_of(rows_of(int64_t(rows.size())));
  std::memset(s.results, 0, size_t(kResults * s.rows) * sizeof(cuda::SampleResult));
  const Layout l{s.rows};
  std::vector<char> image(l.bytes());
  auto list = [&](int i) { return reinterpret_cast<int32_t*>(image.data() + l.at(i)); };
  auto* options = reinterpret_cast<cuda::SampleRow*>(image.data() + l.options());
  for (int64_t r = 0; r < s.rows; ++r) {
    const bool filler = r >= int64_t(rows.size()) || rows[size_t(r)].slot < 0;
    list(0)[r] = list(1)[r] = -1, image[l.padding() + size_t(r)] = 1;
    if (filler) continue;
    const DecodeRow& row = rows[size_t(r)];
    check(row.sample);
    K3_CHECK(row.slot < state_.slots(), "[decoder] slot {} of {}", row.slot, state_.slots());
    K3_CHECK(!taken[size_t(row.slot)]++, "[decoder] two rows have slot {}", row.slot);
    K3_CHECK(row.id < model_.config().vocab_size, "[decoder] token {} of a vocabulary of {}", row.id, model_.config().vocab_size);
    const int64_t tokens = state_.tokens(row.slot);
    int64_t open = -1;
    for (int64_t i = 0; i < model_.config().num_hidden_layers; ++i) {
      const State& layer = *state_.layer(i);
      if (open < 0) open = layer.open(row.slot);
      K3_CHECK(layer.tokens(row.slot) == tokens && (layer.open(row.slot) < 0 || layer.open(row.slot) == open),
               "[decoder] layer {} of slot {} has read {} tokens ({} of them open), an earlier one {} ({})", i, row.slot, layer.tokens(row.slot),
               layer.open(row.slot), tokens, open);
    }
    list(0)[r] = row.id, list(1)[r] = row.slot, list(2)[r] = int32_t(tokens), list(3)[r] = int32_t(std::max<int64_t>(0, open));
    image[l.padding() + size_t(r)] = 0;
    options[r] = {row.sample.temperature, row.sample.top_p, row.sample.min_p, row.sample.top_k, row.sample.seed};
  }
  gpu::upload(s.control.data(), image.data(), image.size());
  rows_.assign(rows.begin(), rows.end());
  now_ = &s, drawn_ = 0;
}

void Decoder::sample(const Tensor& logits, bool has_read) {
  if constexpr (gpu::kBuilt) {
    const Layout l{now_->rows};
    auto list = [&](int i) { return reinterpret_cast<int32_t*>(now_->control.data() + l.at(i)); };
    cuda::SampleStepArgs a{};
    a.logits = logits.f32(), a.rows = now_->rows, a.vocabulary = model_.config().vocab_size;
    a.options = reinterpret_cast<const cuda::SampleRow*>(now_->control.data() + l.options());
    a.ids = list(0), a.slots = list(1), a.tokens = list(2), a.open = list(3), a.steps = reinterpret_cast<uint32_t*>(list(4));
    a.has_read = has_read, a.chunk = int32_t(cpu::kDeltaChunk), a.results = now_->results, a.ring = uint32_t(kResults);
    gpu::check(cuda::sample_step(a, gpu::stream()));
  }
}

void Decoder::draw(const Tensor& logits) {
  K3_CHECK(now_ && logits.device() == Device::cuda && logits.rows() == int64_t(rows_.size()) && logits.cols() == model_.config().vocab_size,
           "[decoder] logits are {} but begin() named {} rows of {} tokens", to_string(logits.shape()), rows_.size(), model_.config().vocab_size);
  sample(logits, false);
  ++drawn_;
}

void Decoder::forward() {
  Context c;
  c.device = arena_.device(), c.arena = &arena_, c.deterministic = options_.deterministic;
  arena_.rewind(0);
  Batch batch = Batch::of_lengths(std::vector<int64_t>(size_t(now_->rows), 1));
  batch.step = &now_->step;
  const Tensor ids(const_cast<int32_t*>(now_->step.ids), DType::i32, {now_->rows}, Device::cuda);
  now_->logits = fused_ ? fused_->logits(c, ids, now_->step) : k3::logits(model_.forward(c, ids, batch, &state_), model_.lm_head());
  sample(now_->logits, true);
}

void Decoder::step() {
  K3_CHECK(now_, "[decoder] begin() comes before step()");
  for (const DecodeRow& row : rows_)
    for (int64_t i = 0; row.slot >= 0 && i < model_.config().num_hidden_layers; ++i) state_.layer(i)->count(row.slot);
  if (!options_.captured || !now_->has_run) {  // the first makes room for everything
    forward();
    now_->has_run = true;
  } else {
    if (!now_->graph) now_->graph = gpu::Graph([this] { forward(); });
    now_->graph.launch();
  }
  ++drawn_;
}

int32_t Decoder::result(int64_t n, int64_t row) const {
  K3_CHECK(n < drawn_ && n >= drawn_ - kResults, "[decoder] draw {} of {}; the last {} are kept", n, drawn_, kResults);
  K3_CHECK(row < int64_t(rows_.size()) && rows_[size_t(row)].slot >= 0, "[decoder] row {} of {} draws nothing", row, rows_.size());
  cuda::SampleResult& at = now_->results[n % kResults * now_->rows + row];
  std::atomic_ref<uint32_t> stamp(at.stamp);
  for (int64_t looked = 0; stamp.load(std::memory_order_acquire) != uint32_t(n + 1); ++looked)
    if (looked % 4096 == 4095) {
      K3_CHECK(!gpu::idle() || stamp.load(std::memory_order_acquire) == uint32_t(n + 1), "[decoder] the GPU has finished but gave no draw {}", n);
      std::this_thread::yield();
    }
  K3_CHECK(at.id >= 0 || at.where < 0, "[sample] the logit of token {} is {}: the model's numbers broke down", at.where, at.value);
  K3_CHECK(at.id >= 0, "[sample] all {} tokens are masked: no token is allowed here", model_.config().vocab_size);
  return at.id;
}

int64_t Decoder::kernels() const { return now_ && now_->graph ? now_->graph.kernels() : 0; }

}  // namespace k3

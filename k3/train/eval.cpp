#include "k3/train/eval.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "k3/core/error.h"
#include "k3/core/gpu.h"
#include "k3/ops/loss/loss.h"
#include "k3/train/step_memory.h"

namespace k3 {

Evaluation evaluate(Model& model, const TokenFile& file, const std::vector<int64_t>& documents, const Tokenizer& tokenizer,
                    const EvalOptions& options, const std::function<void(int64_t, int64_t)>& progress) {
  K3_CHECK(options.sequence_length > 0, "[eval] sequence length is {} but must be at least 1", options.sequence_length);
  K3_CHECK(tokenizer.vocabulary() <= model.config().vocab_size, "[eval] the tokenizer has {} ids but vocab_size is {}", tokenizer.vocabulary(),
           model.config().vocab_size);
  std::vector<TokenBatch::Piece> pieces;
  int64_t total = 0;
  for (int64_t d : documents) {
    if (options.most_tokens && total >= options.most_tokens) break;
    for (int64_t at = 0; at < file.length(d) && !(options.most_tokens && total >= options.most_tokens); at += options.sequence_length) {
      pieces.push_back({d, at, std::min(options.sequence_length, file.length(d) - at)});
      total += pieces.back().length;
    }
  }
  const int64_t at_once = std::max(options.tokens_at_once, options.sequence_length);
  Model shape(model.config());  // on the null device: says how much memory a batch takes
  auto real = model.params().all().begin();
  for (Param& p : shape.params().all()) {  // types count: what is narrow is widened in scratch
    p.value = Tensor(nullptr, real->value.dtype(), real->value.shape(), Device::null);
    if (!real->scale.empty()) p.scale = Tensor(nullptr, real->scale.dtype(), real->scale.shape(), Device::null);
    ++real;
  }
  std::unique_ptr<Arena> arena;
  auto run = [](Model& m, Context& c, const TokenBatch& b) {
    Tensor ids = lend_ids(c, b.ids, b.batch.tokens()), targets = lend_ids(c, b.targets, b.batch.tokens());
    return cross_entropy(m.forward(c, ids, b.batch), m.lm_head(), targets, 0).per_token;
  };
  Evaluation e;
  double sum = 0;
  int64_t done = 0;
  for (size_t i = 0; i < pieces.size();) {
    TokenBatch b;
    while (i < pieces.size() && b.batch.tokens() + pieces[i].length <= at_once) b.add(file, pieces[i++]);
    Arena counting(0, Device::null);
    Context null{.device = Device::null, .arena = &counting};
    run(shape, null, b);
    make_room(arena, counting.peak(), model.params().device());
    arena->rewind(0);
    Context c{.device = arena->device(), .arena = arena.get()};
    const HostCopy per_token(run(model, c, b));
    for (size_t t = 0; t < b.targets.size(); ++t) {  // one running sum in order, so the cut into batches leaves no trace
      if (b.targets[t] < 0) continue;
      sum += double(per_token.f32()[t]);
      e.bytes += int64_t(tokenizer.token_bytes(b.targets[t]).size());
    }
    e.tokens += b.counted;
    done += b.batch.tokens();
    if (progress) progress(done, total);
  }
  e.loss = e.tokens ? sum / double(e.tokens) : 0;
  e.bits_per_byte = e.bytes ? sum / std::log(2.0) / double(e.bytes) : 0;
  return e;
}

}  // namespace k3

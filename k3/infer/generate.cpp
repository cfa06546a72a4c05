#include "k3/infer/generate.h"

#include <algorithm>
#include <chrono>

#include "k3/core/error.h"
#include "k3/tokenizer/stream.h"

namespace k3 {

Generated generate(Session& session, const Tokenizer& tokenizer, std::span<const int32_t> prompt, const GenerateOptions& o,
                   const std::function<bool(const std::string&)>& on_text, const std::function<void(int64_t)>& prefill) {
  using Clock = std::chrono::steady_clock;
  auto seconds_since = [](Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); };
  K3_CHECK(!prompt.empty() || session.tokens() > 0, "[generate] the prompt is empty; give at least one token");
  Generated out;
  out.prompt_tokens = int64_t(prompt.size());
  auto start = Clock::now();
  session.read(prompt, prefill);
  out.prefill_seconds = seconds_since(start);

  Utf8Stream characters;
  StopStrings stops(o.stop);
  bool wanted = true;
  auto emit = [&](const std::string& text) {
    if (text.empty()) return;
    out.text += text;
    if (on_text && !on_text(text)) wanted = false;
  };
  out.finish = "length";
  start = Clock::now();
  for (int64_t i = 0; i < o.max_tokens; ++i) {
    int32_t id = session.next(o.sample);
    if (std::find(o.stop_ids.begin(), o.stop_ids.end(), id) != o.stop_ids.end()) {
      out.finish = "stop", out.end = id;
      break;
    }
    out.ids.push_back(id);
    if (o.on_id && !o.on_id(id)) wanted = false;
    emit(stops.add(characters.add(tokenizer.decode({&id, 1}, o.show_specials))));
    if (stops.stopped() || !wanted) {
      out.finish = "stop";
      break;
    }
  }
  if (!stops.stopped() && wanted) {
    emit(stops.add(characters.finish()));
    if (stops.stopped())
      out.finish = "stop";
    else
      emit(stops.finish());
  }
  out.decode_seconds = seconds_since(start);
  return out;
}

}  // namespace k3

#pragma once
#include <string>

namespace k3 {

// Draws the curves of metrics.jsonl into one page that needs nothing else: loss and bits per byte (trained and held out), expert load, the
// gates of each layer, learning rate and gradient norm. The page appears whole or stays as it was.
void write_report(const std::string& metrics_path, const std::string& page_path, const std::string& title);

}  // namespace k3

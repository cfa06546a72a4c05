#pragma once
// Learn a byte-level BPE table from text, cut into the same pieces as when encoding: pairs never cross a piece.
//
//   Tokenizer t = learn(8192, [&](auto add) { for (auto& document : documents) add(document); });
//
// Ranks 0..255 are the single bytes; each further rank is the pair of neighbours most frequent when the ranks before it are applied; of
// equally frequent ones, the pair whose bytes come first. The result depends on the pieces and their counts alone: not on the order of
// documents, nor on the machine.
#include <functional>

#include "k3/tokenizer/tokenizer.h"

namespace k3 {

using AddText = std::function<void(std::string_view)>;

// `ranks` tokens (>= 256); fewer when no pair occurs twice.
Tokenizer learn(int32_t ranks, const std::function<void(const AddText& add)>& documents);
Tokenizer learn_files(int32_t ranks, const std::vector<std::string>& paths);

}  // namespace k3

#pragma once
// Learn a byte-level BPE table from text, cut into the same pieces as when encoding: pairs never cross a piece.
//
//   Tokenizer t = learn(8192, [&](auto add) { for (auto& document : documents) add(document); });
//
// Ranks 0..255 are the single bytes; rank r is the pair most frequent after r merges. Ties go to the pair whose bytes come first
// (left part, then right part). The result depends on the text alone: not on the order of documents, nor on the machine.
#include <functional>

#include "k3/tokenizer/tokenizer.h"

namespace k3 {

using AddText = std::function<void(std::string_view)>;

// `ranks` tokens (>= 256); fewer when no pair occurs twice.
Tokenizer learn(int32_t ranks, const std::function<void(const AddText& add)>& documents);
Tokenizer learn_files(int32_t ranks, const std::vector<std::string>& paths);

}  // namespace k3

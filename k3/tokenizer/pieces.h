#pragma once
// Pieces: the cut of a text before byte pair encoding, exactly as the published pattern makes it (model.md 7.2, steps 1 and 2).
//
//   for (Pieces p(text); p.next();) use(p.piece());     // joined, the pieces are the text
//
// The pattern takes at each position the first alternative that matches, with backtracking. Here it is a scanner that reads each character
// at most three times:
//   1  Han+                                       one or more characters of script Han
//   2  X? U* W+ C?                                a word that ends in small letters; X: no CR, LF, letter, number
//   3  X? U+ W* C?                                a word that ends in capitals; C: 's 't 're 've 'm 'll 'd in any case
//   4  N{1,3}
//   5  space? symbol+ (CR|LF)*
//   6  white* (CR|LF)+          7  white+ not before a non-white character          8  white+
// Bytes that are no UTF-8 match nothing: a run of them is a piece by itself.
// Guards as published: the pattern sees at most 400,000 characters at a time, and no run of more than 25,000 white or non-white ones.
#include <cstddef>
#include <string_view>

namespace k3 {

class Pieces {
 public:
  explicit Pieces(std::string_view text) : text_(text) {}
  bool next();
  std::string_view piece() const { return text_.substr(begin_, end_ - begin_); }

 private:
  void next_window();  // guards

  std::string_view text_;
  size_t begin_ = 0, end_ = 0;
  size_t window_ = 0;  // the pattern sees text_[end of the last window, window_)
  int slice_ = 0;      // characters of the slice before the window
  bool white_ = false;
};

}  // namespace k3

#!/usr/bin/env python3
"""Writes k3/tokenizer/unicode_table.cpp: the character classes that the published split pattern names.

The classes are read out of the reference engine itself (the regular expressions of the `tiktoken` package), one code point at a time, so the
table knows exactly the version of Unicode that the published ids were made with. The table is in the repository because ids must not change
with the version of a system library.

    pip install tiktoken && python3 tools/make_unicode_table.py > k3/tokenizer/unicode_table.cpp
"""
import tiktoken

LETTERS = {"upper": r"[\p{Lu}\p{Lt}]", "lower": r"\p{Ll}", "either": r"[\p{Lm}\p{Lo}]"}
BYTES = {bytes([i]): i for i in range(256)}
EVERY = "".join(chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000)


def members(pattern):  # what doesn't match is not encoded at all
    engine = tiktoken.Encoding("class", pat_str=pattern, mergeable_ranks=BYTES, special_tokens={})
    return set(engine.decode(engine.encode_ordinary(EVERY)))


han, mark, number, space = (members(p) for p in (r"\p{Han}", r"\p{M}", r"\p{N}", r"\s"))
upper, lower, either = (members(p) for p in LETTERS.values())
letter = members(r"\p{L}")
assert letter == upper | lower | either


def bits(c):  # the same names and values as in unicode.h
    u = c in upper or c in either or c in mark
    w = c in lower or c in either or c in mark
    newline = c in "\r\n"
    return ((c in han) * 1 | (u and c not in han) * 2 | (w and c not in han) * 4 | (not newline and c not in letter and c not in number) * 8 |
            (c in number) * 16 | (c in space) * 32 | (c not in space and c not in letter and c not in number) * 64 | newline * 128)


runs, last = [], None
for c in EVERY:
    b = bits(c)
    if b != last:
        runs.append(f"0x{ord(c):X}{b:02X}")
        last = b
print('// Written by tools/make_unicode_table.py; Unicode 16.0.\n#include "k3/tokenizer/unicode.h"\n\nnamespace k3 {\n')
print("// Code point where a run of one class begins, times 256, plus the class.\n// clang-format off\nconst uint32_t kUnicodeRuns[] = {")
line = "   "
for r in runs:
    if len(line) + len(r) + 2 > 150:
        print(line)
        line = "   "
    line += f" {r},"
print(f"{line}\n}};\n// clang-format on\nconst int kUnicodeRunCount = {len(runs)};\n\n}}  // namespace k3")

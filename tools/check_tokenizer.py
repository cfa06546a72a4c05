#!/usr/bin/env python3
"""Compares `k3 tokenize` with the reference engine: the `tiktoken` package with the pattern of model.md 7.2 and the same table of ranks.

    pip install tiktoken
    python3 tools/check_tokenizer.py build/cpu/k3 MODEL FILE... [--random 1000000] [--seed 1]

MODEL is a folder with tiktoken.model. FILEs are UTF-8 texts (bytes that are not are left out). --random adds that many characters, drawn from
the classes that go wrong: Han and its numerals, kana, Hangul, Thai, digits of all kinds, emoji with joiners, combining marks, contractions,
punctuation, every kind of white space and line end, case pairs, unassigned codes. Prints how many pieces were compared and how many differ.
"""
import argparse
import base64
import pathlib
import random
import subprocess
import sys
import tempfile

import tiktoken

U = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
W = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
X = r"[^\r\n\p{L}\p{N}]"
C = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
PATTERN = "|".join([r"[\p{Han}]+", f"{X}?{U}*{W}+{C}?", f"{X}?{U}+{W}*{C}?", r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)",
                    r"\s+"])


def windows(text):
    """At most 400,000 characters, and no run of white or of other characters above 25,000."""
    for at in range(0, len(text), 400_000):
        part = text[at:at + 400_000]
        begin, run, white = 0, 0, None
        for i, c in enumerate(part):
            run = run + 1 if c.isspace() == white else 1
            white = c.isspace()
            if run > 25_000:
                yield part[begin:i]
                begin, run = i, 1
        yield part[begin:]


def random_text(rng, count):
    ranges = [(0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x30000, 0x323AF), (0x2EBF0, 0x2EE5D), (0xF900, 0xFAFF), (0x2E80, 0x2FDF),
              (0x3005, 0x3007), (0x3021, 0x3029), (0x3038, 0x303B), (0x16FE2, 0x16FF1), (0x3041, 0x30FF), (0xAC00, 0xD7A3), (0x1100, 0x11FF),
              (0x0E00, 0x0E5B), (0xFF10, 0xFF19), (0x0660, 0x0669), (0x0966, 0x096F), (0x2150, 0x218B), (0x2460, 0x249B), (0x1F300, 0x1FAFF),
              (0x1F1E6, 0x1F1FF), (0x0300, 0x036F), (0x0900, 0x0963), (0x20D0, 0x20F0), (0xE0100, 0xE01EF), (0x00C0, 0x024F), (0x0370, 0x03FF),
              (0x0400, 0x052F), (0x10A0, 0x10FF), (0x01C4, 0x01CC), (0x1F80, 0x1FAF), (0x02B0, 0x02FF), (0x0600, 0x06FF), (0x2000, 0x206F),
              (0x3000, 0x303F), (0x0000, 0x00FF), (0x10FFF0, 0x10FFFF), (0x0870, 0x08FF), (0x1E030, 0x1E08F)]
    fixed = ["'s", "'S", "'\u017f", "'t", "'re", "'VE", "'m", "'ll", "'Ll", "'d", "'", "’s", "\r\n", "\n", "\n\n", "\r", "\t", " ", "  ", "   \n", "    x",
             "\u00a0", "\u0085", "\u3000", "\u2028", "\u200d", "\ufe0f", "\u1680", "\x0b", "\x1c", "。\n\n", "}\n///", "//", "1234567", "A", "ABc", "a",
             "中", "〇", "三", "ー", "々", "👩\u200d👩\u200d👧", "🇨🇳", "e\u0301", "É", "ǅ", "<|open|>", "<", "[EOS]", "K", "ſ", "ı", "İ", "_", "-", "—"]
    out = []
    while count > 0:
        if rng.random() < 0.5:
            word = rng.choice(fixed)
        else:
            low, high = rng.choice(ranges)
            word = "".join(chr(rng.randint(low, high)) for _ in range(rng.choice([1, 1, 1, 2, 3, 5])))
        if rng.random() < 0.01:  # anything at all
            word = chr(rng.choice([rng.randint(0, 0xD7FF), rng.randint(0xE000, 0x10FFFF)]))
        out.append(word)
        count -= len(word)
    return "".join(out)


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("program")
    options.add_argument("model")
    options.add_argument("files", nargs="*")
    options.add_argument("--random", type=int, default=1_000_000)
    options.add_argument("--seed", type=int, default=1)
    o = options.parse_args()

    lines = (pathlib.Path(o.model) / "tiktoken.model").read_text().splitlines()
    ranks = {base64.b64decode(b): int(r) for b, r in (line.split() for line in lines)}
    reference = tiktoken.Encoding("reference", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    print(f"{len(ranks)} ranks, tiktoken {tiktoken.__version__}")

    rng = random.Random(o.seed)
    texts = [(f, pathlib.Path(f).read_bytes().decode("utf-8", "ignore")) for f in o.files]
    if o.random:
        texts.append((f"random, seed {o.seed}", random_text(rng, o.random)))
        # many short ends of text, which the pattern can see
        texts += [(None, random_text(rng, rng.randint(1, 40))) for _ in range(300)]
        texts.append(("runs beyond the guards", " " * 60_000 + "a" * 60_000 + "中" * 30_000 + "\n" * 26_000 + "x y" * 200_000 + "1" * 26_000 + " " * 3))
    pieces_all = wrong_all = 0
    for name, text in texts:
        expect, pieces = [], 0
        for window in windows(text):
            expect += reference.encode_ordinary(window)
        with tempfile.NamedTemporaryFile() as f:
            f.write(text.encode())
            f.flush()
            got = [int(i) for i in subprocess.run([o.program, "tokenize", o.model, "--file", f.name, "--ids"], check=True, capture_output=True,
                                                  text=True).stdout.split()]
            pieces = subprocess.run([o.program, "tokenize", o.model, "--file", f.name, "--pieces"], check=True, capture_output=True).stdout.count(b"\n")
        wrong = abs(len(got) - len(expect)) + sum(a != b for a, b in zip(got, expect))
        pieces_all, wrong_all = pieces_all + pieces, wrong_all + wrong
        if name or wrong:
            print(f"{name or repr(text)}: {pieces} pieces, {len(expect)} ids, {wrong} differ")
        if wrong:
            at = next((i for i, (a, b) in enumerate(zip(got, expect)) if a != b), min(len(got), len(expect)))
            print("  reference", [reference.decode_single_token_bytes(i) for i in expect[max(at - 3, 0):at + 5]])
            print("  k3       ", [reference.decode_single_token_bytes(i) for i in got[max(at - 3, 0):at + 5]])
    print(f"{pieces_all} pieces compared, {wrong_all} ids differ")
    return wrong_all > 0 or pieces_all == 0


if __name__ == "__main__":
    sys.exit(main())

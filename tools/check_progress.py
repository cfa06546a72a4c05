#!/usr/bin/env python3
"""Whoever waits for a prompt to be read is told how far it is: in place each second on a terminal, a line each ten seconds elsewhere.

usage: check_progress.py K3_PROGRAM
"""
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

K3 = str(Path(sys.argv[1]).resolve())
ROOT = Path(__file__).resolve().parent.parent
SAID = re.compile(rb"reading the prompt: [\d,]+ of [\d,]+ tokens, \d+ tokens/s, (\d+:)+\d\d left(.)", re.S)


def start(folder, stderr):
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # slow on every machine
    return subprocess.Popen([K3, "generate", folder + "/model", "--prompt-file", folder + "/prompt", "--max-tokens", "1"], stdout=subprocess.DEVNULL,
                            stderr=stderr, env=one_thread)


def listen(fd, seconds, wanted):
    """The times at which words of progress came, with what stood behind each, and all that was said."""
    begun, text, seen = time.monotonic(), b"", []
    while len(seen) < wanted and time.monotonic() - begun < seconds:
        if select.select([fd], [], [], 0.2)[0]:
            try:
                piece = os.read(fd, 4096)
            except OSError:
                piece = b""
            if not piece:
                break
            text += piece
            seen += [(time.monotonic() - begun, m[2]) for m in list(SAID.finditer(text))[len(seen):]]
    return seen, text


folder = tempfile.mkdtemp(prefix="k3-progress-")
try:
    subprocess.run([K3, "fabricate", str(ROOT / "configs/hidden512.json"), "--out", folder + "/model"], check=True, stdout=subprocess.DEVNULL)
    Path(folder, "prompt").write_text("A question of some length. " * 20000)
    inside, outside = pty.openpty()
    reader, writer = os.pipe()
    begun = time.monotonic()
    runs = [start(folder, outside), start(folder, writer)]
    os.close(outside), os.close(writer)
    try:
        on_terminal, text = listen(inside, 300, 3)
        piped, lines = listen(reader, 300, 1)
        most = (time.monotonic() - begun) / 10
    finally:
        for run in runs:
            run.kill(), run.wait()
    gaps = [b[0] - a[0] for a, b in zip(on_terminal, on_terminal[1:])]
    assert len(on_terminal) == 3 and all(g > 0.8 for g in gaps), f"on a terminal: {on_terminal}\n{text!r}"
    assert not re.search(rb"left\r?\n", text), f"not in place: {text!r}"
    assert 1 <= len(piped) <= most and all(end == b"\n" for _, end in piped) and b"\033" not in lines, f"piped: {piped}\n{lines!r}"
finally:
    shutil.rmtree(folder)

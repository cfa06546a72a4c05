#!/usr/bin/env python3
"""Which fact is proved of which choice, from the names of the tests.

  tools/choices_table.py BUILD                         print the tables of docs/choices.md
  tools/choices_table.py BUILD --check docs/choices.md   fail when the document says something else
"""
import collections
import pathlib
import subprocess
import sys

# program, suite, heading
SUITES = [
    ("choices_test", "every/choice.", "Feed-forward part, activation, residual and mixer, in a whole model"),
    ("mixer_test", "every/mixer.", "Each mixer by itself"),
    ("run_test", "every/train_choice.", "Optimizer, balance and multi-token prediction, in a whole run"),
]


def tests(program):
    """{suite: {row: [fact, ...]}} of a GoogleTest program."""
    out, suite = collections.defaultdict(dict), ""
    for line in subprocess.run([program, "--gtest_list_tests"], capture_output=True, text=True, check=True).stdout.splitlines():
        if not line.startswith(" "):
            suite = line.split()[0]
        elif "/" in line:
            fact, row = line.split("#")[0].strip().split("/")
            out[suite].setdefault(row, []).append(fact)
    return out


def tables(build):
    text = ""
    for program, suite, heading in SUITES:
        rows = tests(build / program)[suite]
        facts = list(dict.fromkeys(f for row in rows.values() for f in row))
        text += f"## {heading}\n\n`{program}`, `{suite}FACT/CHOICE`\n\n| | " + " | ".join(f.replace("_", " ") for f in facts) + " |\n"
        text += "|---" * (len(facts) + 1) + "|\n"
        for row, has in rows.items():
            text += f"| {row} | " + " | ".join("x" if f in has else "" for f in facts) + " |\n"
        text += "\n"
    return text.rstrip() + "\n"


made = tables(pathlib.Path(sys.argv[1]))
if "--check" in sys.argv:
    path = pathlib.Path(sys.argv[sys.argv.index("--check") + 1])
    if made not in path.read_text():
        sys.exit(f"{path} is not what the tests are called; write anew what tools/choices_table.py {sys.argv[1]} prints")
else:
    print(made, end="")

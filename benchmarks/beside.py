"""Benchmarks of another tree of the project and of this one, by turns in one run, so that both meet the same machine.

    git worktree add /tmp/before COMMIT
    python benchmarks/beside.py /tmp/before [FILE] [--only overhead panel] [--rounds 2]

Prints each row of each benchmark with what it says there and here, all rounds, and writes it to FILE. Rows are told
apart by their first words; a row that only one tree has is told with the other's side empty.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parents[1]
RUNS: Final[dict[str, tuple[str, ...]]] = {
    "overhead": (),
    "panel": (),
    "recognition": (str(HERE / "tests" / "incident" / "gathered.jsonl"),),
    "starved": ("--rooms", "0,64", "--pieces", "8"),
    "state": ("--family", "mlp"),
}
"""Each benchmark with the part of it that is run: all of ``starved`` and ``state`` take an hour."""
_COLUMNS: Final = re.compile(r"\s{2,}")


def output(tree: Path, name: str) -> list[str]:
    """Run a benchmark in a tree, with the package of that tree, and return its lines."""
    given = (sys.executable, f"benchmarks/{name}.py", *RUNS[name])
    with tempfile.TemporaryFile("w+") as told:  # a pipe would stay open as long as a kernel that it has left
        ran = subprocess.run(given, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, stdout=told, stderr=told)
        told.seek(0)
        lines = told.read().splitlines()
    return lines if ran.returncode == 0 else [f"failed  {lines[-1] if lines else ran.returncode}"]


def rows(lines: list[str]) -> dict[str, str]:
    """Return what each row says, by its label: its words up to the first column with a figure or an outcome."""
    told: dict[str, list[str]] = defaultdict(list)
    for line in lines:
        label, *rest = _COLUMNS.split(line.strip())
        while rest and not re.search(r"\d+\.\d|answers|healed|offered|refused|killed", rest[0]):
            label += f" | {rest.pop(0)}"
        if rest:
            told[label].append("  ".join(rest))
    return {label: "; ".join(said) for label, said in told.items()}


def main(argv: list[str] | None = None) -> int:
    """Run them by turns, and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other tree")
    parser.add_argument("file", nargs="?", type=Path, help="where the table is written, too")
    parser.add_argument("--only", nargs="+", choices=tuple(RUNS), default=tuple(RUNS), help="some of them")
    parser.add_argument("--rounds", type=int, default=2, help="how often each is run in each tree")
    asked = parser.parse_args(argv)
    trees = {"before": asked.before.resolve(), "now": HERE}
    text = ""
    for name in asked.only:
        said: dict[str, dict[str, list[str]]] = defaultdict(lambda: {tree: [] for tree in trees})
        for _ in range(asked.rounds):
            for tree, path in trees.items():
                for label, row in rows(output(path, name)).items():
                    said[label][tree].append(row)
        text += f"== {name}\n"
        for label, sides in said.items():
            unlike = len({tuple(dict.fromkeys(told)) for told in sides.values()}) > 1
            if not unlike:
                text += f"{label}: the same: {sides['now'][0]}\n"
                continue
            text += f"{label}\n" + "".join(f"    {tree:6}  {' || '.join(told)}\n" for tree, told in sides.items())
        print(text, end="", flush=True) if len(asked.only) == 1 else print(f"{name} done", flush=True)
        if asked.file:
            asked.file.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

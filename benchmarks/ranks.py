"""Ranks that heal together: ``benchmarks/ranks.py [--write] [--worlds 2,3,4] [CASE ...]``.

A training under ``torchrun``, with gloo on this machine, runs out of memory in one place or another, on the simulated
device or for a limit of the host's. The healed job is held against a fresh job of the changed script, with as many
ranks and the same seeds, and without oomdoctor: what every rank has left must be the same bit for bit. Told are the
times until the other ranks were out of their runs (*released*), from there until a change was agreed on (*agreed*:
forecasts and the trial, with all ranks on the processors of this machine), and from the end of a rank's run until all
had come to the end (*committed*); the longest of all ranks each.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "ranks.txt"
PROGRAM = (ROOT / "benchmarks" / "ranks_program.py").read_text(encoding="utf-8")
CAPPED = """
import os, resource, sys
from pathlib import Path
import torch
from oomdoctor.cli import main
if os.environ["RANK"] in os.environ["RANKS"].split(","):
    held = next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmData" in line)
    resource.setrlimit(resource.RLIMIT_DATA, ((held << 10) + (int(os.environ["CAP"]) << 20), -1))
sys.exit(main(["run", *sys.argv[1:]]))
"""
LIMIT_S = 400


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to run out of memory, or to fail.

    Attributes:
        where: of the program; ``ranks``: on which.
        simulate: size of the simulated device of each rank; None for a limit of the host's.
        lines: what stands in the place of comments of the program.
        heals: whether the job is to be healed, and end with 0.
    """

    where: str
    ranks: str = "1"
    simulate: str | None = "48MiB"
    settings: dict[str, str] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)
    heals: bool = True


_IN_STEP = "    # in a step"
_SECOND = "    if rank == 0 and len(losses) == 2:\n        "
CASES = {
    "nowhere": Case(where="nowhere"),
    "forward": Case(where="forward"),
    "backward": Case(where="backward"),
    "step, half-way": Case(where="step", simulate="96MiB", settings={"HELD": "36"}),
    "two at once": Case(where="backward", ranks="0,1"),
    "after the last collective": Case(where="late", simulate="96MiB", settings={"HELD": "30"}),
    "RLIMIT_DATA, backward": Case(where="backward", simulate=None, settings={"GREED": str(2 << 20), "CAP": "1500"}),
    "a user's error on rank 0": Case(
        where="nowhere", lines={_IN_STEP: f"{_SECOND}raise ValueError('a mistake')"}, heals=False
    ),
    "rank 0 killed (-9)": Case(where="nowhere", lines={_IN_STEP: f"{_SECOND}os.kill(os.getpid(), 9)"}, heals=False),
    "rank 0 votes no": Case(
        where="backward",
        lines={"# before": "if rank == 0:\n    print('began', file=open(os.environ['OUT'] + '.log', 'a'))"},
        heals=False,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a job has ended: its status, what it printed, the outcome of each rank, and what each has left."""

    status: int
    took_s: float
    printed: str
    outcomes: list[dict[str, Any] | None]
    left: list[Any]
    diff: str


def job(folder: Path, case: Case, world: int, source: str, *, with_oomdoctor: bool = True, options: str = "") -> Ended:
    """Run a program under torchrun, and return how it ended."""
    folder.mkdir()
    (folder / "train.py").write_text(source, encoding="utf-8")
    (folder / "capped.py").write_text(CAPPED, encoding="utf-8")
    told = {"WHERE": case.where, "RANKS": case.ranks, "OUT": str(folder / "left"), "OMP_NUM_THREADS": "1", "HELD": "0"}
    told |= case.settings | {"PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT)), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world), *options.split()]
    if with_oomdoctor:
        begin = ["capped.py"] if case.simulate is None else ["-m", "oomdoctor", "run", "--simulate", case.simulate]
        command += [*begin, "--json", "case.json", "--diff", "change.diff"]
    begun = time.monotonic()
    done = subprocess.run(
        [*command, "train.py"],
        cwd=folder,
        env={**os.environ, **told},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    took_s = time.monotonic() - begun
    cases = [folder / f"case.rank{rank}.json" for rank in range(world)]
    outcomes = [json.loads(path.read_text()) if path.exists() else None for path in cases]
    diff = folder / "change.rank0.diff"
    return Ended(
        status=done.returncode,
        took_s=took_s,
        printed=done.stdout + done.stderr,
        outcomes=[one and one["outcome"] for one in outcomes],
        left=[_left(folder / f"left.{rank}.pt") for rank in range(world)],
        diff=diff.read_text(encoding="utf-8") if diff.exists() else "",
    )


def _left(path: Path) -> Any:
    import torch

    return torch.load(path) if path.exists() else None


def same(first: Any, second: Any) -> bool:
    """Return whether two values are the same bit for bit."""
    import torch

    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[name], second[name]) for name in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def changed(source: str, diff: str) -> str:
    """Return a text with a unified diff of it applied."""
    lines, out, at = source.splitlines(), list[str](), 0
    for line in diff.splitlines()[2:]:
        if (hunk := re.match(r"@@ -(\d+)", line)) is not None:
            out += lines[at : int(hunk[1]) - 1]
            at = int(hunk[1]) - 1
        elif line[:1] == "+":
            out.append(line[1:])
        else:
            at += 1
            out += [line[1:]] if line[:1] == " " else []
    return "\n".join([*out, *lines[at:]]) + "\n"


def source_of(case: Case) -> str:
    """Return the program of a case."""
    source = PROGRAM
    for comment, lines in case.lines.items():
        source = source.replace(comment, lines)
    return source


def row(name: str, case: Case, world: int, folder: Path) -> tuple[str, bool]:
    """Return a row of the table, and whether it is as it should be."""
    source = source_of(case)
    healed = job(folder / "healed", case, world, source)
    told = [one for one in healed.outcomes if one is not None]
    ranks = [one["ranks"] for one in told if one.get("ranks")]
    times = [max((one[what] for one in ranks if one[what] is not None), default=None) for what in TIMES]
    if case.heals:
        fresh = job(folder / "fresh", case, world, changed(source, healed.diff), with_oomdoctor=False)
        is_same = None not in fresh.left and same(healed.left, fresh.left)
        ends = f"healed by {'; '.join(told[0]['fixes'])}" if told else "nothing to heal"
        is_right = healed.status == 0 and is_same
        ends += f", {world}/{world} the same" if is_right else f", NOT the same (status {healed.status})"
    else:
        is_right = healed.status != 0 and all(one["kind"] != "healed" for one in told)
        why = next((one["why"] for one in told), "each rank has its own error")
        ends = why.replace(str(folder), "")[:60] if is_right else "NOT as it should be"
    shown = "".join(f"{'' if one is None else f'{one:.2f}':>11}" for one in times)
    return f"{name:<28}{world:>6}{shown}{healed.took_s:>9.1f}  {ends}", is_right


TIMES = ("released_s", "agreed_s", "committed_s")
HEAD = f"{'case':<28}{'ranks':>6}{'released s':>11}{'agreed s':>11}{'commit s':>11}{'job s':>9}  end"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--worlds", default="2,3,4")
    parser.add_argument("cases", nargs="*")
    args = parser.parse_args()
    lines, is_right = [HEAD], True
    print(HEAD, flush=True)
    for world in map(int, args.worlds.split(",")):
        for name in args.cases or CASES:
            with tempfile.TemporaryDirectory() as folder:
                line, is_as_it_should = row(name, CASES[name], world, Path(folder))
            print(line, flush=True)
            lines.append(line)
            is_right = is_right and is_as_it_should
    if args.write:
        RESULTS.write_text("\n".join([(__doc__ or "").strip(), "", *lines]) + "\n", encoding="utf-8")
    return not is_right


if __name__ == "__main__":
    sys.exit(main())

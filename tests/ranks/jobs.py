"""Jobs of several ranks under torchrun, with gloo on this machine: one run, and how it ended."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PROGRAM = (ROOT / "tests" / "ranks" / "program.py").read_text(encoding="utf-8")
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

"""Whether a kernel lives through a failure at the host's limit as well with oomdoctor as without.

    python benchmarks/starved.py [FILE] [--rooms 0,64] [--pieces 8] [--programs numpy] [--limits data]

Prints the table, and writes it to FILE. Each run is a real kernel under a real limit, filled in pieces until so much
room is left, and asked for more than that. A limit is RLIMIT_DATA, or a memory cgroup, in which the failing request is
one that no machine could serve: of others the kernel's OOM killer ends the process, with and without oomdoctor. Groups
need root and cgroup v1. Told are the runs in which the kernel lived, answered the next cell, and showed a diagnosis:
without oomdoctor, with it after idle time, and with it where the cells follow one another at once.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty
from typing import Any, Final

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

import kernel_forks  # noqa: E402 - of the tests
from kernels import Kernel  # noqa: E402 - of the tests
from memory_groups import group, started_in  # noqa: E402 - of the tests

MIB: Final = 1 << 20
ROOMS: Final = (0, 16, 32, 64)
"""What is left at the failure, in MiB."""
PIECES: Final = (1, 8, 64)
PROGRAMS: Final = {
    "numpy": ("import numpy as np", "np.ones(size // 8)"),
    "pandas": ("import numpy as np, pandas as pd", "pd.Series(np.ones(size // 8), copy=False).to_frame()"),
    "torch": ("import torch\nmodel = torch.nn.Linear(64, 64)", "torch.ones(size // 4)"),
}
"""The cell that begins, and what makes a piece of ``size`` bytes."""
WAYS: Final = ("without", "with", "in a hurry")
ROOM_FOR_USER: Final = 500 * MIB
IMPOSSIBLE: Final = 1 << 50
LONGEST_S: Final = 60.0
IDLE_S: Final = 40.0
TARGET: Final = 0.95

FREE: Final = {
    "data": """\
import resource
def free():
    with open("/proc/self/status") as file:
        used = next(int(line.split()[1]) << 10 for line in file if line.startswith("VmData"))
    return resource.getrlimit(resource.RLIMIT_DATA)[0] - used
""",
    "group": """\
def free():
    used, limit = (int(open(f"{group}/memory.{name}_in_bytes").read()) for name in ("usage", "limit"))
    return limit - used
""",
}
LIMIT: Final = {
    "data": """\
resource.setrlimit(resource.RLIMIT_DATA, (1 << 62, resource.RLIM_INFINITY))
resource.setrlimit(resource.RLIMIT_DATA, ((1 << 62) - free() + {space}, resource.RLIM_INFINITY))
""",
    "group": """\
with open(f"{{group}}/memory.limit_in_bytes", "w") as file:
    file.write(str(int(open(f"{{group}}/memory.usage_in_bytes").read()) + {space}))
""",
}
FILL: Final = """\
kept = []
def fill(room, piece, asked):
    while free() - piece >= room:
        kept.append(make(piece))
    if free() - room > 1 << 18:
        kept.append(make(free() - room))
    return make(asked or max(piece, room + (32 << 20)))
fill({room}, {piece}, {asked})
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One kernel."""

    limit: str
    program: str
    piece: int
    room: int
    way: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What became of it."""

    lived: bool = False
    answered: bool = False
    diagnosed: bool = False
    loaded_torch: bool = False
    why: str = ""


def observed(run: Run) -> Seen:
    """Run one kernel to its failure and beyond."""
    if run.limit == "data":
        return _observed(run, _begun(kernel_forks.started), "")
    with group() as folder:
        return _observed(run, _begun(partial(started_in, folder)), str(folder))


def _begun(start: Any) -> Kernel:
    """Return a kernel; where another process has taken one of its ports meanwhile, another kernel."""
    for _ in range(2):
        with suppress(RuntimeError):
            return Kernel(start=start)
    return Kernel(start=start)


def _observed(run: Run, kernel: Kernel, folder: str) -> Seen:
    begins, makes = PROGRAMS[run.program]
    stage = "beginning"
    signal.signal(signal.SIGCHLD, _ended)
    try:
        kernel.run(f"group = {folder!r}\n{FREE[run.limit]}", ok=True)
        kernel.run(f"{begins}\ndef make(size): return {makes}", ok=True)
        kernel.run(LIMIT[run.limit].format(space=ROOM_FOR_USER), ok=True)
        if run.way != "without":
            kernel.run("%load_ext oomdoctor", ok=True)
            kernel.run("make(1 << 20)\n1 + 1", ok=True)
        if run.way == "with":
            _wait(kernel)
        stage = "failing"
        asked = IMPOSSIBLE if run.limit == "group" else 0
        failed = kernel.run(FILL.format(room=run.room * MIB, piece=run.piece * MIB, asked=asked), timeout=LONGEST_S)
        stage = f"the next cell, after {failed.status}"
        after = kernel.run("1 + 1", timeout=LONGEST_S)
        loaded = kernel.run("import sys\nprint('torch' in sys.modules)", timeout=LONGEST_S).stdout.strip() == "True"
        return Seen(
            lived=True,
            answered=after.data("text/plain")[:1] == ["2"],
            diagnosed="Out of memory, case" in failed.text,
            loaded_torch=loaded and run.program != "torch",
            why="" if "Out of memory, case" in failed.text else failed.text[-300:],
        )
    except ChildProcessError:
        return Seen(why=f"{stage}: killed")
    except (Empty, TimeoutError, AssertionError) as error:
        return Seen(lived=_lives(kernel), why=f"{stage}: {type(error).__name__} {str(error)[-300:]}")
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        kernel.stop()


def _ended(*_: object) -> None:
    raise ChildProcessError


def _wait(kernel: Kernel) -> None:
    """Leave the kernel alone until it is ready for a failure."""
    end = time.monotonic() + IDLE_S
    while time.monotonic() < end and not kernel.value("get_ipython()._oomdoctor_extension.warming.done"):
        time.sleep(1.0)


def _lives(kernel: Kernel) -> bool:
    process: Any = kernel._process
    return process.poll() is None


def table(found: dict[Run, Seen]) -> Iterator[str]:
    """Yield the lines of the table, and what it shows in the end."""
    yield f"{'limit':6} {'program':8} {'piece':>6} {'room':>6}   " + "   ".join(f"{way:28}" for way in WAYS)
    rows = sorted({(run.limit, run.program, run.piece, run.room) for run in found})
    for limit, program, piece, room in rows:
        seen = [found.get(Run(limit=limit, program=program, piece=piece, room=room, way=way)) for way in WAYS]
        yield f"{limit:6} {program:8} {piece:3} MiB {room:3} MiB   " + "   ".join(f"{_words(one):28}" for one in seen)
    for way in WAYS[1:]:
        pairs = [
            (seen, bare)
            for run, seen in found.items()
            if run.way == way and (bare := found.get(run_of(run, WAYS[0]))) is not None
        ]
        if not pairs:
            continue
        lost = sum(bare.lived and bare.answered and not (seen.lived and seen.answered) for seen, bare in pairs)
        told = sum(seen.diagnosed for seen, _ in pairs) / len(pairs)
        torch = sum(seen.loaded_torch for seen, _ in pairs)
        yield (
            f"{way}: of {len(pairs)} runs {lost} were lost that live without; {told:.0%} were diagnosed (target"
            f" {TARGET:.0%}); torch was loaded in {torch} without it"
        )
    for run, seen in found.items():
        if seen.why and run.way != "without":
            yield f"  {run.limit} {run.program} {run.piece} {run.room} {run.way}: {' '.join(seen.why.split())[:400]}"


def run_of(run: Run, way: str) -> Run:
    """Return the same run in another way."""
    return Run(limit=run.limit, program=run.program, piece=run.piece, room=run.room, way=way)


def _words(seen: Seen | None) -> str:
    if seen is None:
        return "-"
    if not seen.lived:
        return "killed"
    return ("answers" if seen.answered else "mute") + (", diagnosed" if seen.diagnosed else "")


def measured(runs: Sequence[Run], at_once: int) -> Iterator[dict[Run, Seen]]:
    """Run all of them, some at once; yield what is known so far."""
    found: dict[Run, Seen] = {}
    with ProcessPoolExecutor(at_once) as pool:
        asked = {pool.submit(observed, run): run for run in runs}
        for done in as_completed(asked):
            found[asked[done]] = done.result()
            yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers: Any = lambda text: tuple(map(int, text.split(",")))  # noqa: E731
    words: Any = lambda text: tuple(text.split(","))  # noqa: E731
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--rooms", type=numbers, default=ROOMS)
    parser.add_argument("--pieces", type=numbers, default=PIECES)
    parser.add_argument("--programs", type=words, default=tuple(PROGRAMS))
    parser.add_argument("--limits", type=words, default=tuple(FREE))
    parser.add_argument("--ways", type=words, default=WAYS)
    parser.add_argument("--at-once", type=int, default=2)
    given = parser.parse_args()
    began = time.monotonic()
    each = itertools.product(given.rooms, given.limits, given.programs, given.pieces, given.ways)
    runs = [
        Run(limit=limit, program=program, piece=piece, room=room, way=way) for room, limit, program, piece, way in each
    ]
    text = ""
    for found in measured(runs, given.at_once):
        lines = [*table(found), f"{len(found)} of {len(runs)} kernels in {time.monotonic() - began:.0f} s"]
        text = "\n".join(line.rstrip() for line in lines)
        if given.file is not None:
            given.file.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()

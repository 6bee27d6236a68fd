"""Whether a retry leaves what a fresh kernel would: ``benchmarks/state.py [FILE] [--family NAME] [--setting NAME]``.

Model families x ways to train x places to fail (the table of the tests), in real Jupyter kernels. Each program fails
twice: under a real limit of the process (``RLIMIT_DATA``), where torch's own allocator is refused memory, and on a
simulated device. It is healed by the first of a few fixes that does (without forecasts, to be quick), which is then put
into a kernel that has just been started. What both hold in the end is compared by digest: parameters, gradients,
buffers, optimizers, schedulers, scalers, averages, containers, objects of the notebook's own classes, every random
stream. All kernels compute with the same number of threads, however busy the machine is.
Where the retry was refused or failed, the digest is compared with that from before the cell.

Limit: the place of the failure is planted: there the cell asks for more than there is.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "shell"))

import IPython
import torch
from IPython import get_ipython
from kernels import Kernel
from state_programs import POINTS, PROGRAMS, Planted, cells_of

ROOT: Final = Path(__file__).parents[1]
TESTS: Final = (ROOT, ROOT / "benchmarks", ROOT / "tests", ROOT / "tests" / "shell")
KINDS: Final = ("RLIMIT_DATA", "simulated")
ROOM: Final = 600 << 20
"""What the process may have beyond what it has when it has started; and the memory of the simulated device."""
HERE: Final = "__import__('state')"
FIX: Final = (
    "(lambda case: [(c.fix, dict(c.dose.values), [(e.cell, e.after) for e in getattr(c.patch, 'edits', ())])"
    " for c in case.plan.candidates if c.label in case.outcome.fixes])(__import__('oomdoctor').last_case())[0]"
)
CHOSEN: Final = (
    "[c.fix for c in __import__('oomdoctor').last_case().plan.candidates"
    " if c.fix in ('micro_batch', 'checkpoint_blocks', 'chunked_forward', 'chunked_inference', 'no_grad_eval')]"
)
HEALED: Final = "str(__import__('oomdoctor').last_case().outcome.kind) == 'healed'"
OUTCOME: Final = (
    "(lambda case: (str(case.outcome.kind), str(case.outcome.state), case.outcome.why, case.incident.message))"
    "(__import__('oomdoctor').last_case())"
)


# In the kernel ----------------------------------------------------------------------------------------------------


def begin(kind: str) -> None:
    """Empty the namespace, forget what was done before, and begin all random streams anew."""
    from state_shell import seed

    shell = get_ipython()
    shell.reset(new_session=True)
    shell.extension_manager.reload_extension("oomdoctor")
    shell.run_line_magic("config", "OomDoctor.auto = 'off'")
    shell.run_line_magic("config", "OomDoctor.forecast_time_s = 0")
    shell.run_line_magic("oomdoctor", f"simulate {ROOM}" if kind == "simulated" else "simulate off")
    seed()


def limit() -> None:
    """Let this process have so much more memory, for good."""
    import resource

    status = Path("/proc/self/status").read_text()
    used = int(next(line for line in status.splitlines() if line.startswith("VmData")).split()[1]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (used + ROOM, resource.getrlimit(resource.RLIMIT_DATA)[1]))


_PLANTED: Final = "_oomdoctor_planted"


def plant(point: str, steps: int) -> None:
    """Have the next cell ask for more than there is when it gets to ``point``."""
    planted = Planted(point, steps, error=_ask_for_too_much)
    setattr(IPython, _PLANTED, planted)  # not with what is the user's, which is put back
    planted.__enter__()


def _ask_for_too_much() -> BaseException:
    torch.empty(ROOM << 3, dtype=torch.uint8)
    raise AssertionError("so much memory was given")


def uproot() -> bool:
    """Take that away, and return whether it came to it."""
    planted = getattr(IPython, _PLANTED)
    planted.__exit__(None, None, None)
    return bool(planted.fired)


def digests() -> dict[str, str]:
    """Return a digest of each of the user's names, and of the random streams."""
    from oomdoctor.objects.leaves import state_digests

    return {name: found for name, found in state_digests(get_ipython().user_ns).items() if not _is_the_shells(name)}


def _is_the_shells(name: str) -> bool:
    return name.startswith("_") or name in ("In", "Out", "exit", "quit", "get_ipython", "open")


# Outside of it ----------------------------------------------------------------------------------------------------


@contextmanager
def kernel() -> Iterator[Kernel]:
    """A kernel that has just been started and knows this file."""
    started = Kernel({"PYTHONPATH": ":".join(map(str, TESTS))})
    try:
        started.value(f"{HERE}.__name__")
        yield started
    finally:
        started.stop()


def tried(one: Kernel, kind: str, cells: tuple[str, ...], point: str, steps: int) -> tuple[str, Any, dict[str, str]]:
    """Run a program in a kernel that heals; return how it ended, what healed it and the digests it leaves."""
    one.value(f"{HERE}.begin({kind!r})")
    for cell in cells[:-1]:
        one.run(cell, ok=True)
    before = one.value(f"{HERE}.digests()")
    one.value(f"{HERE}.plant({point!r}, {steps})")
    reply = one.run(cells[-1])
    for chosen in one.value(CHOSEN):
        one.run(f"%oomdoctor fix {chosen}")
        if one.value(HEALED):
            break
    assert one.value(f"{HERE}.uproot()"), f"it did not come to the failure: {reply.text}"
    outcome, state, why, message = one.value(OUTCOME)
    assert ("DefaultCPUAllocator" in message) is (kind == "RLIMIT_DATA"), message
    left = one.value(f"{HERE}.digests()")
    if outcome == "healed":
        return outcome if state == "clean" else f"{outcome}, {state}", one.value(FIX), left
    if state == "restored" and left != before:
        return f"{outcome}, and NOT AS BEFORE: {_names(left, before)}", None, left
    return f"{outcome}: {why}", None, left


def expected(cells: tuple[str, ...], fix: str, dose: dict[str, Any], edits: list[tuple[int, str]]) -> dict[str, str]:
    """Run the fixed program in a kernel that has just been started; return the digests it leaves."""
    sources = list(cells)
    for number, after in edits:
        sources[number - 1] = after
    with kernel() as fresh:
        fresh.value("__import__('state_shell').seed()")
        for source in sources[:-1]:
            fresh.run(source, ok=True)
        if not edits:
            fresh.value(f"__import__('state_held').apply({fix!r}, {dose!r})")
        fresh.run(sources[-1], ok=True)
        fresh.value("__import__('state_held').leave()")
        found: dict[str, str] = fresh.value(f"{HERE}.digests()")
    return found


def _names(one: dict[str, str], other: dict[str, str]) -> str:
    return ", ".join(sorted(name for name in {**one, **other} if one.get(name) != other.get(name)))


def measure(families: list[str], settings: list[str], tell: Callable[[str], None]) -> None:
    """Try every program at every point in both ways, and tell of each."""
    total: Counter[str] = Counter()
    with kernel() as healing:
        healing.run("%load_ext oomdoctor", ok=True)
        healing.value(f"{HERE}.limit()")
        for family, setting in PROGRAMS:
            if (families and family not in families) or (settings and setting not in settings):
                continue
            cells = cells_of(family, setting)
            for point in POINTS:
                known: dict[str, dict[str, str]] = {}
                for kind in KINDS:
                    ended, fix, left = tried(healing, kind, cells, point, 2 if family == "gan" else 1)
                    if fix is not None:
                        if repr(fix) not in known:
                            known[repr(fix)] = expected(cells, *fix)
                        differing = _names(left, known[repr(fix)])
                        ended += f", DIFFERS in {differing}" if differing else ", equal"
                    total[f"{kind}: {ended.partition(':')[0]}"] += 1
                    tell(f"{family:16}{setting:14}{point:22}{kind:13}{fix[0] if fix else '':18}{ended}")
    tell("")
    for ended, count in sorted(total.items()):
        tell(f"{count:4} {ended}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--family", action="append", default=[])
    parser.add_argument("--setting", action="append", default=[], help="how it trains, as the second column says")
    asked = parser.parse_args()
    told: list[str] = []

    def tell(line: str) -> None:
        print(line, flush=True)
        told.append(line)

    tell(f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}")
    measure(asked.family, asked.setting, tell)
    if asked.file:
        asked.file.write_text("\n".join(told) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

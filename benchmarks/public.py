"""How many public training programs are healed: ``benchmarks/public.py FOLDER [NAME ...] [--card] [--write]``.

FOLDER holds one file ``NAME.py`` for each program: third-party code, which is not kept here. Its head tells
``# source:`` where it is from, ``# adapted:`` what was changed, ``# causes:`` the rules that name the likeliest cause
rightly, and ``# engineer:`` what one would change by hand. Then its cells, each below ``# %%``; modules that they
import, below ``# %% module NAME.py``; the cell that trains is below ``# %% fails``.

Each program runs in three Jupyter kernels as a server starts them, on the simulated device, with one thread (what
``save_on_cpu`` keeps is not the device's there). Before the training cell the kernel is idle for some seconds, as where
somebody reads, until what a failure needs is loaded:
    * with memory to spare: what of the device the training takes, blocks that the allocator keeps included, and how
      long it takes;
    * with what the device held before the training cell and 65 % of what that cell adds to it, under
      ``%oomdoctor auto exact`` with all other settings as they are: whether the cell is healed, by what and in how many
      attempts, and how long all of it takes, the failed run and the forecasts included; a tenth less where it
      does not fail, as the allocator does with less than it takes;
    * the changed program, with memory to spare: whether it leaves what the healed one left, bit for bit.
Beside it stands how far that is from what the unchanged program leaves: the largest difference of a number, as a share
of the largest of its tensor. Time goes on: a training that is told to last long is far apart by rounding alone.

With ``--card``, on this machine's CUDA device, whose share for the process is capped. 65 % are of what is allocated
there at the peak, as PyTorch frees the blocks that it keeps before it fails; the cap itself is not taken for a cause;
and that the changed program leaves the same is told by the largest difference, as kernels that add in any order leave
no two runs the same bits.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import pickle
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from kernels import Kernel, Reply

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = Path(__file__).parent / "results" / "public.txt"
ON_CARD: Final = RESULTS.with_name("public_on_card.txt")
CAP: Final = 0.65
Leaves: TypeAlias = tuple[dict[str, Any], dict[str, Any]]
_SHELLS: Final = ("In", "Out", "exit", "quit", "get_ipython", "open")
AMPLE: Final = 64 << 30
HERE: Final = "__import__('public')"
READY: Final = (
    "get_ipython()._oomdoctor_extension.warming.done and 'torch._subclasses.fake_tensor' in __import__('sys').modules"
)
MOST_RATIO: Final = 1.3
MOST_FIXED_S: Final = 3.0
"""What a healed cell may take: so many times as long as with memory to spare, and so many seconds besides."""
MOST_IDLE_S: Final = 60.0
PARTS: Final = re.compile(r"^# %%(.*)\n", re.MULTILINE)
TOLD: Final = re.compile(r"^# (source|adapted|causes|engineer): (.*)$", re.MULTILINE)
GENERAL: Final = (
    "micro_batch",
    "checkpoint_blocks",
    "chunked_forward",
    "chunked_inference",
    "chunked_loss",
    "no_grad_eval",
)
"""Changes whose refusal is told of a program that is not healed."""
CARD: Final = "OOMDOCTOR_PUBLIC_CARD"
"""Variable that is set where the programs run on this machine's CUDA device."""
WITHIN: Final = 1e-3
"""Largest difference from what the unchanged program leaves that is counted as equal up to rounding."""


@dataclass(kw_only=True)
class Unit:
    """One program. ``fails`` is the place of the cell that trains."""

    name: str
    source: str
    adapted: str
    causes: tuple[str, ...]
    engineer: str
    cells: list[str] = field(default_factory=list)
    modules: dict[str, str] = field(default_factory=dict)
    fails: int = -1

    @classmethod
    def read(cls, path: Path) -> Unit:
        """Return the program of a file."""
        head, *parts = PARTS.split(path.read_text(encoding="utf-8"))
        told = dict(TOLD.findall(head))
        causes = tuple(one.strip() for one in told.pop("causes").split(","))
        unit = cls(name=path.stem, causes=causes, **told)
        for kind, text in zip(parts[::2], parts[1::2], strict=True):
            word, _, name = kind.strip().partition(" ")
            if word == "module":
                unit.modules[name] = text
                continue
            if word == "fails":
                unit.fails = len(unit.cells)
            unit.cells.append(text.strip("\n"))
        assert unit.fails >= 0, f"{path.name} has no cell that fails"
        return unit


@dataclass(kw_only=True)
class Row:
    """What came of one program: sizes in bytes, times in seconds."""

    unit: Unit
    need: int = 0
    size: int = 0
    held: int = 0
    plain_s: float = 0.0
    healed_s: float = 0.0
    first_s: float = 0.0
    outcome: str = ""
    fix: str = ""
    attempts: int = 0
    checked: str = ""
    cause: str = ""
    is_as_changed: bool | None = None
    apart: float | None = None
    from_changed: float | None = None
    where: str = ""
    phases: dict[str, float] = field(default_factory=dict)
    offered: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def lasts_s(self) -> float:
        """How long the program would have to last for its price to stay below 30 % and three seconds.

        What comes before the attempts takes as long for any number of epochs.
        """
        attempts_s = self.phases.get("attempts", 0.0)
        beyond_s = self.healed_s - attempts_s - MOST_FIXED_S
        left = MOST_RATIO - attempts_s / self.plain_s
        return max(beyond_s, 0.0) / left if left > 0 else math.inf

    @property
    def is_healed(self) -> bool:
        """Whether the cell ran to its end with a change in place."""
        return self.outcome == "healed"

    @property
    def is_wrong(self) -> bool:
        """Whether the healed cell left something else than the changed program: on a card, by more than rounding."""
        return not self.is_as_changed and (self.from_changed is None or self.from_changed > WITHIN)

    @property
    def names_cause(self) -> bool:
        """Whether the first finding is what one would say."""
        return self.cause in self.unit.causes

    @property
    def ratio(self) -> float:
        """Time of the healed cell over that of the unchanged one, as it would be without the three seconds granted."""
        return max(self.healed_s - MOST_FIXED_S, 0.0) / self.plain_s


# In the kernel ----------------------------------------------------------------------------------------------------


def clock() -> None:
    """Note from here on how long each phase of a retry takes, in seconds: looking, forecasts, trials, attempts."""
    from oomdoctor.pipeline.healing import Checks
    from oomdoctor.shell import doctor

    doctor.__dict__["phases"] = {}  # kept there: a retry puts back what this module holds
    owners: list[tuple[Any, str, str]] = [
        (doctor, "looked_at", "looking"),
        (doctor, "plan", "forecasts"),
        (Checks, "_tried", "trials"),
        (doctor.Attempts, "run", "attempts"),
    ]
    for owner, name, phase in owners:
        setattr(owner, name, _clocked(getattr(owner, name), phase))


def _clocked(function: Any, phase: str) -> Any:
    @contextmanager
    def noted() -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            phases()[phase] = phases().get(phase, 0.0) + time.monotonic() - begun

    def call(*args: Any, **kwargs: Any) -> Any:
        with noted():
            return function(*args, **kwargs)

    async def awaited(*args: Any, **kwargs: Any) -> Any:
        with noted():
            return await function(*args, **kwargs)

    return awaited if inspect.iscoroutinefunction(function) else call


def phases() -> dict[str, float]:
    """Return the seconds of each phase since ``clock``."""
    from oomdoctor.shell import doctor

    noted: dict[str, float] = doctor.__dict__["phases"]
    return noted


def give(size: int) -> None:
    """Give the device so much memory from here on: the simulated one, or the card's share for this process."""
    from IPython import get_ipython

    if CARD in os.environ:
        import torch

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_per_process_memory_fraction(min(size / torch.cuda.mem_get_info()[1], 1.0))
        return

    from oomdoctor.allocator import virtual

    virtual.switch_off()
    get_ipython().run_line_magic("oomdoctor", f"simulate {size}")


def sizes() -> tuple[int, int]:
    """Return the bytes that the device holds, and their peak: of the simulated one with the allocator's unused ones."""
    if CARD in os.environ:
        import torch

        return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    from oomdoctor.allocator import virtual

    device = virtual.active()
    assert device is not None
    read = device.read()
    return int(read.reserved), int(read.peak_reserved)  # type: ignore[arg-type]  # as any device simulated tells them


def last() -> dict[str, Any] | None:
    """Return what is told of the last failure, None where there was none."""
    import oomdoctor

    case = oomdoctor.last_case()
    if case is None:
        return None
    chosen = [one for one in case.plan.candidates if one.label in case.outcome.fixes]
    causes = [one.rule for one in case.findings if CARD not in os.environ or one.rule != "memory_cap_reached"]
    edits = [(edit.cell, edit.after, edit.file) for edit in getattr(chosen[0].patch if chosen else None, "edits", ())]
    return {
        "outcome": str(case.outcome.kind),
        "state": str(case.outcome.state),
        "why": case.outcome.why,
        "fix": ", ".join(case.outcome.fixes),
        "attempts": case.outcome.attempts,
        "checked": case.outcome.checked,
        "cause": next(iter(causes), ""),
        "offered": [f"{one.label}: {one.effect.value}" for one in case.plan.candidates],
        "refused": dict(case.plan.refusals),
        "edits": edits,
    }


def save(path: str) -> None:
    """Write down every leaf that the user's names and the modules of the working directory lead to."""
    from IPython import get_ipython

    from oomdoctor.allocator.virtual import uncounted
    from oomdoctor.objects import leaves as reading
    from oomdoctor.objects.named import is_users

    namespace = get_ipython().user_ns
    names = [name for name in sorted(filter(is_users, namespace)) if name not in _SHELLS]
    if CARD in os.environ:
        give(AMPLE)
    with uncounted():
        # What libraries keep beside what is the program's own is not compared, such as caches.
        found: list[dict[str, Any]] = [dict(reading.generators()), {}]
        for is_whole, leaves in zip((True, False), found, strict=True):
            walk = reading.Leaves(namespace, is_whole=is_whole)
            for name in names:
                leaves.update(walk.below(namespace[name], name))
        Path(path).write_bytes(pickle.dumps(found))


# Outside of it ----------------------------------------------------------------------------------------------------


class Notebook:
    """A program in a kernel of its own, in a folder of its own."""

    def __init__(self, modules: dict[str, str], log: Path) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="oomdoctor-public-")
        self.folder, self._log = Path(self._folder.name), log.open("w", encoding="utf-8")
        for name, text in modules.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        ours = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])])
        alike = {"PYTHONHASHSEED": "0", "MPLBACKEND": "agg"}
        if CARD not in os.environ:
            alike["OMP_NUM_THREADS"] = "1"
        self.kernel = Kernel({"PYTHONPATH": ours, "JPY_SESSION_NAME": "public", **alike})
        self.kernel.value(f"{HERE}.__name__")  # before the program's own modules, whose names may be those of ours
        begin = f"__import__('os').chdir({str(self.folder)!r}), __import__('sys').path.insert(0, {str(self.folder)!r})"
        self.kernel.value(f"[{begin}, __import__('random').seed(0)]")  # which Python seeds anew in each process
        self.run("%load_ext oomdoctor")

    def run(self, text: str) -> tuple[Reply, float]:
        """Run a cell; return the reply and its time in seconds."""
        begun = time.monotonic()
        reply = self.kernel.run(text, timeout=600)
        took_s = time.monotonic() - begun
        self._log.write(f"\n>>> {text}\n{reply.text}\n--- {reply.status}, {took_s:.2f} s\n")
        self._log.flush()
        return reply, took_s

    def idle(self) -> None:
        """Wait until the last of what a failure needs is loaded, which is done between cells."""
        end = time.monotonic() + MOST_IDLE_S
        while not self.kernel.value(READY) and time.monotonic() < end:
            time.sleep(0.5)

    def leaves(self) -> Leaves:
        """Return what the user's names lead to: to be the same, and with its numbers."""
        path = self.folder / "leaves.pickle"
        self.kernel.value(f"{HERE}.save({str(path)!r})")
        found: Leaves = tuple(pickle.loads(path.read_bytes()))
        return found

    def stop(self) -> None:
        """End the kernel."""
        self.kernel.stop()
        self._folder.cleanup()
        self._log.close()


@contextmanager
def notebook(modules: dict[str, str], log: Path) -> Iterator[Notebook]:
    one = Notebook(modules, log)
    try:
        yield one
    finally:
        one.stop()


def whole(unit: Unit, cells: list[str], modules: dict[str, str], log: Path) -> tuple[int, int, float, Leaves]:
    """Run a program with memory to spare; return bytes before the training, their peak, its time and what is left."""
    with notebook(modules, log) as one:
        for at, cell in enumerate(cells):
            if at == unit.fails:
                one.kernel.value(f"{HERE}.give({AMPLE})")
                held, _ = one.kernel.value(f"{HERE}.sizes()")
            reply, took_s = one.run(cell)
            assert reply.status == "ok", f"{unit.name}, cell {at + 1}: {reply.text[-800:]}"
            if at == unit.fails:
                plain_s, (_, peak) = took_s, one.kernel.value(f"{HERE}.sizes()")
        return held, peak, plain_s, one.leaves()


def measured(unit: Unit, logs: Path) -> Row:
    """Run one program in its three kernels."""
    row = Row(unit=unit)
    row.held, row.need, row.plain_s, plain = whole(unit, unit.cells, unit.modules, logs / f"{unit.name}.plain")
    row.size, told = row.held + int(CAP * (row.need - row.held)), None
    while told is None:
        with notebook(unit.modules, logs / f"{unit.name}.healed") as one:
            told = capped(one, row)
            left = one.leaves() if told is not None and told["outcome"] == "healed" else ({}, {})
        row.size -= 0 if told is not None else row.size // 10
    edits = told.pop("edits")
    row.outcome = told.pop("outcome") if told["state"] != "unverified" else f"{told.pop('outcome')}, unverified"
    row.where = told.pop("why") if not row.is_healed else ""
    for name in ("fix", "attempts", "checked", "cause", "offered", "refused"):
        setattr(row, name, told[name])
    if row.is_healed:
        cells, modules = list(unit.cells), dict(unit.modules)
        for number, after, file in edits:
            if file is None:
                cells[number - 3] = after
            else:
                modules[_module_of(file, modules)] = after
        _, _, _, changed = whole(unit, cells, modules, logs / f"{unit.name}.changed")
        row.is_as_changed, row.where = _same(left[0], changed[0])
        if CARD in os.environ:
            row.from_changed = _apart(left[1], changed[1])
        row.apart = _apart(left[1], plain[1])
    return row


def capped(one: Notebook, row: Row) -> dict[str, Any] | None:
    """Run the program on a device of ``row.size``; return what is told of its failure, None where it has not failed."""
    one.run("%oomdoctor auto exact")
    for at, cell in enumerate(row.unit.cells):
        if at == row.unit.fails:
            one.idle()
            one.kernel.value(f"[{HERE}.clock(), {HERE}.give({row.size})]")
        reply, took_s = one.run(cell)
        if at == row.unit.fails:
            row.healed_s, told = took_s, one.kernel.value(f"{HERE}.last()")
            row.phases = one.kernel.value(f"{HERE}.phases()")
            if told is None or told["outcome"] != "healed":
                return told
        assert reply.status == "ok", f"{row.unit.name}, cell {at + 1}: {reply.text[-800:]}"
    return told


def _module_of(file: str, modules: dict[str, str]) -> str:
    return max((name for name in modules if file.endswith(name)), key=len)


def _same(left: dict[str, Any], changed: dict[str, Any]) -> tuple[bool, str]:
    """Return whether two programs leave the same bit for bit, and the first few paths that differ."""
    common = [path for path in changed if path in left]
    told = {path: (changed[path], left[path]) for path in common if not _is_clock(path)}
    unlike = [path for path, (one, other) in told.items() if _exactly(one) != _exactly(other)]
    missing = [path for path in changed if path not in left]
    return not unlike and not missing, ", ".join([*unlike, *missing][:4])


def _exactly(leaf: Any) -> str:
    """Return what has to be the same of a leaf; of a text its words, as its numbers may be those of a clock."""
    return str(leaf.frame if leaf.frame.startswith("a text") else leaf.exact)


def _apart(left: dict[str, Any], plain: dict[str, Any]) -> float:
    """Return the largest difference of the numbers of tensors, each as a share of the largest in it."""
    from oomdoctor.trial.differences import rounding

    tensors = {path: leaf for path, leaf in plain.items() if leaf.is_tensor}
    return rounding(tensors, left)[0]


def _is_clock(path: str) -> bool:
    return re.search(r"time|start|begin|elapsed|(^|[._\[])t(\d|ic|_total)\b", path) is not None


def told(row: Row) -> Iterator[str]:
    """Yield the lines of one program."""
    mib = 1 << 20
    unit = row.unit
    state = "as the changed program, bit for bit" if row.is_as_changed else f"DIFFERS in {row.where}"
    if row.from_changed and not row.is_wrong:
        state = f"{row.from_changed:.1g} of the largest value from the changed program"
    yield f"{unit.name}: {row.outcome}" + (f" by {row.fix}" if row.fix else "")
    yield f"  source    {unit.source}"
    yield f"  adapted   {unit.adapted}"
    before, needed, given = (f"{size / mib:.1f} MiB" for size in (row.held, row.need, row.size))
    yield f"  memory    {before} before, {needed} needed, {given} given"
    yield (
        f"  time      {row.plain_s:.1f} s with memory to spare, {row.healed_s:.1f} s healed; "
        f"without 3 s, x{row.ratio:.2f}; {row.attempts} attempts"
    )
    if row.phases:
        rest_s = row.healed_s - sum(row.phases.values())
        took = ", ".join(f"{name} {took_s:.1f} s" for name, took_s in row.phases.items())
        yield f"  of it     {took}, the rest {rest_s:.1f} s"
    yield f"  cause     {row.cause or 'none'}{'' if row.names_cause else ', NOT of ' + ', '.join(unit.causes)}"
    if row.is_healed:
        yield f"  state     {state}; {row.apart:.1g} of the largest value from the unchanged program"
        yield f"  tried     {row.checked}"
    else:
        yield f"  why       {row.where}"
        yield f"  engineer  {unit.engineer}"
        yield from (f"  offered   {one}" for one in row.offered[:4])
        yield from (f"  refused   {fix}: {why}" for fix, why in row.refused.items() if fix in GENERAL)


def summary(rows: list[Row]) -> Iterator[str]:
    """Yield what is told of all programs."""
    healed = [row for row in rows if row.is_healed]
    yield f"{len(healed)} of {len(rows)} healed ({len(healed) / len(rows):.0%})"
    wrong = [row.unit.name for row in healed if row.is_wrong]
    yield f"not as the changed program: {', '.join(wrong) or 'none'}"
    far = [row.unit.name for row in healed if (row.apart or 0.0) > WITHIN]
    yield f"further than {WITHIN:g} from the unchanged program: {', '.join(far) or 'none'}"
    right = sum(row.names_cause for row in rows)
    yield f"likeliest cause first in {right} of {len(rows)} ({right / len(rows):.0%})"
    if healed:
        ratios = sorted(row.ratio for row in healed)
        yield f"time of the healed cell, three seconds less: median x{statistics.median(ratios):.2f}"
        lasts_s = statistics.median(row.lasts_s for row in healed)
        yield f"within x{MOST_RATIO:g} and {MOST_FIXED_S:g} s from a training of {lasts_s:.0f} s on, at the median"
        for phase in dict.fromkeys(name for row in healed for name in row.phases):
            yield f"  {phase}: median {statistics.median(row.phases.get(phase, 0.0) for row in healed):.1f} s"
        attempts = Counter(row.attempts for row in healed)
        yield "attempts: " + ", ".join(f"{count} with {attempt}" for attempt, count in sorted(attempts.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="of programs; all by default")
    parser.add_argument("--card", action="store_true", help="on this machine's CUDA device")
    parser.add_argument("--logs", type=Path, help="folder for what the kernels put out")
    parser.add_argument("--rows", type=Path, help="file that rows are added to, and that all are told of")
    parser.add_argument("--write", action="store_true", help=f"into {RESULTS.name}, or {ON_CARD.name} with --card")
    asked = parser.parse_args()
    if asked.card:
        os.environ[CARD] = "1"
    logs = asked.logs or Path(tempfile.mkdtemp(prefix="oomdoctor-public-logs-"))
    logs.mkdir(parents=True, exist_ok=True)
    paths = [asked.folder / f"{name}.py" for name in asked.names] or sorted(asked.folder.glob("*.py"))
    rows = {row.unit.name: row for row in (_rows_of(asked.rows) if asked.rows else ())}
    for path in paths if asked.names or not rows else ():
        try:
            row = measured(Unit.read(path), logs)
        except Exception as error:  # noqa: BLE001  border to programs of others
            print(f"{path.stem}: NOT MEASURED: {type(error).__name__}: {error}", flush=True)
            continue
        rows[path.stem] = row
        print(*told(row), sep="\n", flush=True)
        if asked.rows:
            with asked.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row)) + "\n")
    ordered = [rows[name] for name in sorted(rows)]
    lines = [*summary(ordered), *(line for row in ordered for line in ("", *told(row)))] if ordered else []
    print("", *lines[: lines.index("")] if lines else (), sep="\n")
    if asked.write:
        (ON_CARD if asked.card else RESULTS).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _rows_of(file: Path) -> Iterator[Row]:
    """Yield the rows that were written down, those of a program that was measured again once more."""
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        found = json.loads(line)
        unit = Unit(**{**found.pop("unit"), "cells": [], "modules": {}})
        yield Row(unit=replace(unit, causes=tuple(unit.causes)), **found)


if __name__ == "__main__":
    main()

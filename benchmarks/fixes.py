"""What each fix buys: the measured peak before and after, and the time, on the model families of the tests.

    python benchmarks/fixes.py [--fix ID ...] [--device cuda] [--write]

For each fix, up to three families that it heals, those that it saves most on first. Each program runs as it is and with
the fix's mildest dose, as the patched source or, where there is none, on the live objects. Before the fix is chosen
the program has failed on the virtual accelerator, and the evidence of that failure is what the fix is proposed on.

On the CPU a peak is the most bytes of storages that operations made and that were alive together, counted by the tests'
own dispatch mode, which knows nothing of oomdoctor; on CUDA it is ``torch.cuda.max_memory_allocated``. Times are the
least of some rounds, taken in turns without and with the fix and without the counting, as a ratio.

``--write`` puts the rows into ``results/fixes.json``, which ``make docs`` makes the table of ``docs/fixes.md`` from.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fixes"))

from models import FAMILIES, Family
from running import begun, cells_with, fail, finish, run, session_of

from oomdoctor import fixes
from oomdoctor.errors import OomDoctorError
from oomdoctor.model.fix import Effect, Fix
from oomdoctor.model.unavailable import Refused

RESULTS = Path(__file__).parent / "results" / "fixes.json"
FAMILIES_EACH, ROUNDS = 3, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a family's last cell is run with a fix."""

    form: str
    sources: tuple[str, ...]
    context: Callable[[dict[str, Any]], AbstractContextManager[None]]
    dose: str
    effect: str


def way_of(fix: Fix, family: Family) -> Way | None:
    """Return the fix's mildest dose, as a patch where there is one, None where it refuses."""
    failure = fail(family)
    proposals = fix.propose(failure.incident, failure.evidence)
    if isinstance(proposals, Refused) or proposals[0].effect is Effect.ADVICE:
        return None
    dose, effect = proposals[0].dose, proposals[0].effect.value
    patch = fix.patch(failure.cells, failure.evidence, dose)
    sources, form, enter = family.cells(), "live", fix.apply
    if not isinstance(patch, Refused):
        cells = cells_with(failure.cells, {edit.cell: edit.after for edit in patch.edits})
        sources, form, enter = tuple(cell.source for cell in cells.history), "patch", fix.guard or nothing
    if enter is None:
        return None
    within = enter

    def context(namespace: dict[str, Any]) -> AbstractContextManager[None]:
        return within(session_of(namespace, failure.cells), dose)

    return Way(form=form, sources=sources, context=context, dose=str(dose), effect=effect)


def nothing(*_: object) -> AbstractContextManager[None]:
    return nullcontext()


def peak(family: Family, sources: tuple[str, ...], context: Any = nothing) -> int:
    """Return the peak of the last cell, in bytes."""
    if torch.get_default_device().type != "cuda":
        return finish(family, sources, context)[0].peak
    with begun(sources) as namespace:
        torch.cuda.reset_peak_memory_stats()
        with context(namespace):
            run(sources[-1], namespace, len(sources))
        return torch.cuda.max_memory_allocated()


def seconds(sources: tuple[str, ...], context: Any = nothing) -> float:
    """Return how long the last cell takes."""
    gc.collect(1)
    with begun(sources) as namespace, context(namespace):
        began = time.perf_counter()
        run(sources[-1], namespace, len(sources))
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter() - began


def rows_of(fix_id: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each of the families that the fix saves most on."""
    fix, healed = fixes.get(fix_id), []
    for family in FAMILIES.values():
        way = way_of(fix, family)
        with suppress(OomDoctorError):  # it finds itself unfit when the program runs
            if way is not None:
                healed.append((family, way, peak(family, family.cells()), peak(family, way.sources, way.context)))
    for family, way, before, after in sorted(healed, key=lambda one: one[3] / one[2])[:FAMILIES_EACH]:
        times = [(seconds(family.cells()), seconds(way.sources, way.context)) for _ in range(ROUNDS)]
        without, with_it = (min(column) for column in zip(*times, strict=True))
        yield {
            "fix": fix_id,
            "family": family.name,
            "form": way.form,
            "dose": way.dose,
            "effect": way.effect,
            "before": before,
            "after": after,
            "time_ratio": round(with_it / without, 2),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fix", action="append", choices=fixes.ids(), metavar="ID", help="only this one")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--write", action="store_true", help="write results/fixes.json")
    args = parser.parse_args()
    if args.device != "cpu":
        torch.set_default_device(args.device)  # not the CPU: that would put a mode around every call
    warnings.simplefilter("ignore")
    rows = []
    for fix_id in args.fix or fixes.ids():
        for row in rows_of(fix_id):
            print("{fix:<24}{family:<16}{form:<7}{dose:<28}".format(**row), end="")
            print(f"{row['after'] / row['before']:>7.0%} of {row['before']:>12,} bytes  time x{row['time_ratio']:.2f}")
            rows.append(row)
    device = torch.cuda.get_device_name() if args.device == "cuda" else f"{platform.machine()}, {os.cpu_count()} CPUs"
    machine = f"{device}, Python {platform.python_version()}, torch {torch.__version__}"
    if args.write:
        RESULTS.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

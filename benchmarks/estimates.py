"""How far off estimates are: ``benchmarks/estimates.py [--write] [FAMILY ...]``.

An estimate is what a plan tells of a change that had no dry run: the peak of the unchanged cell, less what the
census says that the change saves. Each model family of the tests, grown until its peak is some 2 MiB, runs out of
memory on the virtual accelerator with 60 % of what it takes. The plan is made without any dry run; then each
change that has an estimate is made for real on a device with room enough, and the peak is measured there. Changes that
find themselves unfit are left out. An estimate is of one of two kinds, by what is known of the unchanged cell:

* *from a peak*: its peak is known by a dry run, here by having run it;
* *from the failure*: known is what it held and asked for when it failed, the least that it needs.

Shown are estimate over measured, less one: the median, and between which bounds 9 of 10 lie; and the same bounds as
measured over estimate, which is what a plan tells of its estimates (``FROM_PEAK``, ``FROM_FAILURE`` in ``model.plan``).
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "forecast"))

from models import FAMILIES, Family
from plan_lab import Ready, failed, grown, peak_of, unfixed

from oomdoctor import fixes
from oomdoctor.forecast.planner import Planner
from oomdoctor.model.plan import Forecast
from oomdoctor.model.unavailable import Refused

RESULTS = Path(__file__).parent / "results" / "estimates.txt"
SHARES = (0.6,)
LEAST_BYTES = 2 << 20
KINDS = ("from a peak", "from the failure")


def measured(families: list[Family]) -> Iterator[tuple[str, str, str, float]]:
    """Yield the kind, the family, the fix and how far off, for each estimate that can be held to a run."""
    for small in families:
        family = grown(small, LEAST_BYTES)
        _, whole = unfixed(family)
        for share in SHARES:
            with failed(family, int(whole * share), time_budget_s=0) as ready:
                if isinstance(ready, Ready):
                    yield from ((kind, family.name, fix, off) for kind, fix, off in _of(ready, whole))


def _of(ready: Ready, whole: int) -> Iterator[tuple[str, str, float]]:
    case = ready.case
    some = [fixes.get(one.fix) for one in case.plan.candidates]
    planner = Planner(ready.session, case.incident, case.evidence, some, None, frozenset(), 0)
    planner._propose()
    known = (Forecast(basis="a run", peak=whole), planner.least(""))
    peaks: dict[tuple[int, int], int | None] = {}
    for kind, unchanged in zip(KINDS, known, strict=True):
        for change in planner._changes:
            index, estimate = change.settled(unchanged, planner._scale(unchanged))
            attempt = change.attempt(index)
            if isinstance(attempt, Refused) or not estimate.peak:
                continue
            if (change.place, index) not in peaks:
                peaks[change.place, index] = peak_of(ready, attempt)
            if (peak := peaks[change.place, index]) is not None:
                yield kind, change.fixes[0], estimate.peak / peak - 1


def report(say: Callable[[str], None], rows: list[tuple[str, str, str, float]]) -> None:
    """Say how far off each kind is, all together and by fix."""
    for kind in KINDS:
        of_kind = [row for row in rows if row[0] == kind]
        offs = [off for *_, off in of_kind]
        low, high = (1 / (1 + np.quantile(offs, share)) for share in (0.95, 0.05))
        say(f"{kind}: {_spread(offs)} in {len(offs)} estimates: {low:.1f} to {high:.1f} times as large")
        by_fix: dict[str, list[float]] = defaultdict(list)
        for _, _, fix, off in of_kind:
            by_fix[fix].append(off)
        for fix, of_fix in sorted(by_fix.items()):
            say(f"  {fix:<26} {_spread(of_fix)} in {len(of_fix)}")


def _spread(offs: list[float]) -> str:
    low, middle, high = np.quantile(offs, (0.05, 0.5, 0.95))
    return f"median {middle:+.0%}, 9 in 10 from {low:+.0%} to {high:+.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    args = parser.parse_args()
    chosen = [FAMILIES[name] for name in args.families or FAMILIES]
    lines: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    rows = []
    for row in measured(chosen):
        rows.append(row)
        print(*row, file=sys.stderr, flush=True)
    report(say, rows)
    if args.write:
        RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

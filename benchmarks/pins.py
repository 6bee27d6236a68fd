"""Pins what the product answers today: ``benchmarks/pins.py [--check] [fixes | plans | recognition ...]``.

A rewrite of the inside is held against these answers. Without ``--check`` they are written to ``results/pins/``; with
it they are made anew, and each difference is printed. A difference is no fault by itself: it is looked at, and is
mended or told.

``fixes``: for each model family of the tests, run out of memory on the virtual accelerator, and each fix: its doses
with effect and estimate, whether it has a live form, and the diff of its mildest dose; or why it refuses.
``plans``: for the same families, grown to some 48 MiB and given 70 % of their peak: the candidates in order, with dose,
forecast and whether they fit.
``recognition``: for each of the real messages in ``tests/incident/gathered.jsonl`` what is made of it, and the rules
that match.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fixes"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "forecast"))

from models import FAMILIES
from plan_lab import Ready, failed, grown, unfixed
from recognition import NUMBERS
from running import fail

from oomdoctor import fixes
from oomdoctor.incident import from_text
from oomdoctor.model.absence import Refused
from oomdoctor.rulebook import load, locate

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "pins"
LEAST_BYTES = 48 << 20
GATHERED = ROOT / "tests" / "incident" / "gathered.jsonl"
SHARE = 0.7
TIME_S = 120.0


def of_fixes() -> Iterator[tuple[str, Any]]:
    """Yield each family with what every fix answers to its failure."""
    for name, family in FAMILIES.items():
        failure = fail(family)
        yield name, {fix_id: _answer(fixes.get(fix_id), failure) for fix_id in fixes.ids()}


def _answer(fix: Any, failure: Any) -> Any:
    proposals = fix.propose(failure.incident, failure.evidence)
    if isinstance(proposals, Refused):
        return {"refused": proposals.reason}
    patch = fix.patch(failure.cells, failure.evidence, proposals[0].dose)
    return {
        "doses": [f"{one.dose}: {one.effect.value}, saves {one.saves:,}" for one in proposals],
        "live": fix.apply is not None,
        "patch": f"refused: {patch.reason}" if isinstance(patch, Refused) else patch.diff().splitlines(),
    }


def of_plans() -> Iterator[tuple[str, Any]]:
    """Yield each family with the candidates of its plan."""
    for name, small in FAMILIES.items():
        family = grown(small, LEAST_BYTES)
        _, peak = unfixed(family)
        with failed(family, int(peak * SHARE), time_budget_s=TIME_S) as ready:
            yield name, _candidates(ready) if isinstance(ready, Ready) else ready


def _candidates(ready: Ready) -> list[str]:
    assert ready.case.plan is not None
    told = []
    for one in ready.case.plan.candidates:
        forecast = one.forecast
        bytes_ = forecast.refused or f"{forecast.peak:,} allocated, {forecast.reserved or 0:,} reserved"
        told.append(f"{one.fix} {one.dose}: {one.effect.value}, {bytes_}, fits: {forecast.fits}")
    return told


def of_recognition() -> Iterator[tuple[str, Any]]:
    """Yield each message, by its name, with what is read from it and the rules that match, most likely first."""
    book = load([locate()], known_fixes=fixes.ids())
    for line in GATHERED.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        incident = from_text(record["text"])[0]
        read = {name: getattr(incident, name) for name in ("is_oom", "family", "format", *NUMBERS)}
        told = {name: value for name, value in read.items() if value is not None}
        yield record["id"], told | {"rules": [finding.rule for finding in book.match(incident, None)]}


PINS: dict[str, Callable[[], Iterator[tuple[str, Any]]]] = {
    "fixes": of_fixes,
    "plans": of_plans,
    "recognition": of_recognition,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pins", nargs="*", choices=[*PINS, []], help="only these")
    parser.add_argument("--check", action="store_true", help="show what differs instead of writing")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    differences = 0
    for name in asked.pins or PINS:
        path = RESULTS / f"{name}.json"
        text = json.dumps(dict(PINS[name]()), indent=1, ensure_ascii=False, default=str) + "\n"
        if not asked.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            continue
        before = path.read_text(encoding="utf-8").splitlines()
        for line in difflib.unified_diff(before, text.splitlines(), f"pinned {name}", f"{name} now", lineterm="", n=2):
            differences += 1
            print(line)
    return int(differences > 0)


if __name__ == "__main__":
    sys.exit(main())

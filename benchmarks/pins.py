"""Pins what the product answers today: ``benchmarks/pins.py [--check] [fixes | plans | recognition ...]``.

A rewrite of the inside is held against these answers. Without ``--check`` they are written to ``results/pins/``; with
it they are made anew and compared. A difference is no fault by itself: it is looked at, and is mended, or told with its
reason in ``results/pins/reasons.toml``. Those without a reason are printed, and how often each reason holds.

``fixes``: for each model family of the tests, run out of memory on the virtual accelerator, and each fix: its doses
with effect and estimate, whether it has a live form, and the diff of its mildest dose; or why it refuses.
``plans``: for the same families, grown to some 48 MiB and given 70 % of their peak: the candidates in order, with dose,
forecast and whether they fit.
``recognition``: for each of the real messages in ``tests/incident/gathered.jsonl`` what is made of it, and the rules
that match.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
import warnings
from collections import Counter
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
from oomdoctor.model.unavailable import Refused
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


Difference = tuple[str, str, str, str]
"""A family or a message, a fix or "", what about it differs, and the two answers in one line."""


def differences(before: dict[str, Any], now: dict[str, Any]) -> Iterator[Difference]:
    """Yield how answers differ, family by family and fix by fix."""
    for name in sorted({*before, *now}):
        one, other = (_by_fix(answers.get(name)) for answers in (before, now))
        for fix in sorted({*one, *other}):
            yield from ((name, fix, *told) for told in _aspects(one.get(fix), other.get(fix)))


def _by_fix(answer: Any) -> dict[str, Any]:
    """Return what is said of a family by fix; a plan's candidates by their first word."""
    if isinstance(answer, dict) and all(isinstance(one, dict) for one in answer.values()):
        return answer
    if isinstance(answer, list):
        return {line.split()[0]: _candidate(line) for line in answer}
    return {"": {"answer": answer}}


def _candidate(line: str) -> dict[str, Any]:
    dose, _, told = line.partition(": ")
    effect, _, forecast = told.partition(", ")
    numbers, _, fits = forecast.rpartition(", fits: ")
    return {"doses": dose, "effect": effect, "bytes": numbers, "fits": fits}


def _aspects(one: Any, other: Any) -> Iterator[tuple[str, str]]:
    if one is None or other is None:
        yield ("new" if one is None else "gone"), f"{_short(one)} -> {_short(other)}"
        return
    if ("refused" in one) != ("refused" in other):
        yield ("proposed" if "refused" in one else "refused"), f"{_short(one)} -> {_short(other)}"
        return
    for aspect in one:
        if one[aspect] != other[aspect]:
            patches = aspect == "patch" and [isinstance(answer[aspect], list) for answer in (one, other)]
            named = {(False, True): "patched", (True, False): "not_patched"}.get(tuple(patches or ()), aspect)
            yield named, f"{_short(one[aspect])} -> {_short(other[aspect])}"


def _short(answer: Any) -> str:
    told = json.dumps(answer, ensure_ascii=False, default=str)
    return told if len(told) < 200 else f"{told[:200]}…"


def _check(name: str, before: dict[str, Any], now: dict[str, Any]) -> int:
    """Print how often each reason holds, and the differences that have none; return how many these are."""
    reasons = {
        (family, entry["fix"], aspect): entry["reason"]
        for entry in tomllib.loads((RESULTS / "reasons.toml").read_text(encoding="utf-8")).get(name, ())
        for aspect in entry["differs"]
        for family in entry["families"]
    }
    found = list(differences(before, now))
    unknown = [one for one in found if one[:3] not in reasons]
    told = Counter(reasons[one[:3]] for one in found if one[:3] in reasons)
    print(f"{name}: {len(found)} differences from what was pinned, {len(unknown)} of them without a reason")
    for reason, count in told.most_common():
        print(f"  {count:3}  {reason}")
    for family, fix, aspect, answers in unknown:
        print(f"  no reason: {family} {fix} {aspect}: {answers}")
    for family, fix, aspect in sorted(reasons.keys() - {one[:3] for one in found}):
        print(f"  no difference any more: {family} {fix} {aspect}")
    return len(unknown)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pins", nargs="*", choices=[*PINS, []], help="only these")
    parser.add_argument("--check", action="store_true", help="show what differs instead of writing")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    unknown = 0
    for name in asked.pins or PINS:
        path = RESULTS / f"{name}.json"
        text = json.dumps(dict(PINS[name]()), indent=1, ensure_ascii=False, default=str) + "\n"
        if asked.check:
            unknown += _check(name, json.loads(path.read_text(encoding="utf-8")), json.loads(text))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return int(unknown > 0)


if __name__ == "__main__":
    sys.exit(main())

"""How long a trial takes, and what it says: ``benchmarks/trial.py [--write]``.

Pairs: each pair of programs in ``tests/trial/programs``, whose true answer was measured by running both to their end.
Families: each fix that promises to keep the results, on each model family of the tests; beside the trial's answer
stands the promise that reading the code led to.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fixes"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "trial"))

from models import FAMILIES
from running import begun, fail, session_of
from test_programs import PROGRAMS, cells_of, tried

from oomdoctor import fixes
from oomdoctor.forecast.attempts import patched
from oomdoctor.model.fix import Effect, Patch
from oomdoctor.model.plan import Trial
from oomdoctor.model.session import Attempt
from oomdoctor.model.unavailable import Refused
from oomdoctor.trial import compare

RESULTS: Final = Path(__file__).parent / "results" / "trial.txt"
KEEP: Final = (Effect.EXACT, Effect.EQUIVALENT)


def timed(make: Any, *args: Any, **terms: Any) -> tuple[Trial, float]:
    begun_s = time.monotonic()
    return make(*args, **terms), time.monotonic() - begun_s


def of_pairs() -> Iterator[tuple[str, Trial, float]]:
    for program in PROGRAMS:
        with TemporaryDirectory() as folder:
            yield program.stem, *timed(tried, cells_of(program), Path(folder))


def of_families() -> Iterator[tuple[str, str, Trial, float]]:
    """Yield family, fix and what was promised, with what the trial says of the mildest dose."""
    for name, family in FAMILIES.items():
        failure = fail(family)
        for fix in fixes.catalogue().values():
            proposals = fix.propose(failure.incident, failure.evidence)
            if isinstance(proposals, Refused) or proposals[0].effect not in KEEP or not fix.is_tried:
                continue
            patch = fix.patch(failure.cells, failure.evidence, proposals[0].dose)
            if isinstance(patch, Refused):
                continue
            with begun(family.cells()) as namespace:
                session = session_of(namespace, failure.cells)
                unchanged = Attempt(source=failure.cells.failing.source)
                doses = [proposals[0].dose | way for way in fix.ways]
                ways = [patch, *(fix.patch(failure.cells, failure.evidence, dose) for dose in doses)]
                attempts = dict.fromkeys(patched(failure.cells.failing, one) for one in ways if isinstance(one, Patch))
                parts = max((value for _, value in proposals[0].dose.values if type(value) is int), default=1)
                yield (
                    *(name, f"{fix.id}: {proposals[0].effect.value}"),
                    *timed(
                        compare,
                        *(session, lambda: None, unchanged, [*attempts]),
                        effect=proposals[0].effect,
                        leaves=fix.leaves,
                        parts=parts,
                    ),
                )


def seconds(times: list[float]) -> str:
    *_, most = statistics.quantiles(times, n=20)
    return f"median {statistics.median(times):.2f} s, 95 % within {most:.2f} s, of {len(times)}"


def report() -> Iterator[str]:
    pairs = list(of_pairs())
    yield f"Pairs: {seconds([took_s for *_, took_s in pairs])}"
    said = Counter((name.split("_")[0], trial.same) for name, trial, _ in pairs)
    for (kind, same), count in sorted(said.items(), key=str):
        yield f"  truly {kind}: {count} told {'not known' if same is None else 'same' if same else 'different'}"
    yield from (f"  {name}: {trial.basis}" for name, trial, _ in pairs if name.startswith("differs") and trial.same)
    yield from (
        f"  {name}: {trial.why[:200]}" for name, trial, _ in pairs if name.startswith("same") and not trial.same
    )
    families = list(of_families())
    yield f"Families: {seconds([took_s for *_, took_s in families])}"
    for family, promised, trial, took_s in families:
        answer = f"not known: {trial.why}" if trial.same is None else trial.basis if trial.same else trial.why
        yield f"  {family:16} {promised:36} {took_s:5.1f} s  {trial.same!s:5} {answer[:160]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"into {RESULTS.name}")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    lines = []
    for line in report():
        print(line, flush=True)
        lines.append(line)
    if asked.write:
        RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

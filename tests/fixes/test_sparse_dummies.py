from __future__ import annotations

import tracemalloc
from typing import Any

import live
import numpy as np
import pytest

from oomdoctor import fixes
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.incident import CellLine, Family, Incident
from oomdoctor.model.unavailable import Refused

pd = pytest.importorskip("pandas")
FIX = fixes.get("sparse_dummies")
patch, propose = FIX.patch, FIX.propose

MESSAGE = "Unable to allocate 95.4 MiB for an array with shape (100000, 1000) and data type bool"
SOURCE = "import pandas as pd\nwide = pd.get_dummies(cities)  # a column each\n"
GOLDEN = """\
--- In[1]
+++ In[1] fixed
@@ -1,2 +1,2 @@
 import pandas as pd
-wide = pd.get_dummies(cities)  # a column each
+wide = pd.get_dummies(cities, sparse=True)  # a column each
"""


def incident(line: str = SOURCE.splitlines()[1], **more: Any) -> Incident:
    where = CellLine(number=1, line=2, source_line=line)
    known = {"family": Family.NUMPY, "device": "cpu", "requested": 100_000_000, "message": MESSAGE, **more}
    return Incident(is_oom=True, cell=where, **known)


def patched(source: str) -> Patch | Refused:
    return patch(live.cells_of(source), live.evidence(), Dose.of(cell=1, line=len(source.splitlines())))


def test_it_is_offered_by_the_shape_that_was_asked_for() -> None:
    (one,) = propose(incident(), live.evidence())  # type: ignore[misc]
    assert (str(one.dose), one.effect, one.saves) == ("cell=1, line=2", Effect.CHANGES_RESULT, 99_500_000)
    assert FIX.apply is None


@pytest.mark.parametrize(
    ("line", "more", "why"),
    [
        ("wide = cities.map(codes)", {}, "no indicator columns"),
        ("wide = pd.get_dummies(cities)", {"requested": None}, "is not known"),
        ("wide = pd.get_dummies(cities)", {"message": "no room"}, "is not known"),
        ("wide = pd.get_dummies(cities)", {"requested": 100, "message": "with shape (50, 2)"}, "no less than"),
        ("wide = pd.get_dummies(cities)", {"family": Family.CUDA, "device": "cuda:0"}, "the host alone"),
    ],
)
def test_where_it_is_not_offered(line: str, more: dict[str, Any], why: str) -> None:
    refused = propose(incident(line, **more), live.evidence())
    assert isinstance(refused, Refused)
    assert why in refused.reason


def test_golden_diff_and_second_time() -> None:
    made = patched(SOURCE)
    assert isinstance(made, Patch)
    assert made.diff() == GOLDEN
    again = patched(made.edits[0].after)
    assert isinstance(again, Refused)
    assert "no indicator columns" in again.reason


@pytest.mark.parametrize("source", ["wide = pd.get_dummies(*given)", "a, b = pd.get_dummies(x), pd.get_dummies(y)"])
def test_what_is_not_written(source: str) -> None:
    assert isinstance(patched(source), Refused)


def test_the_same_numbers_in_a_part_of_the_memory() -> None:
    made = patched(SOURCE)
    assert isinstance(made, Patch)
    cities = pd.Series(np.arange(100_000) % 1_000)
    taken, frames = [], []
    for source in (SOURCE, made.edits[0].after):
        space: dict[str, Any] = {"cities": cities}
        tracemalloc.start()
        exec(source, space)
        taken.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        frames.append(space["wide"])
    assert taken[0] > 95e6
    assert taken[1] < 0.2 * taken[0]
    assert np.array_equal(frames[0].to_numpy(), frames[1].sparse.to_dense().to_numpy())

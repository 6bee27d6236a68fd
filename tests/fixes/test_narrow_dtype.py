from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import live
import numpy as np
import pytest
import torch

from oomdoctor import fixes
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.incident import CellLine, Family, Incident
from oomdoctor.model.unavailable import Refused

FIX = fixes.get("narrow_dtype")
patch, propose = FIX.patch, FIX.propose

MESSAGE = "Unable to allocate 14.9 GiB for an array with shape (2000000, 1000) and data type float64"

GATHERS = """\
import numpy as np

features = np.zeros((rows, 128))  # one row for each sample
for i in range(rows):
    features[i] = i / 3
"""
GOLDEN = """\
--- In[1]
+++ In[1] fixed
@@ -1,5 +1,5 @@
 import numpy as np
\x20
-features = np.zeros((rows, 128))  # one row for each sample
+features = np.zeros((rows, 128), dtype=np.float32)  # one row for each sample
 for i in range(rows):
     features[i] = i / 3
"""


def incident(source: str, line: int = 1, **more: Any) -> Incident:
    where = CellLine(number=1, line=line, source_line=source.splitlines()[line - 1])
    known = {"family": Family.NUMPY, "device": "cpu", "requested": 16 << 20, "message": MESSAGE, "cell": where, **more}
    return Incident(is_oom=True, **known)


def patched(source: str, line: int = 1) -> Patch | Refused:
    return patch(live.cells_of(source), live.evidence(), Dose.of(cell=1, line=line))


def test_it_is_offered_and_never_silent() -> None:
    (one,) = propose(incident(GATHERS, 3), live.evidence())  # type: ignore[misc]
    assert (str(one.dose), one.effect, one.saves) == ("cell=1, line=3", Effect.CHANGES_RESULT, 8 << 20)
    assert one.basis == "half of the 16.0 MiB that were asked for in float64"
    assert "7 digits instead of 16" in str(one.caveat)
    assert FIX.effect is Effect.CHANGES_RESULT
    assert FIX.apply is None


def test_golden_diff_and_second_time() -> None:
    made = patched(GATHERS, 3)
    assert isinstance(made, Patch)
    assert made.diff() == GOLDEN
    again = patched(made.edits[0].after, 3)
    assert isinstance(again, Refused)
    assert "makes no float64" in again.reason


def test_half_of_the_memory_and_nearly_the_same_numbers() -> None:
    made = patched(GATHERS, 3)
    assert isinstance(made, Patch)
    taken, arrays = [], []
    for source in (GATHERS, made.edits[0].after):
        space: dict[str, Any] = {"rows": 4096}
        tracemalloc.start()
        exec(source, space)
        taken.append(tracemalloc.get_traced_memory()[1] >> 10)
        tracemalloc.stop()
        arrays.append(space["features"])
    assert taken[0] == pytest.approx(4096, rel=0.05)
    assert taken[1] == pytest.approx(2048, rel=0.05)
    assert not np.array_equal(arrays[0], arrays[1])
    assert np.allclose(arrays[0], arrays[1], rtol=1e-6)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x = np.zeros((4, 2), float)", "x = np.zeros((4, 2), np.float32)"),
        ("x = np.ones(3, dtype=np.float64)", "x = np.ones(3, dtype=np.float32)"),
        ("x = np.full((4, 2), .5, dtype='float64')", "x = np.full((4, 2), .5, dtype='float32')"),
        ("x = numpy.array([[1., 2.]])", "x = numpy.array([[1., 2.]], dtype=numpy.float32)"),
        ("x = y.astype(float)", "x = y.astype(np.float32)"),
        ("x = y.astype('float64') / 255", "x = y.astype('float32') / 255"),
        ("x = np.linspace(0, 1, 9)", "x = np.linspace(0, 1, 9, dtype=np.float32)"),
        ("x = torch.zeros(4, 2, dtype=torch.float64)", "x = torch.zeros(4, 2, dtype=torch.float32)"),
        ("x = torch.tensor(y, dtype=torch.double)", "x = torch.tensor(y, dtype=torch.float32)"),
        ("x = t.double()", "x = t.float()"),
        ("x = t.to(torch.float64)", "x = t.to(torch.float32)"),
        ("def f():\n    return np.empty(3)\nf()", "def f():\n    return np.empty(3, dtype=np.float32)\nf()"),
    ],
)
def test_forms(before: str, after: str) -> None:
    made = patched(before, 2 if before.startswith("def") else 1)
    assert isinstance(made, Patch), made
    assert made.edits[0].after == after
    names = {"np": np, "numpy": np, "torch": torch, "y": np.ones(3), "t": torch.ones(3)}
    exec(after, names)
    assert isinstance(patched(after, 2 if before.startswith("def") else 1), Refused)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("x = np.zeros(3, dtype=np.int64)", "makes no float64"),
        ("x = np.zeros(3, dtype=kind)", "makes no float64"),
        ("x = np.random.rand(3, 3)", "makes no float64"),
        ("x = np.zeros(*shape)", "makes no float64"),
        ("x = a @ b", "makes no float64"),
        ("x = torch.zeros(3)", "makes no float64"),
        ("x, y = np.zeros(3), np.ones(3)", "several arrays"),
        ("for i in range(3): x = np.zeros(i)", "makes no float64"),
    ],
)
def test_patch_refuses(source: str, why: str) -> None:
    refused = patched(source)
    assert isinstance(refused, Refused), refused.diff()
    assert why in refused.reason


def test_refusals() -> None:
    def why(found: Incident) -> str:
        refused = propose(found, live.evidence())
        assert isinstance(refused, Refused)
        return refused.reason

    whole = incident("x = np.zeros(n, dtype=np.int64)", message=MESSAGE.replace("float64", "int64"))
    assert "whether all whole numbers" in why(whole)
    assert "a device ran out" in why(live.INCIDENT)
    assert "nothing shows" in why(incident(GATHERS, 3, message="", family=Family.HOST))
    assert "how much memory" in why(incident(GATHERS, 3, requested=None))
    said = incident("x = torch.zeros(n, dtype=torch.float64)", message="", family=Family.HOST)
    assert not isinstance(propose(said, live.evidence()), Refused)
    assert "nothing shows" in why(replace(said, cell=None))

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import live
import numpy as np
import pytest

from oomdoctor import fixes
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.incident import CellLine, Family, Incident
from oomdoctor.model.unavailable import Refused

pd = pytest.importorskip("pandas")
READS = "import pandas as pd\nframe = pd.read_csv(path, sep=';')\n"
GOLDEN = """\
--- In[1]
+++ In[1] fixed
@@ -1,2 +1,2 @@
 import pandas as pd
-frame = pd.read_csv(path, sep=';')
+frame = pd.read_csv(path, sep=';', dtype={name: "category" for name, texts in pd.read_csv(path, sep=';', \
nrows=10000).select_dtypes(exclude=["number", "bool"]).items() if texts.nunique() < 5000})
"""


def incident(line: str = READS.splitlines()[1], **more: Any) -> Incident:
    where = CellLine(number=1, line=2, source_line=line)
    return Incident(is_oom=True, **{"family": Family.HOST, "device": "cpu", "cell": where, **more})


def patched(fix_id: str, source: str) -> Patch | Refused:
    cells = live.cells_of(source)
    return fixes.get(fix_id).patch(cells, live.evidence(), Dose.of(cell=1, line=len(source.splitlines())))


def measured(source: str, path: Path) -> tuple[int, Any]:
    """The peak and the frame of a cell that reads a file."""
    space: dict[str, Any] = {"path": str(path)}
    tracemalloc.start()
    exec(source, space)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak, space["frame"]


def test_it_is_offered_and_never_silent() -> None:
    fix = fixes.get("category_columns")
    (one,) = fix.propose(incident(requested=1000), live.evidence())  # type: ignore[misc]
    assert (str(one.dose), one.effect, one.saves) == ("cell=1, line=2", Effect.CHANGES_RESULT, 500)
    assert (fix.effect, fix.apply) == (Effect.CHANGES_RESULT, None)
    for line in ("frame = pd.concat(parts)", "frame = pd.read_csv(path, dtype=types)"):
        assert isinstance(fix.propose(incident(line), live.evidence()), Refused)


def test_golden_diff_and_second_time() -> None:
    made = patched("category_columns", READS)
    assert isinstance(made, Patch)
    assert made.diff() == GOLDEN
    assert isinstance(patched("category_columns", made.edits[0].after), Refused)


def test_repeated_texts_are_kept_once_and_all_else_is_as_it_was(tmp_path: Path) -> None:
    made, rows = patched("category_columns", READS), 60_000
    assert isinstance(made, Patch)
    texts = [f"a city with a long name, number {at % 50}" for at in range(rows)]
    before = pd.DataFrame({"city": texts, "unlike": list(map(str, range(rows))), "n": np.arange(rows) / 3})
    before["unlike"] = "row " + before["unlike"]
    before["flag"] = before["n"] > 7
    before.to_csv(tmp_path / "a.csv", sep=";", index=False)
    (most, frame), (least, changed) = (measured(one, tmp_path / "a.csv") for one in (READS, made.edits[0].after))
    assert least < most
    assert changed["city"].dtype == "category"
    assert changed["city"].memory_usage(deep=True) < 0.2 * frame["city"].memory_usage(deep=True)
    assert changed["city"].astype(frame["city"].dtype).equals(frame["city"])
    others = ["unlike", "n", "flag"]
    assert changed[others].equals(frame[others])
    assert (changed[others].dtypes == frame[others].dtypes).all()


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("frame = pd.read_csv(path, dtype=types)", "left to pandas"),
        ("frame = pd.concat(pd.read_csv(path, chunksize=9))", "left to pandas"),
        ("frame = pd.read_parquet(path)", "left to pandas"),
        ("frame = pd.read_csv(open(path))", "open already"),
        ("file = open(path)\nframe = pd.read_csv(file)", "open already"),
        ("frame = pd.read_csv(io.StringIO(text))", "open already"),
    ],
)
def test_what_is_not_written(source: str, why: str) -> None:
    refused = patched("category_columns", source)
    assert isinstance(refused, Refused)
    assert why in refused.reason

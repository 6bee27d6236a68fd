from __future__ import annotations

from pathlib import Path

import live
import numpy as np
import pytest
from test_category_columns import READS, incident, measured, patched

from oomdoctor import fixes
from oomdoctor.model.fix import Effect, Patch
from oomdoctor.model.unavailable import Refused

pd = pytest.importorskip("pandas")
FIX = fixes.get("narrow_columns")


def test_it_is_offered_and_never_silent() -> None:
    (one,) = FIX.propose(incident(requested=1000), live.evidence())  # type: ignore[misc]
    assert (one.effect, one.saves) == (Effect.CHANGES_RESULT, 500)
    assert "7 digits instead of 16" in str(one.caveat)
    assert isinstance(FIX.propose(incident("x = np.ones(3)"), live.evidence()), Refused)


def test_numbers_with_a_point_take_half_and_all_else_is_as_it_was(tmp_path: Path) -> None:
    made, rows = patched("narrow_columns", READS), 20_000
    assert isinstance(made, Patch)
    numbers = {f"x{at}": np.arange(rows) / (at + 3) for at in range(8)}
    pd.DataFrame({**numbers, "n": np.arange(rows), "text": ["a"] * rows}).to_csv(
        tmp_path / "a.csv", sep=";", index=False
    )
    (most, frame), (least, changed) = (measured(one, tmp_path / "a.csv") for one in (READS, made.edits[0].after))
    assert least < most
    for name in numbers:
        assert changed[name].dtype == np.float32
        assert np.allclose(changed[name], frame[name], rtol=1e-6)
    assert changed[["n", "text"]].equals(frame[["n", "text"]])
    assert (changed[["n", "text"]].dtypes == frame[["n", "text"]].dtypes).all()

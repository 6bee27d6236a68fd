"""Programs as their users write them, healed on all ranks: each is left as by a fresh job of the changed script."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import ROOT, Case, changed, job, same


@pytest.mark.parametrize(("name", "size"), [("tutorial", "48MiB"), ("mingpt", "36MiB"), ("accelerated", "48MiB")])
def test_every_rank_is_left_as_by_a_fresh_job(tmp_path: Path, name: str, size: str) -> None:
    source = (ROOT / "tests" / "ranks" / "programs" / f"{name}.py").read_text(encoding="utf-8")
    case = Case(where="nowhere", simulate=size)
    healed = job(tmp_path / "healed", case, 2, source)
    assert healed.status == 0, healed.printed
    assert [one and one["kind"] for one in healed.outcomes] == ["healed"] * 2
    fresh = job(tmp_path / "fresh", case, 2, changed(source, healed.diff), with_oomdoctor=False)
    assert None not in fresh.left
    assert same(healed.left, fresh.left)

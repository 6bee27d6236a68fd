"""The notebook of the gallery, executed: what its story claims, held against what came out."""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "notebooks"))

from executed import execute


def test_an_accumulation_is_named_mended_and_leaves_equal_weights(tmp_path: Path) -> None:
    run = execute("10_jittor", tmp_path, "[without, with_it, bool(same)]")
    without, with_it, same = run.asked
    assert same
    assert with_it < without / 4
    assert run.error("failure") == "HostMemoryPressure"
    assert "1. Jittor accumulates gradients that it has not computed" in run.text("failure")
    assert re.search(r"Jittor \d+ variables are alive", run.text("report"))
    assert "+ jt.sync_all()" in run.text("diff")
    assert "Healed" in run.text("fix")

"""What is told by text; that 16 bits change results is shown with Jittor itself, in ``tests/jittor``."""

from __future__ import annotations

from dataclasses import replace

from jittor_programs import HOST, MEMORY, SETUP, TRAINS, cells, evidence

from oomdoctor import fixes
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.unavailable import Refused

FIX = fixes.get("jittor_amp")


def test_the_level_is_set_before_the_cell_and_said_to_change_results() -> None:
    found = FIX.propose(HOST, evidence(SETUP, TRAINS))
    assert not isinstance(found, Refused)
    assert found[0].effect is Effect.CHANGES_RESULT
    assert "holds for the whole program" in (found[0].caveat or "")
    change = FIX.patch(cells(SETUP, TRAINS), evidence(SETUP, TRAINS), Dose())
    assert isinstance(change, Patch)
    assert change.edits[0].after == f"jt.flags.auto_mixed_precision_level = 5\n\n{TRAINS}"


def test_little_memory_is_not_worth_it() -> None:
    for memory in (replace(MEMORY, pool_used=1 << 20), None):
        assert isinstance(FIX.propose(HOST, evidence(SETUP, TRAINS, memory=memory)), Refused)

"""What is told by text; that the pools give back what they keep is shown with Jittor itself, in ``tests/jittor``."""

from __future__ import annotations

from dataclasses import replace

from jittor_programs import ACCUMULATES, HOST, MEMORY, SETUP, TRAINS, cells, evidence

from oomdoctor import fixes
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.unavailable import Refused

FIX = fixes.get("jittor_release")


def test_what_the_pools_keep_is_given_back_before_the_cell() -> None:
    found = FIX.propose(HOST, evidence(SETUP, TRAINS))
    assert not isinstance(found, Refused)
    assert (found[0].effect, found[0].saves) == (Effect.EXACT, MEMORY.pool_unused)
    change = FIX.patch(cells(SETUP, TRAINS), evidence(SETUP, TRAINS), Dose())
    assert isinstance(change, Patch)
    assert change.edits[0].after == f"jt.gc()\n\n{TRAINS}"
    again = FIX.patch(cells(SETUP, change.edits[0].after), evidence(SETUP, change.edits[0].after), Dose())
    assert again == Refused("the failing cell says `jt.gc()` already")


def test_a_pool_that_keeps_nothing_is_left_alone() -> None:
    for memory in (replace(MEMORY, pool_unused=1 << 20), replace(MEMORY, pool_unused=None), None):
        assert isinstance(FIX.propose(HOST, evidence(SETUP, ACCUMULATES, memory=memory)), Refused)

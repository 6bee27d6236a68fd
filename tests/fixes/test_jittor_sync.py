"""What is told by text; that memory falls and weights stay is shown with Jittor itself, in ``tests/jittor``."""

from __future__ import annotations

from dataclasses import replace

import pytest
from jittor_programs import ACCUMULATES, EVALUATES, HOST, MEMORY, SETUP, TRAINS, cells, evidence

from oomdoctor import fixes
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.unavailable import Refused
from oomdoctor.program import definitions

FIX = fixes.get("jittor_sync")
GOLDEN = """\
--- In[2]
+++ In[2] fixed
@@ -2,4 +2,5 @@
 for xs, ys in batches:
     loss = nn.cross_entropy_loss(model(xs), ys) / len(batches)
     optimizer.backward(loss)  # of all of them
+    jt.sync_all()
 optimizer.step()
"""


def test_an_accumulation_is_computed_after_each_part() -> None:
    found = FIX.propose(HOST, evidence(SETUP, ACCUMULATES))
    assert not isinstance(found, Refused)
    assert (found[0].effect, found[0].saves) == (Effect.EQUIVALENT, MEMORY.graph_bytes)
    change = FIX.patch(cells(SETUP, ACCUMULATES), evidence(SETUP, ACCUMULATES), Dose())
    assert isinstance(change, Patch)
    assert change.diff() == GOLDEN
    again = cells(SETUP, change.edits[0].after)
    assert FIX.patch(again, evidence(SETUP, change.edits[0].after), Dose()) == Refused(
        "no gradients are accumulated over several backward passes without `jt.sync_all()`"
    )


@pytest.mark.parametrize(
    "source",
    [
        TRAINS,
        EVALUATES,
        ACCUMULATES.replace("optimizer.backward(loss)", "loss.backward()"),
        ACCUMULATES.replace("    optimizer.backward(loss)", "    optimizer.backward(loss)\n    optimizer.step()"),
        ACCUMULATES.replace("  # of all of them", "\n    jt.sync_all()"),
    ],
)
def test_what_accumulates_nothing_is_left_alone(source: str) -> None:
    assert isinstance(FIX.propose(HOST, evidence(SETUP, source)), Refused)


def test_a_step_on_some_rounds_alone_is_an_accumulation() -> None:
    source = ACCUMULATES.replace("optimizer.step()", "").replace("  # of all of them", "\n    if last:\n        step()")
    source = source.replace("step()", "optimizer.step()")
    assert not isinstance(FIX.propose(HOST, evidence(SETUP, source)), Refused)


def test_a_program_of_torch_is_none_of_jittors() -> None:
    source = SETUP.replace("import jittor as jt", "import torch").replace("from jittor", "from torch")
    assert not FIX.detect(definitions.read(cells(source, ACCUMULATES)), None)


def test_it_is_refused_where_nothing_waits_and_where_jittor_is_not_used() -> None:
    computed = evidence(SETUP, ACCUMULATES, memory=replace(MEMORY, operators=0))
    assert FIX.propose(HOST, computed) == Refused("no operator of Jittor's graph was alive")
    unused = evidence(SETUP, ACCUMULATES, memory=None)
    assert FIX.propose(HOST, unused) == Refused("the program does not use Jittor")


def test_jittor_is_imported_where_no_cell_knows_it_by_a_name() -> None:
    setup = SETUP.replace("import jittor as jt\n", "").replace("jt.", "")
    change = FIX.patch(cells(setup, ACCUMULATES), evidence(setup, ACCUMULATES), Dose())
    assert isinstance(change, Patch)
    assert change.edits[0].after.startswith("import jittor\n\noptimizer.zero_grad()")
    assert "    jittor.sync_all()\n" in change.edits[0].after

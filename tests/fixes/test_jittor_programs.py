"""Fixes of torch's programs that Jittor's take as well: steps in parts, and evaluation without gradients."""

from __future__ import annotations

import pytest
from jittor_programs import ACCUMULATES, EVALUATES, HOST, MEMORY, SETUP, TRAINS, cells, evidence

from oomdoctor import fixes
from oomdoctor.model.fix import Dose, Patch
from oomdoctor.model.unavailable import Refused

IN_PARTS = """\
for xs, ys in batches:
    batch_loss = 0.0
    # In 2 parts: the gradients of the whole batch, the activations of one part at a time.
    for micro_xs, micro_ys in zip(xs.chunk(2), ys.chunk(2), strict=True):
        loss = nn.cross_entropy_loss(model(micro_xs), micro_ys)
        loss = loss * (len(micro_xs) / len(xs))
        optimizer.backward(loss)
        batch_loss += loss.detach()
        jt.sync_all()
    loss = batch_loss
    optimizer.step()
"""
WITHOUT = """\
model.eval()
right = 0
with jt.no_grad():
    for xs, ys in batches:
        out = model(xs)
        right += (out.argmax(1)[0] == ys).sum().item()
"""


@pytest.mark.parametrize("source", [TRAINS, TRAINS.replace(".step(loss)", ".backward(loss)\n    optimizer.step()")])
def test_a_step_is_taken_in_parts_that_are_computed_one_by_one(source: str) -> None:
    fix, found = fixes.get("micro_batch"), evidence(SETUP, source)
    proposals = fix.propose(HOST, found)
    assert not isinstance(proposals, Refused)
    assert proposals[0].saves == MEMORY.graph_bytes // 2
    change = fix.patch(cells(SETUP, source), found, proposals[0].dose)
    assert isinstance(change, Patch)
    assert [(edit.before, edit.after) for edit in change.edits] == [(source, IN_PARTS)]


def test_the_step_of_a_line_that_has_more_is_left_alone() -> None:
    source = TRAINS.replace("optimizer.step(loss)", "optimizer.step(loss); del loss")
    refused = fixes.get("micro_batch").patch(cells(SETUP, source), evidence(SETUP, source), Dose.of(parts=2))
    assert refused == Refused("line 3 has more than `optimizer.step(loss)`")


def test_evaluation_stands_under_the_no_grad_of_jittor() -> None:
    fix, found = fixes.get("no_grad_eval"), evidence(SETUP, EVALUATES)
    proposals = fix.propose(HOST, found)
    assert not isinstance(proposals, Refused)
    assert "Jittor's graph" in proposals[0].basis
    change = fix.patch(cells(SETUP, EVALUATES), found, proposals[0].dose)
    assert isinstance(change, Patch)
    assert change.edits[0].after == WITHOUT


def test_an_accumulation_is_one_training_loop() -> None:
    (loop,) = evidence(SETUP, ACCUMULATES).code.loops
    assert (loop.loss, loop.order, loop.models) == ("loss", ("forward", "backward"), ("model",))
    (loop,) = evidence(SETUP, TRAINS).code.loops
    assert (loop.order, loop.optimizers) == (("forward", "backward", "step"), ("optimizer",))


def test_a_scheduler_of_torch_that_is_given_a_loss_takes_no_gradient() -> None:
    setup = SETUP.replace("import jittor as jt", "import torch").replace("from jittor", "from torch")
    assert evidence(setup, TRAINS, memory=None).code.loops == ()

"""Fixes that save activations, where an optimizer's step is what ran out of memory."""

from __future__ import annotations

from dataclasses import replace

import live
import pytest

from oomdoctor.fixes import (
    checkpoint_blocks,
    chunked_forward,
    micro_batch,
    smaller_batch,
    smaller_image,
    truncate_sequence,
)
from oomdoctor.fixes._activations import why_not_short, why_not_training
from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import Evidence, Role
from oomdoctor.model.incident import Incident

IN_STEP = replace(live.INCIDENT, framework_frame="torch/optim/adam.py:178 _init_group")


def evidence(activations: int, found: int) -> Evidence:
    base = live.evidence(
        live.model_facts(blocks=("layers",)),
        roles=((Role.ACTIVATION, activations),),
        loops=(live.loop(1, 1),),
    )
    return replace(base, censuses=(replace(base.census, found=found),))


@pytest.mark.parametrize(
    ("incident", "activations", "is_short"),
    [
        (IN_STEP, 4, False),
        (IN_STEP, 0, False),
        (IN_STEP, 10 << 20, True),  # a graph that is kept while the optimizer steps
        (live.INCIDENT, 4, True),
        (replace(live.INCIDENT, framework_frame="torch/nn/modules/linear.py:134 forward"), 0, True),
    ],
)
def test_a_step_of_the_optimizer_is_short_of_its_own_state(
    incident: Incident, activations: int, is_short: bool
) -> None:
    assert (why_not_short(incident, evidence(activations, 100 << 20)) is None) == is_short


@pytest.mark.parametrize("fix", [checkpoint_blocks, chunked_forward])
def test_fixes_ask(fix) -> None:
    refused = fix.propose(IN_STEP, evidence(4, 100 << 20))
    assert isinstance(refused, Refused)
    assert refused.reason == "memory ran out in the optimizer's step, when activations held 4 B of 100 MiB"
    assert not isinstance(fix.propose(live.INCIDENT, evidence(4, 100 << 20)), Refused)


def test_micro_batches_ask_once_the_loop_is_found_fit(monkeypatch) -> None:
    monkeypatch.setattr(micro_batch, "why_not", lambda code, loop: None)
    assert isinstance(micro_batch.propose(IN_STEP, evidence(4, 100 << 20)), Refused)
    assert not isinstance(micro_batch.propose(live.INCIDENT, evidence(4, 100 << 20)), Refused)


@pytest.mark.parametrize("fix", [micro_batch, smaller_batch, smaller_image, truncate_sequence])
def test_a_loop_that_was_not_running_is_not_changed(fix) -> None:
    base = evidence(64 << 20, 100 << 20)
    after = replace(base, code=replace(base.code, loops=(replace(live.loop(2, 3), was_running=False),)))
    refused = fix.propose(live.INCIDENT, after)
    assert isinstance(refused, Refused)
    assert refused.reason == "memory ran out when the training loop of line 3 of cell 2 was not running"


def test_one_loop_of_several_that_was_running_is_enough() -> None:
    base = evidence(64 << 20, 100 << 20)
    loops = (replace(live.loop(2, 3), was_running=False), live.loop(2, 9))
    assert why_not_training(replace(base, code=replace(base.code, loops=loops))) is None
    assert why_not_training(replace(base, code=replace(base.code, loops=()))) is None

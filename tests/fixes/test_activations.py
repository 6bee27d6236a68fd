"""Fixes that save activations, where an optimizer's step is what ran out of memory."""

from __future__ import annotations

from dataclasses import replace

import live
import pytest
from observed import facts
from torch import nn

from oomdoctor import fixes
from oomdoctor.fixes import checkpoint_blocks, micro_batch
from oomdoctor.fixes._preconditions import check_short, check_training
from oomdoctor.fixes._refusals import refusing
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose
from oomdoctor.model.incident import Incident
from oomdoctor.model.memory import Role
from oomdoctor.model.unavailable import Refused

chunked_forward = fixes.get("chunked_forward")
IN_STEP = replace(live.INCIDENT, framework_frame="torch/optim/adam.py:178 _init_group")


def evidence(activations: int, found: int) -> Evidence:
    base = live.evidence(
        live.model_facts(segments=("layers.0", "layers.1")),
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
    assert (refusing(check_short)(incident, evidence(activations, 100 << 20)) is None) == is_short


@pytest.mark.parametrize("fix", [checkpoint_blocks, chunked_forward])
@pytest.mark.parametrize("source", ["x = torch.zeros(20_000_000)", "def build():\n    return np.zeros(9**12)\nbuild()"])
def test_a_request_that_no_model_made_is_none_of_theirs(fix, source) -> None:
    found = live.evidence(live.model_facts(segments=("layers.0", "layers.1")))
    in_cell = replace(live.INCIDENT, framework_frame="/tmp/ipykernel_7/1.py:1 <module>")

    def proposed(source: str, incident: Incident) -> object:
        cells = live.cells_of("model = Net()", source)
        code = replace(found.code, runs_model=facts(cells, {}, [("model", nn.Linear(2, 2))]).runs_model)
        return fix.propose(incident, replace(found, code=code))

    assert proposed(source, in_cell) == Refused("the failing cell calls no model, as far as can be seen")
    assert not isinstance(proposed(f"{source}\nout = model(x)", in_cell), Refused)
    assert not isinstance(proposed("with torch.no_grad():\n    model(x)", in_cell), Refused)
    assert not isinstance(proposed("def run(net):\n    return net(x)\nrun(model)", in_cell), Refused)
    in_library = replace(live.INCIDENT, framework_frame="diffusers/models/attention.py:7 forward")
    assert not isinstance(proposed("image = pipe('a cat')", in_library), Refused)


@pytest.mark.parametrize("fix", [checkpoint_blocks, chunked_forward])
def test_fixes_ask(fix) -> None:
    refused = fix.propose(IN_STEP, evidence(4, 100 << 20))
    assert isinstance(refused, Refused)
    assert refused.reason == "memory ran out in the optimizer's step, when activations held 4 B of 100 MiB"
    assert not isinstance(fix.propose(live.INCIDENT, evidence(4, 100 << 20)), Refused)


def test_micro_batches_ask_once_the_loop_is_found_fit(monkeypatch) -> None:
    monkeypatch.setattr(micro_batch, "why_no_parts", lambda code, loop: None)
    assert isinstance(micro_batch.propose(IN_STEP, evidence(4, 100 << 20)), Refused)
    assert not isinstance(micro_batch.propose(live.INCIDENT, evidence(4, 100 << 20)), Refused)


@pytest.mark.parametrize("fix", ["autocast", "micro_batch", "smaller_batch", "smaller_image", "truncate_sequence"])
def test_a_loop_that_was_not_running_is_not_changed(fix) -> None:
    base = evidence(64 << 20, 100 << 20)
    after = replace(base, code=replace(base.code, loops=(replace(live.loop(2, 3), was_running=False),)))
    refused = fixes.get(fix).propose(live.INCIDENT, after)
    assert isinstance(refused, Refused)
    assert refused.reason == "the failure was outside the training loop (line 3 of cell 2)"


def test_one_loop_of_several_that_was_running_is_enough() -> None:
    base = evidence(64 << 20, 100 << 20)
    loops = (replace(live.loop(2, 3), was_running=False), live.loop(2, 9))
    check_training(replace(base, code=replace(base.code, loops=loops)))
    check_training(replace(base, code=replace(base.code, loops=())))


EPOCH = """\
for x, y in loader:
    out = model(x)
    loss = criterion(out, y)
    loss.backward()
    optimizer.step()
scores = model(x_val)
"""


def test_parts_are_not_written_into_a_loop_that_was_not_running() -> None:
    base = evidence(64 << 20, 100 << 20)
    after = replace(base, code=replace(base.code, loops=(replace(live.loop(1, 1), was_running=False),)))
    assert not isinstance(chunked_forward.propose(live.INCIDENT, after), Refused)
    refused = chunked_forward.patch(live.cells_of(EPOCH), after, Dose.of(chunks=2))
    assert isinstance(refused, Refused)
    assert refused.reason == "the failure was outside the training loop (line 1 of cell 1)"


IN_DATA = replace(live.INCIDENT, framework_frame=None)
IN_LAYER = replace(live.INCIDENT, framework_frame="torch/nn/modules/linear.py:134 forward")


@pytest.mark.parametrize("fix", [checkpoint_blocks, chunked_forward])
@pytest.mark.parametrize(
    ("incident", "was_running", "is_refused"),
    [(IN_DATA, False, True), (IN_DATA, True, False), (IN_LAYER, False, False)],
)
def test_a_request_is_taken_for_activations_only_where_a_model_may_have_made_it(
    fix, incident: Incident, was_running: bool, is_refused: bool
) -> None:
    base = evidence(0, 100 << 20)
    found = replace(base, code=replace(base.code, loops=(replace(live.loop(1, 1), was_running=was_running),)))
    assert isinstance(fix.propose(incident, found), Refused) == is_refused


def test_without_a_loop_a_request_outside_of_a_layer_is_no_activation() -> None:
    base = evidence(0, 100 << 20)
    found = replace(base, code=replace(base.code, loops=()))
    assert isinstance(chunked_forward.propose(IN_DATA, found), Refused)
    assert not isinstance(chunked_forward.propose(IN_LAYER, found), Refused)

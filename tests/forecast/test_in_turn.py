"""Two fixes that write in the same place: one is written into the text that the other has left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from oomdoctor import fixes, pipeline
from oomdoctor.evidence.moment import collect
from oomdoctor.forecast import in_turn
from oomdoctor.forecast.in_turn import patched_in_turn
from oomdoctor.forecast.ladder import attempt_with_all
from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Edit, Patch
from oomdoctor.model.session import Cell, Cells, Session

SETUP = """\
import torch
import torch.nn.functional as F
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(12, 24), torch.nn.Sequential(*[torch.nn.Linear(24, 24) for _ in range(3)]), torch.nn.Linear(24, 5)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = [(torch.randn(16, 12), torch.randint(0, 5, (16,))) for _ in range(3)]
losses = []
"""
TRAIN = """\
for x, y in data:
    optimizer.zero_grad()
    logits = model(x)
    loss = F.cross_entropy(logits, y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""
KEEPS = """\
for x, y in data:
    optimizer.zero_grad(set_to_none=False)
    logits = model(x)
    loss = F.cross_entropy(logits, y)
    losses.append(loss)
    loss.backward()
    optimizer.step()
"""
AUTOCAST, MICRO = ("autocast", Dose.of(dtype="bfloat16")), ("micro_batch", Dose.of(parts=4))
LOSS = ("chunked_loss", Dose.of(chunks=4))


def begun(train: str = TRAIN) -> tuple[Session, Evidence, dict[str, Any]]:
    namespace: dict[str, Any] = {}
    exec(SETUP, namespace)
    cells = Cells(history=(Cell(number=1, source=SETUP), Cell(number=2, source=train)))
    session = pipeline.open_session(namespace, cells, pipeline.accelerator_of("cpu"))
    found = collect(session, None, {}, detectors=fixes.detectors())
    loops = tuple(replace(loop, in_failing_run=True) for loop in found.code.loops)
    assert loops
    return session, replace(found, code=replace(found.code, loops=loops)), namespace


def both(*parts: tuple[str, Dose], train: str = TRAIN) -> Patch | Refused:
    session, evidence, _ = begun(train)
    return attempt_with_all([(fixes.get(name), dose) for name, dose in parts], session, evidence)[0]


def trained(source: str) -> tuple[list[float], torch.Tensor]:
    """Return the losses, and the weights after the last step."""
    _, _, namespace = begun()
    exec(source, namespace)
    weights = torch.cat([one.detach().flatten() for one in namespace["model"].parameters()])
    return namespace["losses"], weights


@pytest.mark.parametrize("parts", [(MICRO, AUTOCAST), (AUTOCAST, MICRO)], ids=["one first", "the other first"])
def test_parts_of_a_batch_are_taken_under_autocast(parts: tuple[tuple[str, Dose], ...]) -> None:
    patch = both(*parts)
    assert isinstance(patch, Patch)
    (edit,) = patch.edits
    assert edit.before == TRAIN, "the diff is against the text of the user"
    lines = [line.strip() for line in edit.after.splitlines()]
    assert lines.index("for micro_x, micro_y in zip(x.chunk(4), y.chunk(4), strict=True):") < lines.index(
        'with torch.autocast("cpu", dtype=torch.bfloat16):'
    )
    alone = both(AUTOCAST)
    assert isinstance(alone, Patch)
    (expected, weights), (losses, others) = trained(alone.edits[0].after), trained(edit.after)
    assert losses == pytest.approx(expected, rel=2e-2)
    assert torch.nn.functional.cosine_similarity(weights, others, dim=0) > 0.999
    assert losses != trained(TRAIN)[0], "it computes in 16 bits"


def test_what_is_known_of_lines_moves_with_them() -> None:
    autocast = fixes.get("autocast")

    def below_an_import(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
        patch = autocast.patch(cells, evidence, dose)
        assert isinstance(patch, Patch)
        (edit,) = patch.edits
        after = f"import math\n{edit.after}"
        return Patch(edits=(replace(edit, after=after, replay=after),))

    session, evidence, _ = begun()
    parts = [(replace(autocast, patch=below_an_import), AUTOCAST[1]), (fixes.get("micro_batch"), MICRO[1])]
    patch = patched_in_turn(parts, session.cells, evidence)
    assert patch is not None
    assert patch.edits[0].after.startswith("import math\nfor x, y in data:\n")
    assert "micro_x" in patch.edits[0].after


def test_a_loop_whose_first_line_was_changed_is_left_alone() -> None:
    autocast = fixes.get("autocast")

    def of_a_list(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
        text = TRAIN.replace("in data", "in list(data)")
        if cells.failing.source != TRAIN:
            return Refused("this is written first")
        return Patch(edits=(Edit(cell=2, before=TRAIN, after=text, replay=text),))

    session, evidence, _ = begun()
    parts = [(replace(autocast, patch=of_a_list), AUTOCAST[1]), (fixes.get("micro_batch"), MICRO[1])]
    with mock.patch.object(in_turn, "_loop", lambda loop, *_: loop):
        assert patched_in_turn(parts, session.cells, evidence) is not None
    assert patched_in_turn(parts, session.cells, evidence) is None


@pytest.mark.parametrize("other", [("set_to_none", Dose()), ("detach_history", Dose())])
@pytest.mark.parametrize("first", [MICRO, LOSS])
def test_a_text_that_both_have_written_keeps_the_results(first: tuple[str, Dose], other: tuple[str, Dose]) -> None:
    session, evidence, _ = begun(KEEPS)
    patch = patched_in_turn([(fixes.get(name), dose) for name, dose in (first, other)], session.cells, evidence)
    assert patch is not None
    (expected, weights), (losses, others) = trained(KEEPS), trained(patch.edits[-1].after)
    assert [torch.as_tensor(loss).item() for loss in losses] == pytest.approx(
        [loss.item() for loss in expected], rel=1e-5
    )
    assert torch.allclose(weights, others, rtol=1e-4, atol=1e-6)


def test_two_that_go_in_neither_order_are_refused_as_before() -> None:
    assert both(MICRO, (MICRO[0], Dose.of(parts=2))) == Refused("both change the same place of the source")

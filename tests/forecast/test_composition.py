"""Two fixes in one cell: one is written into the text that the other has left."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from oomdoctor import fixes, pipeline
from oomdoctor.evidence.collect import collect
from oomdoctor.forecast import attempts
from oomdoctor.forecast.attempts import attempt_with_all, composed
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Edit, Fix, Patch
from oomdoctor.model.session import Attempt, Cell, Cells, Session
from oomdoctor.model.unavailable import Refused

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
    patch = composed(parts, session.cells, evidence)
    assert isinstance(patch, Patch)
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
    with mock.patch.object(attempts, "_loop", lambda loop, *_: loop):
        assert isinstance(composed(parts, session.cells, evidence), Patch)
    assert isinstance(composed(parts, session.cells, evidence), Refused)


@pytest.mark.parametrize("other", [("set_to_none", Dose()), ("detach_history", Dose())])
@pytest.mark.parametrize("first", [MICRO, LOSS])
def test_a_text_that_both_have_written_keeps_the_results(first: tuple[str, Dose], other: tuple[str, Dose]) -> None:
    session, evidence, _ = begun(KEEPS)
    patch = composed([(fixes.get(name), dose) for name, dose in (first, other)], session.cells, evidence)
    assert isinstance(patch, Patch)
    (expected, weights), (losses, others) = trained(KEEPS), trained(patch.edits[-1].after)
    assert [torch.as_tensor(loss).item() for loss in losses] == pytest.approx(
        [loss.item() for loss in expected], rel=1e-5
    )
    assert torch.allclose(weights, others, rtol=1e-4, atol=1e-6)


def test_two_that_go_in_neither_order_are_refused_as_before() -> None:
    assert both(MICRO, (MICRO[0], Dose.of(parts=2))) == Refused("both change the same place of the source")


# Who writes what ----------------------------------------------------------------------------------------------------


def writes(fix: str, **texts: str) -> Fix:
    """Return a fix that puts one text in another's place in the cells: ``writes("a", old="x", new="y")``."""

    def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
        edits = []
        for cell in cells.history:
            after = cell.source.replace(texts["old"], texts["new"])
            replay = texts.get("replay", after) if cell is not cells.failing else after
            if after != cell.source:
                edits.append(Edit(cell=cell.number, before=cell.source, after=after, replay=replay))
        return Patch(edits=tuple(edits)) if edits else Refused("there is nothing to change")

    return replace(fixes.get(fix), patch=patch, guard=None, apply=None)


def run_with(*made: Fix) -> tuple[Patch | Refused, Attempt | Refused]:
    session, evidence, _ = begun()
    return attempt_with_all([(fix, Dose()) for fix in made], session, evidence)


def test_changes_of_several_cells_are_all_made_the_failing_one_last() -> None:
    patch, attempt = run_with(
        writes("autocast", old="lr=1e-2", new="lr=1e-3"), writes("micro_batch", old="logits", new="outputs")
    )
    assert isinstance(patch, Patch)
    assert isinstance(attempt, Attempt)
    assert [edit.cell for edit in patch.edits] == [1, 2]
    assert attempt.replays == (SETUP.replace("lr=1e-2", "lr=1e-3"),)
    assert attempt.source == TRAIN.replace("logits", "outputs")


def test_parts_of_an_earlier_cell_that_each_redefines_are_both_run() -> None:
    patch, attempt = run_with(
        writes("autocast", old="lr=1e-2", new="lr=1e-3", replay="def f(): ..."),
        writes("micro_batch", old="AdamW", new="SGD", replay="def g(): ..."),
    )
    assert isinstance(patch, Patch)
    assert isinstance(attempt, Attempt)
    assert attempt.replays == ("def f(): ...\n\n\ndef g(): ...",)
    assert attempt.cells[0].source == SETUP.replace("lr=1e-2", "lr=1e-3").replace("AdamW", "SGD")


def test_the_way_to_run_both_has_the_guards_of_both() -> None:
    guards = (lambda session, dose: nullcontext(1), lambda session, dose: nullcontext(2))
    first, second = writes("autocast", old="logits", new="outputs"), writes("micro_batch", old="loss =", new="loss=")
    _, attempt = run_with(replace(first, guard=guards[0]), replace(second, guard=guards[1]))
    assert isinstance(attempt, Attempt)
    assert [made.func for made in attempt.live] == list(guards)


def test_one_of_them_may_change_the_live_objects_and_not_both() -> None:
    def live(session: Session, dose: Dose) -> Any:
        return nullcontext()

    unwritten = replace(writes("autocast", old="nowhere", new=""), apply=live)
    patch, attempt = run_with(unwritten, writes("micro_batch", old="logits", new="outputs"))
    assert patch == Refused("there is nothing to change")
    assert isinstance(attempt, Attempt)
    assert (attempt.source, [made.func for made in attempt.live]) == (TRAIN.replace("logits", "outputs"), [live])
    assert run_with(unwritten, unwritten)[1] == Refused("both change the live objects")

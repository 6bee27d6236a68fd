"""A cell of several phases that each need more than there is: where memory runs out again, another change is made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell
from state_shell import besides, cleared, differing, known, run, seed, started

from oomdoctor.model.case import OutcomeKind, State
from oomdoctor.model.unavailable import Refused
from oomdoctor.objects.leaves import state_digests

SETUP = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(24000, 16), torch.randint(0, 4, (24000,))
"""
FUNCTIONS = """
def train(x, y):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
def score(x, y):
    return (model(x).argmax(1) == y).float().mean().item()
"""
CELL = """
for at in (0, 12000):
    train(x[at : at + 12000], y[at : at + 12000])
right = score(x[:12000], y[:12000])
"""


@pytest.fixture(scope="module")
def phases() -> Iterator[InteractiveShell]:
    with started("micro_batch", "no_grad_eval", "smaller_batch") as shell:
        yield shell


@pytest.mark.parametrize("auto", ["exact", "off"])
def test_each_phase_gets_a_change_of_its_own(phases: InteractiveShell, auto: str) -> None:
    with cleared(phases) as shell:
        for cell in (SETUP, FUNCTIONS):
            assert run(shell, cell)[0].success
        run(shell, f"%oomdoctor simulate {besides('40MiB')}\n%oomdoctor auto {auto}")
        run(shell, CELL)
        if auto == "off":
            run(shell, "%oomdoctor fix 1")
        case = known()
        assert (case.outcome.kind, case.outcome.state) == (OutcomeKind.HEALED, State.CLEAN), case.outcome
        (made,) = (one for one in case.plan.candidates if one.label in case.outcome.fixes)
        assert {fix for fix, _ in made.made_of} == {"micro_batch", "no_grad_eval"}
        assert not isinstance(made.patch, Refused)
        left = state_digests(shell.user_ns)
        functions = next(edit.after for edit in made.patch.edits if edit.before.strip() == FUNCTIONS.strip())
        cell = next((edit.after for edit in made.patch.edits if edit.before.strip() == CELL.strip()), CELL)
        run(shell, "%oomdoctor simulate off")
        shell.reset(new_session=True)
        seed()
        for text in (SETUP, functions, cell):
            assert run(shell, text)[0].success
        assert differing(left, state_digests(shell.user_ns)) == []


def test_a_call_that_an_attempt_has_not_come_to_either_leaves_room_for_the_next(
    phases: InteractiveShell, tmp_path: Path
) -> None:
    log = tmp_path / "log.txt"
    with cleared(phases) as shell:
        for cell in (SETUP, FUNCTIONS):
            assert run(shell, cell)[0].success
        run(shell, f"%oomdoctor simulate {besides('40MiB')}\n%oomdoctor auto exact")
        run(shell, f"{CELL}with open({str(log)!r}, 'a') as file:\n    file.write('done')\n")
        outcome = known().outcome
        assert (outcome.kind, outcome.attempts > 1, outcome.state) == (OutcomeKind.HEALED, True, State.CLEAN), outcome
        assert log.read_text() == "done"
        run(shell, "%oomdoctor simulate off")

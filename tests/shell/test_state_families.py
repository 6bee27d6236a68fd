"""After an OOM and a retry everything is as in a fresh process that ran the fixed cells, or the retry was refused.

Families x ways to train x places to fail, in IPython's own shell. What is compared: parameters, gradients, buffers, the
state of optimizers, schedulers, scalers and averages, containers, counters of objects, and every random stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from covering import each_value
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from state_programs import POINTS, PROGRAMS, REFUSED, Planted, cells_of
from state_shell import differing, run, seed, started

from oomdoctor import fixes, pipeline
from oomdoctor.evidence.host import HostAccelerator
from oomdoctor.model.case import Case, OutcomeKind, State
from oomdoctor.model.session import Cell, Cells
from oomdoctor.model.unavailable import Refused
from oomdoctor.objects.leaves import state_digests


@pytest.fixture(scope="module")
def shell() -> Iterator[InteractiveShell]:
    with started("micro_batch", "checkpoint_blocks", "chunked_forward", "chunked_inference", "no_grad_eval") as made:
        yield made


def fail(shell: InteractiveShell, cells: tuple[str, ...], planted: Planted) -> tuple[Any, Case, dict[str, str], str]:
    """Run cells until the last one fails; return its result, the case, the digests before it and what was shown."""
    shell.reset(new_session=True)
    seed()
    for cell in cells[:-1]:
        assert run(shell, cell)[0].success
    before = state_digests(shell.user_ns)
    with planted:
        result, shown = run(shell, cells[-1])
    assert planted.fired, "it did not get that far"
    case = pipeline.last_case()
    assert case is not None
    return result, case, before, shown.stdout + shown.stderr


def fresh(cells: tuple[str, ...], case: Case) -> dict[str, str]:
    """Return the digests of the program with the fix in place from the first."""
    made = next(one for one in case.plan.candidates if one.label in case.outcome.fixes)
    sources = list(cells)
    if not isinstance(made.patch, Refused):
        for edit in made.patch.edits:
            sources[edit.cell - 1] = edit.after
    namespace: dict[str, Any] = {"__name__": "__main__"}
    seed()
    with capture_output(), ExitStack() as live:
        for source in sources[:-1]:
            exec(source, namespace)
        if isinstance(made.patch, Refused):
            history = tuple(Cell(number=at, source=text) for at, text in enumerate(cells, 1))
            session = pipeline.open_session(namespace, Cells(history=history), HostAccelerator())
            apply = fixes.get(made.fix).apply
            assert apply is not None
            live.enter_context(apply(session, made.dose))
        exec(sources[-1], namespace)
    try:
        return state_digests(namespace)
    finally:
        namespace.clear()


@pytest.mark.parametrize(("family", "setting", "point"), each_value(PROGRAMS, POINTS))
def test_a_retry_leaves_what_a_fresh_process_would(
    shell: InteractiveShell, family: str, setting: str, point: str
) -> None:
    cells = cells_of(family, setting)
    result, case, before, shown = fail(shell, cells, Planted(point, steps=2 if family == "gan" else 1))
    outcome = case.outcome
    assert "could not finish" not in shown
    if outcome.kind is OutcomeKind.HEALED:
        assert result.success
        assert outcome.state is State.CLEAN, outcome.why
        assert differing(state_digests(shell.user_ns), fresh(cells, case)) == []
        return
    assert isinstance(result.error_in_exec, RuntimeError)
    if outcome.kind is OutcomeKind.OFFERED:
        assert setting == "average", "no fix was admitted"
        return
    assert outcome.kind is OutcomeKind.REFUSED
    expected = REFUSED.get((family, None)) or REFUSED.get((family, point))
    assert expected is not None, outcome.why
    assert expected in outcome.why
    if outcome.attempts:
        assert outcome.state is State.RESTORED
        assert differing(state_digests(shell.user_ns), before) == []


def test_the_digests_tell_states_apart(shell: InteractiveShell) -> None:
    cells = cells_of("mlp", "average")
    *_, case, before, _ = fail(shell, cells, Planted("third iteration"))
    assert case.outcome.kind is OutcomeKind.HEALED
    expected = fresh(cells, case)
    moved = {name for name in expected if expected[name] != before.get(name)}
    assert moved >= {"model", "optimizer", "losses", "progress", "metrics", "replay", "numbers", "average", "ema"}
    for change in ("model.layers[1].bias.data[0] += 1e-7", "progress.steps += 1", "torch.rand(1)", "replay.pop()"):
        exec(change, shell.user_ns)
        found = differing(state_digests(shell.user_ns), expected)
        assert found, change
        expected = state_digests(shell.user_ns)

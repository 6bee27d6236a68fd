"""A fault in each step around a retry, of each kind: the state is known, the user's failure is shown, and on it goes.

Steps before the retry leave the state as the failed cell left it, as without oomdoctor; from the first restore on it is
that of the cell's start; once the cell is healed it stays healed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

import pytest
import torch
from covering import each_value
from IPython.core.interactiveshell import InteractiveShell
from state_programs import NO_ROOM, Planted, cells_of
from state_shell import differing, run, seed, started

from oomdoctor import pipeline
from oomdoctor.model.case import OutcomeKind, State
from oomdoctor.objects.leaves import state_digests

ERRORS: Final[dict[str, Callable[[], BaseException]]] = {
    "OOM": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "exception": lambda: ValueError("planted"),
    "interrupt": lambda: KeyboardInterrupt("planted"),
    "exit": lambda: SystemExit("planted"),
}
BEFORE: Final = {
    "evidence": "oomdoctor.pipeline.observe",
    "release": "oomdoctor.shell.doctor.release",
    "diagnosis": "oomdoctor.pipeline.diagnose",
    "forecast": "oomdoctor.pipeline.plan",
    "choice": "oomdoctor.pipeline.admitted",
}
DURING: Final = {
    "losses": "oomdoctor.retry.snapshot.Snapshot.losses",
    "restore": "oomdoctor.retry.snapshot.Snapshot.restore",
    "restore, half done": "oomdoctor.retry.tensor_copies._restore",
    "restore of the last": "oomdoctor.objects.rng.RandomState.restore",
    "cache": "oomdoctor.evidence.host.HostAccelerator.empty_cache",
    "apply": "oomdoctor.retry.transaction.Transaction.armed",
    "run": "oomdoctor.shell.extension.Extension.run_source",
    "verify": "oomdoctor.retry.heal._peak",
    "commit": "oomdoctor.pipeline.healing.with_made",
}
AFTER: Final = {"display": "oomdoctor.views.notice_bundle"}
CELLS: Final = cells_of("mlp", "AdamW")


@pytest.fixture(scope="module")
def shell() -> Iterator[InteractiveShell]:
    with started("micro_batch", "chunked_forward") as made:
        yield made


@contextmanager
def once(target: str, error: BaseException) -> Iterator[list[str]]:
    """Have the first call of ``target`` fail; yields a list that is filled when it did."""
    owner_path, _, name = target.rpartition(".")
    owner = pytest.importorskip(owner_path) if owner_path.split(".")[-1][0].islower() else _class(owner_path)
    kept, fired = getattr(owner, name), []

    def broken(*args: Any, **kwargs: Any) -> Any:
        if not fired:
            fired.append(target)
            raise error
        return kept(*args, **kwargs)

    with mock.patch.object(owner, name, broken):
        yield fired


def _class(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(pytest.importorskip(module), name)


def fail(shell: InteractiveShell, target: str, error: BaseException) -> tuple[Any, dict[str, str], str]:
    """Fail in the third iteration with a fault planted; return result, the digests of before, and what was shown."""
    shell.reset(new_session=True)
    seed()
    for cell in CELLS[:-1]:
        assert run(shell, cell)[0].success
    before = state_digests(shell.user_ns)
    with ExitStack() as stack:
        planted = stack.enter_context(Planted("third iteration"))
        fired = stack.enter_context(once(target, error))
        result, shown = run(shell, CELLS[-1])
    assert planted.fired
    assert fired, "the fault was not reached"
    return result, before, shown.stdout + shown.stderr


def goes_on(shell: InteractiveShell, kind: str) -> None:
    """Assert that the extension works for the next cells, and holds nothing back."""
    result, shown = run(shell, "1 / 0")
    assert isinstance(result.error_in_exec, ZeroDivisionError)
    assert "ZeroDivisionError" in shown.stdout
    if kind != "interrupt":  # the dearest
        return
    shell.reset(new_session=True)
    seed()
    for cell in CELLS[:-1]:
        assert run(shell, cell)[0].success
    with Planted("first backward"):
        assert run(shell, CELLS[-1])[0].success
    case = pipeline.last_case()
    assert case is not None
    assert case.outcome.kind is OutcomeKind.HEALED


def shows_failure(shown: str) -> bool:
    return len(re.findall(r"RuntimeError.*enforce fail", shown)) == 1


@pytest.mark.parametrize(("step", "kind"), each_value(BEFORE, ERRORS))
def test_before_the_retry_begins(shell: InteractiveShell, step: str, kind: str) -> None:
    result, before, shown = fail(shell, BEFORE[step], ERRORS[kind]())
    assert result.error_in_exec is not None or result.success, "healed in spite of it, or the failure stands"
    if not result.success:
        assert shows_failure(shown), shown
        assert NO_ROOM in str(result.error_in_exec) or kind in ("interrupt", "exit")
        assert shell.user_ns["progress"].steps == 2, "as the failed cell left it"
    assert differing(state_digests(shell.user_ns), before) != []
    goes_on(shell, kind)


@pytest.mark.parametrize(("step", "kind"), each_value(DURING, ERRORS))
def test_while_the_retry_goes_on(shell: InteractiveShell, step: str, kind: str) -> None:
    result, before, shown = fail(shell, DURING[step], ERRORS[kind]())
    if result.success:  # the state was brought back by a further attempt, of another change
        case = pipeline.last_case()
        assert case is not None
        assert (case.outcome.kind, case.outcome.state, case.outcome.attempts) == (OutcomeKind.HEALED, State.CLEAN, 2)
        assert shell.user_ns["progress"].steps == 5
        goes_on(shell, kind)
        return
    assert differing(state_digests(shell.user_ns), before) == []
    assert shows_failure(shown) or "planted" in shown, shown
    goes_on(shell, kind)


@pytest.mark.parametrize("kind", ["OOM", "exception"])
def test_when_a_copy_is_made_in_the_cell_itself(shell: InteractiveShell, kind: str) -> None:
    result, _, shown = fail(shell, "oomdoctor.retry.snapshot.Snapshot.before_step", ERRORS[kind]())
    assert NO_ROOM in str(result.error_in_exec)
    assert shows_failure(shown)
    case = pipeline.last_case()
    assert case is not None
    assert (case.outcome.kind, case.outcome.attempts) == (OutcomeKind.REFUSED, 0)
    assert "state could not be copied before it changed" in case.outcome.why
    assert shell.user_ns["progress"].steps == 2, "as the failed cell left it"


@pytest.mark.parametrize("kind", ERRORS)
def test_after_the_cell_is_healed(shell: InteractiveShell, kind: str) -> None:
    result, _, shown = fail(shell, AFTER["display"], ERRORS[kind]())
    assert shell.user_ns["progress"].steps == 5
    assert result.success or kind in ("interrupt", "exit")
    assert "planted" in shown or kind == "OOM"
    goes_on(shell, kind)


@pytest.mark.parametrize("kind", ERRORS)
def test_when_the_snapshot_is_taken(shell: InteractiveShell, kind: str) -> None:
    shell.reset(new_session=True)
    with once("oomdoctor.retry.snapshot.NamespaceState", ERRORS[kind]()) as fired:
        result, _ = run(shell, "kept = 5")
    assert fired
    assert result.success or kind in ("interrupt", "exit"), "ours does not stop the cell"
    assert ("kept" in shell.user_ns) is result.success
    goes_on(shell, kind)


@pytest.mark.parametrize("kind", [kind for kind in ERRORS if kind != "exit"])
def test_the_users_own_error_in_the_retry_is_the_one_that_is_shown(shell: InteractiveShell, kind: str) -> None:
    shell.reset(new_session=True)
    seed()
    for cell in CELLS[:-1]:
        assert run(shell, cell)[0].success
    shell.user_ns["mine"] = ERRORS[kind]()
    shell.user_ns["progress"].limit = 5
    before = state_digests(shell.user_ns)
    with Planted("third iteration"):
        result, shown = run(shell, CELLS[-1] + "raise mine\n")
    assert (result.error_in_exec is shell.user_ns["mine"]) is (kind != "OOM"), "another OOM is not what the cell shows"
    assert type(result.error_in_exec).__name__ in shown.stdout
    assert differing(state_digests(shell.user_ns), before) == []
    goes_on(shell, kind)

from __future__ import annotations

import gc
import sys

import live
import pytest
from IPython.core.interactiveshell import InteractiveShell

from oomdoctor.fixes import get, stale_references
from oomdoctor.model.fix import Dose, Effect
from oomdoctor.model.memory import Role
from oomdoctor.model.session import Cell, Cells, Session
from oomdoctor.model.unavailable import Refused

FIX = get("release_traceback")
patch, propose = FIX.patch, FIX.propose

EARLIER = """\
import torch
def work():
    held = torch.ones(1000)
    refs.append(__import__("weakref").ref(held))
    raise ValueError("an earlier failure")
work()
"""


@pytest.fixture
def shell():
    saved = {name: getattr(sys, name) for name in stale_references._LAST_FAILURE if hasattr(sys, name)}
    InteractiveShell.clear_instance()
    made = InteractiveShell.instance()
    made.user_ns["refs"] = []
    yield made
    made.reset(new_session=False)
    InteractiveShell.clear_instance()
    for name in stale_references._LAST_FAILURE:
        if hasattr(sys, name):
            delattr(sys, name)
    for name, value in saved.items():
        setattr(sys, name, value)


def _session(shell, number: int) -> Session:
    return Session(
        namespace=shell.user_ns,
        cells=Cells(history=(Cell(number=number, source="model(x)"),)),
        accelerator=None,  # type: ignore[arg-type]
        shell=shell,
    )


def _alive(shell) -> list[bool]:
    gc.collect()
    return [ref() is not None for ref in shell.user_ns["refs"]]


def test_lets_go_of_an_earlier_failure_in_a_real_shell(shell, capsys) -> None:
    shell.run_cell(EARLIER, store_history=True)
    assert _alive(shell) == [True]
    with FIX.apply(_session(shell, shell.execution_count), Dose()):
        assert _alive(shell) == [False]
    assert not hasattr(sys, "last_value")
    assert str(shell.last_execution_result.error_in_exec) == "an earlier failure"
    assert not shell.last_execution_result.success
    shell.run_line_magic("tb", "")
    assert "No traceback available to show." in capsys.readouterr().err


def test_a_holder_left_out_would_keep_it(shell, monkeypatch) -> None:
    shell.run_cell(EARLIER, store_history=True)
    monkeypatch.setattr(stale_references, "_forget", lambda session, exc: None)
    with FIX.apply(_session(shell, shell.execution_count), Dose()):
        assert _alive(shell) == [True]


def test_the_failure_at_hand_is_left_alone(shell) -> None:
    shell.run_cell(EARLIER, store_history=True)
    failing, value = shell.execution_count - 1, sys.last_value
    with FIX.apply(_session(shell, failing), Dose()):
        assert _alive(shell) == [True]
    assert sys.last_value is value
    assert value.__traceback__ is not None
    assert shell.InteractiveTB.tb is not None


def test_an_exception_that_is_being_handled_is_left_alone(shell) -> None:
    shell.run_cell(EARLIER, store_history=True)
    value = sys.last_value
    try:
        raise MemoryError from value
    except MemoryError:
        with FIX.apply(_session(shell, 999), Dose()):
            assert sys.last_value is value
            assert value.__traceback__ is not None


def test_an_exception_that_the_user_keeps_is_the_users(shell) -> None:
    shell.run_cell(EARLIER, store_history=True)
    shell.user_ns["kept"] = kept = shell.last_execution_result.error_in_exec
    with FIX.apply(_session(shell, shell.execution_count), Dose()):
        assert kept.__traceback__ is not None
    assert not hasattr(sys, "last_value")


def test_causes_and_groups_are_let_go_of_too(shell) -> None:
    shell.run_cell(
        EARLIER.replace("work()\n", "")
        + "work = work\ntry:\n    work()\nexcept ValueError as first:\n"
        + "    raise ExceptionGroup('both', [first, KeyError(1)]) from first\n",
        store_history=True,
    )
    assert _alive(shell) == [True]
    with FIX.apply(_session(shell, shell.execution_count), Dose()):
        assert _alive(shell) == [False]


def test_works_without_a_shell_and_when_the_body_raises() -> None:
    sys.last_value = earlier = _raised()
    try:
        with pytest.raises(KeyError), FIX.apply(live.session(), Dose()):
            raise KeyError
        assert earlier.__traceback__ is None
    finally:
        vars(sys).pop("last_value", None)


def _raised() -> BaseException:
    try:
        raise ValueError
    except ValueError as error:
        return error


def test_proposes_what_the_census_found() -> None:
    found = propose(live.INCIDENT, live.evidence(roles=((Role.TRACEBACK, 5 << 20),)))
    assert not isinstance(found, Refused)
    assert (found[0].saves, found[0].slowdown, found[0].effect) == (5 << 20, 1.0, Effect.EXACT)
    assert "5.00 MiB" in found[0].basis
    assert isinstance(propose(live.INCIDENT, live.evidence()), Refused)


def test_there_is_nothing_to_change_in_the_source() -> None:
    found = patch(live.cells_of("model(x)"), live.evidence(), Dose())
    assert isinstance(found, Refused)
    assert "nothing in the code" in found.reason

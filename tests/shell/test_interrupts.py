"""Interrupts while state is put back: all of it is back before they arrive, however many there are."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

import pytest
from IPython.core.interactiveshell import InteractiveShell
from state_programs import Planted, cells_of
from state_shell import differing, run, seed, started
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from oomdoctor import pipeline
from oomdoctor.model.case import OutcomeKind
from oomdoctor.retry.digest import state_digests
from oomdoctor.retry.interrupts import held_back
from oomdoctor.retry.reach import Reach
from oomdoctor.retry.rng import RandomState
from oomdoctor.retry.vault import TensorVault

CELLS: Final = cells_of("mlp", "AdamW")
PLACES: Final[dict[str, tuple[Any, str]]] = {
    "what was lost": (Reach, "_walk"),
    "the restore": (TensorVault, "pieces"),
    "the end of the restore": (RandomState, "restore"),
}


@pytest.fixture(scope="module")
def shell() -> Iterator[InteractiveShell]:
    with started("micro_batch", "chunked_forward") as made:
        yield made


@contextmanager
def interrupted(owner: Any, name: str, times: int) -> Iterator[list[int]]:
    """Send SIGINT in the midst of each of the first calls; yields a list of them."""
    kept: Callable[..., Any] = getattr(owner, name)
    sent: list[int] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if len(sent) < times:
            sent.append(times)
            signal.raise_signal(signal.SIGINT)
        return kept(*args, **kwargs)

    with mock.patch.object(owner, name, call):
        yield sent


class Passing(TorchDispatchMode):
    """A mode of the user's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("place", PLACES)
def test_as_many_as_there_are_restores(shell: InteractiveShell, place: str) -> None:
    shell.reset(new_session=True)
    seed()
    for cell in CELLS[:-1]:
        assert run(shell, cell)[0].success
    before = state_digests(shell.user_ns)
    with ExitStack() as stack:
        stack.enter_context(Passing())
        modes = len(_get_current_dispatch_mode_stack())
        stack.enter_context(Planted("third iteration"))
        first = stack.enter_context(interrupted(*PLACES[place], times=1))
        every = stack.enter_context(interrupted(TensorVault, "pieces", times=9))
        result, shown = run(shell, CELLS[-1])
        assert len(_get_current_dispatch_mode_stack()) == modes + 1
    assert first, shown.stdout + shown.stderr
    assert every
    assert isinstance(result.error_in_exec, KeyboardInterrupt)
    assert "KeyboardInterrupt" in shown.stdout
    assert "enforce fail" in shown.stdout, "the failure is told as well"
    assert differing(state_digests(shell.user_ns), before) == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with Planted("first backward"):
        assert run(shell, CELLS[-1])[0].success
    case = pipeline.last_case()
    assert case is not None
    assert case.outcome.kind is OutcomeKind.HEALED


def test_what_was_held_back_arrives_once_and_after_the_body() -> None:
    done = []

    def twice() -> None:
        with held_back():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        twice()
    assert done == ["all of it"]
    with held_back():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_handler_of_the_user_gets_what_was_held_back() -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: got.append(number))
    try:
        with held_back():
            signal.raise_signal(signal.SIGINT)
            assert got == []
        assert got == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)

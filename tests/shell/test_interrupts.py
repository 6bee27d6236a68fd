"""Interrupts and what handlers of signals raise: state is put back, a diagnosis keeps its fixes, and none is lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
from IPython.core.interactiveshell import InteractiveShell
from kernels import Kernel, Reply
from programs import DATA, MODEL, TRAIN
from state_programs import Planted, cells_of
from state_shell import differing, run, seed, started
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from oomdoctor import pipeline
from oomdoctor.model.case import OutcomeKind
from oomdoctor.objects.leaves import state_digests
from oomdoctor.objects.rng import RandomState
from oomdoctor.retry import transaction
from oomdoctor.retry.reachable import Reach
from oomdoctor.retry.tensor_copies import TensorCopies
from oomdoctor.retry.transaction import held_back

CELLS: Final = cells_of("mlp", "AdamW")
PLACES: Final[dict[str, tuple[Any, str]]] = {
    "what was lost": (Reach, "_walk"),
    "the restore": (TensorCopies, "pieces"),
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
        every = stack.enter_context(interrupted(TensorCopies, "pieces", times=9))
        result, shown = run(shell, CELLS[-1])
        assert len(_get_current_dispatch_mode_stack()) == modes + 1
    assert first, shown.stdout + shown.stderr
    assert every
    assert isinstance(result.error_in_exec, KeyboardInterrupt)
    told = "\n".join(one.data.get("text/plain", "") for one in shown.outputs)
    assert "Interrupted. Everything is as before the cell ran." in told, told + shown.stderr
    assert "enforce fail" in shown.stdout, "the failure is told as well"
    assert differing(state_digests(shell.user_ns), before) == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with Planted("first backward"):
        assert run(shell, CELLS[-1])[0].success
    case = pipeline.last_case()
    assert case is not None
    assert case.outcome.kind is OutcomeKind.HEALED


def test_one_that_comes_while_the_traceback_is_rendered_ends_the_answer(shell: InteractiveShell) -> None:
    shell.reset(new_session=True)
    seed()
    for cell in CELLS[:-1]:
        assert run(shell, cell)[0].success
    with Planted("third iteration"), interrupted(shell.InteractiveTB, "structured_traceback", times=1) as sent:
        result, shown = run(shell, CELLS[-1])
    assert sent
    assert "enforce fail" in str(result.error_in_exec), "it stays what the cell has failed with"
    assert "enforce fail" in shown.stdout
    assert not any(word in shown.stdout for word in ("KeyboardInterrupt", "Healed", "Out of memory"))
    assert shown.stderr.splitlines()[-1] == "oomdoctor: interrupted: the failure was not diagnosed"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("stage", ["observe", "diagnose"])
def test_one_that_comes_within_a_diagnosis_ends_it_with_one_line(kernel: Kernel, stage: str) -> None:
    kernel.run("%load_ext oomdoctor\nimport signal\nfrom oomdoctor import pipeline", ok=True)
    sends = f"was = pipeline.{stage}\ndef sends(*_, **__): signal.raise_signal(signal.SIGINT)"
    kernel.run(f"{sends}\npipeline.{stage} = sends", ok=True)
    reply = kernel.run("bytearray(1 << 50)", ok=False)
    kernel.run(f"pipeline.{stage} = was", ok=True)
    assert [error["ename"] for error in reply.errors] == [reply.content["ename"]] == ["MemoryError"]
    assert reply.stderr == "oomdoctor: interrupted: the failure was not diagnosed\n"


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


WAITS: Final = "if os.getpid() != here:\n    threading.Event().wait()\n"
"""Keeps a forecast of the cell from ending."""
WORKER: Final = """\
held = iter(torch.utils.data.DataLoader(list(range(100)), num_workers=1))
next(held)
worker = held._workers[0].pid
"""
FIXES: Final = "[one['fixes'] for one in map(lambda case: case.to_dict(), __import__('oomdoctor').pipeline.cases())]"


def children(pid: int) -> list[int]:
    with suppress(OSError):
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    return []


def while_forecasts_are_made(kernel: Kernel, do: Callable[[], None]) -> Reply:
    """Run a cell that fails and whose forecasts do not end; call ``do`` once they have begun."""
    pid = kernel.value("os.getpid()")

    def wait() -> None:
        # A copy of the kernel that has made copies of itself.
        while not any(map(children, children(pid))):
            time.sleep(0.01)
        do()

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    reply = kernel.run(WAITS + TRAIN, ok=False)
    waiting.join()
    return reply


@pytest.fixture
def forecasting(kernel: Kernel) -> Kernel:
    kernel.run("%load_ext oomdoctor\n%config OomDoctor.forecast_time_s = 100.0", ok=True)
    for cell in (MODEL, DATA, "import os, threading\nhere = os.getpid()", WORKER, "%oomdoctor simulate 64MiB"):
        kernel.run(cell, ok=True)
    return kernel


@pytest.mark.thorough
def test_an_interrupt_of_the_forecasts_leaves_the_fixes(forecasting: Kernel) -> None:
    reply = while_forecasts_are_made(forecasting, forecasting.interrupt)
    assert [error["ename"] for error in reply.errors] == ["OutOfMemoryError"]
    assert "interrupted: the fixes are as far as they are known" in reply.stderr
    (fixes,) = forecasting.value(FIXES)
    assert fixes
    assert "the forecasts were interrupted" in " ".join(reply.text.split())


@pytest.mark.thorough
def test_a_worker_that_is_killed_meanwhile_is_told_and_diagnosed(forecasting: Kernel) -> None:
    worker = forecasting.value("worker")
    reply = while_forecasts_are_made(forecasting, lambda: os.kill(worker, signal.SIGKILL))
    assert [error["ename"] for error in reply.errors] == ["OutOfMemoryError", "RuntimeError"]
    assert "is killed by signal" in reply.errors[-1]["evalue"]
    assert "could not finish" not in reply.text
    assert forecasting.value("__import__('oomdoctor').last_case().incident.message").startswith("DataLoader worker")
    assert forecasting.value(FIXES)[0]


def test_what_a_handler_raises_in_the_snapshot_is_the_cells_failure(shell: InteractiveShell) -> None:
    def killed(number: int, _frame: Any) -> None:
        raise RuntimeError(f"DataLoader worker (pid {number}) is killed by signal: Killed. ")

    before = signal.signal(signal.SIGUSR1, killed)
    try:
        with interrupted_by(signal.SIGUSR1, transaction, "Snapshot"):
            result, shown = run(shell, "x = 1")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert "is killed by signal" in str(result.error_in_exec)
    assert "is killed by signal" in shown.stdout
    case = pipeline.last_case()
    assert case is not None
    assert "is killed by signal" in (case.incident.message or "")


@contextmanager
def interrupted_by(number: int, owner: Any, name: str) -> Iterator[None]:
    kept = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        signal.raise_signal(number)
        return kept(*args, **kwargs)

    with mock.patch.object(owner, name, call):
        yield

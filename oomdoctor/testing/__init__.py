"""Helpers for tests of one's own rules, fixes and programs: fail where it is wanted, heal without a shell."""

from __future__ import annotations

import asyncio
import gc
import linecache
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from oomdoctor import pipeline
from oomdoctor.allocator.device import cuda_out_of_memory
from oomdoctor.allocator.virtual import simulate
from oomdoctor.errors import UsageError
from oomdoctor.model.case import Case, OutcomeKind
from oomdoctor.model.session import Attempt, Cell, Cells, Session
from oomdoctor.model.sizes import GIB, MIB, parse_size
from oomdoctor.model.unavailable import Unavailable
from oomdoctor.retry import Transaction, release
from oomdoctor.testing.nvml import FakeGpu, FakeProcess, fake_nvml, recorded_nvml

__all__ = ["FakeGpu", "FakeProcess", "assert_heals", "fake_nvml", "oom_at", "recorded_nvml"]

_ROOM_BYTES = 1 << 30
_ENDLESS_BYTES = 1 << 60


def assert_heals(fix: str, *sources: str, budget: str | int, namespace: dict[str, Any] | None = None) -> Case:
    """Assert that the last of ``sources`` runs out of memory, and that ``fix`` heals it.

    Args:
        fix: the id of the fix.
        sources: the cells of a program; all but the last run before the device is simulated.
        budget: memory of the simulated device, besides what the tensors take that are alive when this is called.
        namespace: the globals to run in; the healed state is left there.

    Returns:
        The case with its outcome.

    Raises:
        AssertionError: it did not fail, the fix was not offered, or it did not heal.
    """
    globals_: dict[str, Any] = {"__name__": "__main__"} if namespace is None else namespace
    capacity = parse_size(budget) + held_already()
    *setup, last = (Cell(number=number, source=source) for number, source in enumerate(sources, 1))
    for cell in setup:
        _run(cell.source, _filename(cell), globals_)
    with simulate(capacity):
        transaction = Transaction(globals_, last.source, lambda: _ROOM_BYTES)
        with transaction.armed():
            failure = _error_of(last.source, _filename(last), globals_)
        assert failure is not None, "the last cell did not fail"
        case, session = _diagnose(failure, Cells(history=(*setup, last)), globals_)
        release(failure)
        case = pipeline.plan(case, session, transaction, time_budget_s=60)
        chosen = [candidate for candidate in case.plan.candidates if candidate.fix == fix]
        assert chosen, f"{fix} was not offered: {dict(case.plan.refusals).get(fix, 'no dose fits')}"

        async def run(attempt: Attempt) -> BaseException | None:
            for replay in attempt.replays:
                _run(replay, "<replay>", globals_)
            if attempt.replays:
                transaction.set_aside()
            return _error_of(attempt.source, "<retry>", globals_)

        case, error = asyncio.run(
            pipeline.heal(case, session, transaction, chosen, run, most_attempts=3, time_budget_s=600)
        )
    assert case.outcome.kind is OutcomeKind.HEALED, f"{case.outcome.kind}: {case.outcome.why or error}"
    return case


def held_already() -> int:
    """Return the bytes of the tensors that the process holds, those of other tests among them."""
    gc.collect()
    with simulate(_ENDLESS_BYTES) as device:
        held = device.read().allocated
    return 0 if isinstance(held, Unavailable) else held


def _diagnose(failure: BaseException, cells: Cells, namespace: dict[str, Any]) -> tuple[Case, Session]:
    names = {_filename(cell): cell.number for cell in cells.history}
    case, session = pipeline.observe(
        failure, lambda accelerator: pipeline.open_session(namespace, cells, accelerator), names
    )
    return pipeline.diagnose(case, pipeline.rulebook()), session


def _filename(cell: Cell) -> str:
    return f"<cell {cell.number}>"


def _run(source: str, filename: str, namespace: dict[str, Any]) -> None:
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, "exec"), namespace)


def _error_of(source: str, filename: str, namespace: dict[str, Any]) -> BaseException | None:
    try:
        _run(source, filename, namespace)
    except UsageError:
        raise
    except Exception as exc:  # noqa: BLE001 - border: the program's own failure is what is asked for
        return exc
    return None


@contextmanager
def oom_at(operation: int) -> Iterator[None]:
    """Fail the tensor operation of this number, counted from one, as a full CUDA device would.

    Operations of the calling thread are counted, backward's among them; those before and after are not touched.
    """
    with _FailAt(operation):
        yield


class _FailAt(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, operation: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left = operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._left -= 1
        if self._left == 0:
            used = GIB - 2 * MIB
            raise torch.OutOfMemoryError(
                cuda_out_of_memory(tried=20 * MIB, total=GIB, allocated=used - MIB, reserved=used)
            )
        return func(*args, **(kwargs or {}))

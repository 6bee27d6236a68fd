"""A bench for plans: families run out of memory on the virtual accelerator, are priced, and healed in forked copies.

A case is made once; every way to end it (a retry, a trial of one dose) runs in a forked copy of the process at the
moment after the plan, so that each begins at the same state. The copies compute with one thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import json
import linecache
import os
import random
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from models import Family

from oomdoctor import fixes, pipeline
from oomdoctor.allocator import virtual
from oomdoctor.allocator.virtual import VirtualAccelerator, simulate
from oomdoctor.forecast.attempts import attempt_with
from oomdoctor.model.case import Case
from oomdoctor.model.plan import Candidate, Verdict
from oomdoctor.model.session import Attempt, Cell, Cells, Session
from oomdoctor.model.unavailable import Refused
from oomdoctor.retry import Transaction, release
from oomdoctor.sandbox.openmp import keep_one_thread

ROOMY_BYTES = 1 << 36
LONGEST_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A failure that was priced and can be retried."""

    case: Case
    session: Session
    transaction: Transaction
    namespace: dict[str, Any]
    planned_s: float


@contextlib.contextmanager
def device_of(capacity_bytes: int) -> Iterator[VirtualAccelerator]:
    """Put on a virtual accelerator that begins empty: what is alive besides is not the program's."""
    with contextlib.ExitStack() as stack:
        with mock.patch("oomdoctor.allocator.device.storages_alive", return_value=()):
            device = stack.enter_context(simulate(capacity_bytes))
        yield device


@contextlib.contextmanager
def begun(sources: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Give the namespace that all cells but the last leave; it is emptied in the end."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    try:
        for number, source in enumerate(sources[:-1], 1):
            execute(source, f"<cell {number}>", namespace)
        yield namespace
    finally:
        namespace.clear()
        gc.collect()


def execute(source: str, filename: str, namespace: dict[str, Any]) -> None:
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(source, filename, "exec"), namespace)


def error_of(source: str, filename: str, namespace: dict[str, Any]) -> BaseException | None:
    try:
        execute(source, filename, namespace)
    except Exception as error:  # noqa: BLE001  the program's own failure is what is asked for
        return error
    return None


def grown(family: Family, least_bytes: int) -> Family:
    """Return the family in a size at which its peak is about ``least_bytes`` at least.

    Those of the tests are so small that two or three segments of the allocator hold all of their memory.
    """
    _, peak = unfixed(family)
    return replace(family, size=family.size * max(1, round(least_bytes / peak)))


def unfixed(family: Family) -> tuple[int, int]:
    """Return what the family holds when its last cell begins, and its peak, both in allocated bytes."""
    sources = family.cells()
    with device_of(ROOMY_BYTES) as device, begun(sources) as namespace:
        start = device.read().allocated
        execute(sources[-1], f"<cell {len(sources)}>", namespace)
        peak = device.read().peak_allocated
    assert isinstance(start, int)
    assert isinstance(peak, int)
    return start, peak


@contextlib.contextmanager
def failed(family: Family, budget: int, *, time_budget_s: float) -> Iterator[Ready | str]:
    """Run the family out of ``budget`` bytes and price it; give the case, or in words why there is none."""
    sources = family.cells()
    *setup, last = (Cell(number=number, source=source) for number, source in enumerate(sources, 1))
    with device_of(budget), contextlib.ExitStack() as stack:
        try:
            namespace = stack.enter_context(begun(sources))
        except torch.OutOfMemoryError:
            yield "ends before its last cell"
            return
        transaction = Transaction(namespace, last.source, lambda: ROOMY_BYTES)
        with transaction.armed():
            failure = error_of(last.source, f"<cell {last.number}>", namespace)
        if failure is None:
            yield "does not fail"
            return
        names = {f"<cell {number}>": number for number in range(1, len(sources) + 1)}
        cells = Cells(history=(*setup, last))
        case, session = pipeline.observe(failure, lambda device: pipeline.open_session(namespace, cells, device), names)
        case = pipeline.diagnose(case, pipeline.rulebook())
        release(failure)
        del failure
        begin = time.perf_counter()
        case = pipeline.plan(case, session, transaction, time_budget_s=time_budget_s)
        yield Ready(
            case=case,
            session=session,
            transaction=transaction,
            namespace=namespace,
            planned_s=time.perf_counter() - begin,
        )


def in_a_copy(do: Callable[[], Any]) -> Any:
    """Return what ``do`` returns, as JSON has it, in a forked copy of this process."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            keep_one_thread()
            _count_here()
            answer = json.dumps(do())
        except BaseException:  # noqa: BLE001  nothing may leave the copy but by its pipe
            answer = json.dumps({"broken": traceback.format_exc()[-2000:]})
        with os.fdopen(writer, "w") as out:
            out.write(answer)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as source:
        answer = source.read()
    os.waitpid(pid, 0)
    return json.loads(answer)


def _count_here() -> None:
    """Have the virtual accelerator count in this process: copies of a process are none of its memory by themselves."""
    if virtual._mode is not None:
        virtual._mode._process = os.getpid()


def healed(ready: Ready, auto: str, *, most_attempts: int = 3) -> dict[str, Any]:
    """Retry as ``auto`` would, in a copy; return how that ended."""
    chosen = pipeline.admitted(ready.case, auto)
    if not chosen:
        return {"kind": "none admitted", "attempts": 0, "fixes": [], "why": ""}

    async def run(attempt: Attempt) -> BaseException | None:
        texts = [*((replay, "<replay>") for replay in attempt.replays), (attempt.source, "<retry>")]
        return next((error for text, name in texts if (error := error_of(text, name, ready.namespace))), None)

    def heal() -> dict[str, Any]:
        case, _ = asyncio.run(
            pipeline.heal(
                ready.case,
                ready.session,
                ready.transaction,
                chosen,
                run,
                most_attempts=most_attempts,
                time_budget_s=600,
            )
        )
        outcome = case.outcome
        return {
            "kind": outcome.kind.value,
            "attempts": outcome.attempts,
            "fixes": list(outcome.fixes),
            "peak": outcome.peak,
            "why": outcome.why,
        }

    return in_a_copy(heal)  # type: ignore[no-any-return]


def mildest_that_runs(ready: Ready, candidate: Candidate) -> int | None:
    """Try the doses that the fix proposes for real, mildest first, until one runs; return which; None if none does."""
    fix = fixes.get(candidate.fix)
    proposals = fix.propose(ready.case.incident, ready.case.evidence)
    assert not isinstance(proposals, Refused)
    for index, one in enumerate(proposals):
        if in_a_copy(lambda dose=one.dose: _runs(ready, fix, dose)) is True:  # type: ignore[misc]
            return index
    return None


def peak_of(ready: Ready, attempt: Attempt, *, capacity: int = ROOMY_BYTES) -> int | None:
    """Return the allocated peak of an attempt on a device of ``capacity`` bytes, in a copy.

    None where it is unfit, takes long, or runs out of memory.
    """

    def over(*_: Any) -> None:
        raise TimeoutError

    def peak() -> int | None:
        signal.signal(signal.SIGALRM, over)
        signal.alarm(LONGEST_S)
        device: Any = ready.session.accelerator
        device.capacity_bytes = device.allocator.capacity_bytes = device._room = capacity
        device.reset_peak()
        return device.read().peak_allocated if _attempted(ready, attempt) else None

    found = in_a_copy(peak)
    return found if isinstance(found, int) else None


def _runs(ready: Ready, fix: Any, dose: Any) -> bool | None:
    _, attempt = attempt_with(fix, dose, ready.session, ready.case.evidence)
    return None if isinstance(attempt, Refused) else _attempted(ready, attempt)


def _attempted(ready: Ready, attempt: Attempt) -> bool | None:
    """Return whether an attempt runs, None where it finds itself unfit."""
    ready.transaction.restore()
    keep_one_thread()  # the start of the cell may have brought others back
    ready.session.accelerator.empty_cache()
    try:
        with contextlib.ExitStack() as live:
            for enter in attempt.live:
                live.enter_context(enter())
            for replay in attempt.replays:
                execute(replay, "<replay>", ready.namespace)
            execute(attempt.source, "<trial>", ready.namespace)
    except torch.OutOfMemoryError:
        return False
    except Exception:  # noqa: BLE001  a change that finds itself unfit
        return None
    return True


def steps_off(ready: Ready, candidate: Candidate) -> int | None:
    """Return how many doses the chosen one lies from the mildest that runs; None where there is no choice or none."""
    if len(candidate.made_of) > 1 or candidate.forecast.verdict is Verdict.UNKNOWN:
        return None
    proposals = fixes.get(candidate.fix).propose(ready.case.incident, ready.case.evidence)
    if isinstance(proposals, Refused) or len(proposals) < 2:
        return None
    mildest = mildest_that_runs(ready, candidate)
    return None if mildest is None else [one.dose for one in proposals].index(candidate.dose) - mildest

"""The inside of the forked processes: the nursery, which brings back the start of the cell once, and the shadows.

The nursery is forked from the user's process; it is walled off, restores the cell's start, counts what is alive, and
forks a shadow per attempt. A shadow runs its attempt on fake tensors and reports one ``Reading``. Neither ever returns
to the code that forked it: both end in ``os._exit``, so that no handler and no buffer of the user's runs twice.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import gc
import inspect
import linecache
import re
import signal
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from oomdoctor.allocator.caching import replay
from oomdoctor.errors import ForecastError
from oomdoctor.forecast.ledger import CELL, Ledger
from oomdoctor.forecast.loaders import orphan_workers
from oomdoctor.forecast.pace import Pace, StopForecast
from oomdoctor.forecast.reading import Reading, one_sentence
from oomdoctor.forecast.sandbox import forbid
from oomdoctor.forecast.stand_ins import replace_all
from oomdoctor.forecast.survey import live_storages, optimizer_count
from oomdoctor.forecast.tracker import Tracker
from oomdoctor.model.magics import mask

if TYPE_CHECKING:
    from collections.abc import Callable

    from oomdoctor.model.session import Attempt, Session

__all__ = ["Start", "bring_back", "run", "warm_up"]

_EARLIER: Final = "<oomdoctor: shadow of an earlier cell>"
_STEADY_OPERATIONS: Final = 500
"""Operations without a new peak after which a loop that the time limit cut is taken to be in its steady state."""


def warm_up() -> None:
    """Load what the first fake tensor loads: some eight hundred modules, which no shadow should wait for."""
    with _disable_current_modes(), FakeTensorMode():
        pass


class OutOfTime(StopForecast):
    """The time for this shadow is over."""


class Start:
    """The start of the cell, as every shadow finds it: what is alive, and how many optimizers there are."""

    __slots__ = ("ledger", "optimizers")

    def __init__(self, ledger: Ledger, optimizers: int) -> None:
        self.ledger, self.optimizers = ledger, optimizers


def bring_back(prepare: Callable[[], None]) -> Start:
    """Restore the start of the cell in this process and count what is alive there.

    Raises:
        ForecastError: it could not be restored, or tensors live on a real device.
    """
    torch.set_num_threads(1)  # the threads of OpenMP did not survive the fork: a parallel operation would hang
    torch.autograd.set_multithreading_enabled(False)
    orphan_workers()
    try:
        prepare()
    except Exception as error:
        raise ForecastError(f"the start of the cell could not be brought back: {one_sentence(error)}") from error
    gc.unfreeze()
    gc.collect()
    ledger = Ledger()
    for storage in live_storages():
        if storage.device.type == "cpu":
            ledger.hold(storage)
        elif storage.device.type != "meta":
            raise ForecastError(f"a tensor lives on {storage.device}: only tensors in host memory are forecast so far")
    optimizers = optimizer_count()
    gc.freeze()  # what was alive stays alive, and its pages stay shared
    return Start(ledger, optimizers)


def run(
    session: Session, attempt: Attempt, start: Start, *, budget: int | None, cached: bool, time_s: float
) -> Reading:
    """Run ``attempt`` on fake tensors in this process, which is of no use for anything else afterwards.

    Args:
        session: holds the namespace that the attempt runs in.
        attempt: what to run.
        start: what was alive before.
        budget: capacity to replay the allocations in.
        cached: whether a caching allocator stands between the tensors and the device.
        time_s: time after which the run is cut.
    """
    tracker, pace = Tracker(start.ledger), Pace(start.optimizers)
    try:
        codes = [_compiled(text, session.shell, _EARLIER) for text in attempt.replays]
        codes.append(_compiled(attempt.source, session.shell, CELL))
        with _time_limit(time_s):
            replace_all(tracker, pace, session.shell)
            forbid()
            _follow(session, attempt, codes, tracker)
    except OutOfTime:
        if not _is_steady(start.ledger, pace):
            return Reading(why="out of time")
    except StopForecast:
        pass
    except SystemExit:
        pass  # the cell ends itself
    except ForecastError as error:
        return Reading(why=str(error))
    except BaseException as error:  # noqa: BLE001  the user's code may raise anything; the answer is that it did
        if not (isinstance(error, StopIteration) and pace.ended_early):
            return Reading(why=_failure(error))
    return _reading(tracker, pace, budget=budget, cached=cached)


def _compiled(source: str, shell: Any, name: str) -> CodeType:
    """Return the code of a cell without its magics; lines keep their numbers."""
    masked = mask(source)
    for _, original in masked.hidden:
        if re.match(r"%run\b", original):
            raise ForecastError("the cell runs a script by %run, which a forecast does not follow")
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | getattr(getattr(shell, "compile", None), "flags", 0)
    try:
        code: CodeType = compile(masked.text, name, "exec", flags=flags, dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise ForecastError(f"the cell is not Python: {one_sentence(error)}") from error
    if source.lstrip().startswith("%%") and not _does_anything(masked.text):
        raise ForecastError(f"the cell is not Python: it begins with {source.split(maxsplit=1)[0]}")
    linecache.cache[name] = (len(masked.text), None, masked.text.splitlines(keepends=True), name)
    return code


def _does_anything(text: str) -> bool:
    return any(not isinstance(node, ast.Pass) for node in ast.parse(text).body)


def _follow(session: Session, attempt: Attempt, codes: list[CodeType], tracker: Tracker) -> None:
    *replays, cell = codes
    with contextlib.ExitStack() as modes:
        modes.enter_context(_disable_current_modes())  # those of the user's process
        modes.enter_context(tracker.fake_mode)
        modes.enter_context(tracker)
        changes = contextlib.ExitStack()
        for make in attempt.live:
            changes.enter_context(make())
        for code in replays:
            _execute(code, session.namespace)
        _execute(cell, session.namespace)


def _execute(code: CodeType, namespace: dict[str, Any]) -> None:
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.new_event_loop().run_until_complete(eval(code, namespace))
    else:
        exec(code, namespace)


class _time_limit(contextlib.AbstractContextManager[None]):  # noqa: N801
    """Raises ``OutOfTime`` in this thread after so many seconds, again and again until it gets through."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        def expire(_number: int, _frame: Any) -> None:
            raise OutOfTime

        signal.signal(signal.SIGALRM, expire)
        signal.setitimer(signal.ITIMER_REAL, max(self._seconds, 0.01), 0.1)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _is_steady(ledger: Ledger, pace: Pace) -> bool:
    """Whether a loop without optimizer steps ran long enough without a new peak for it to be the peak."""
    since = ledger.clock - ledger.raised_at
    return not pace.trains and since >= max(_STEADY_OPERATIONS, ledger.clock // 2)


def _reading(tracker: Tracker, pace: Pace, *, budget: int | None, cached: bool) -> Reading:
    ledger, meter = tracker.ledger, tracker.meter
    peak, reserved, margin = ledger.peak, None, meter.margin
    if cached:
        # The virtual accelerator counts tensors as we do: the scratch of kernels is outside of its memory.
        margin = meter.least_margin
        found = replay(ledger.events)
        if budget is not None and found.peak_reserved > budget:
            # Short of room the allocator gives cached segments back: that run is the one that would be.
            squeezed = replay(ledger.events, budget)
            found = found if squeezed.failed_at is not None else squeezed
        peak, reserved = found.peak_allocated, found.peak_reserved
    return Reading(
        peak=peak,
        reserved=reserved,
        peak_line=ledger.peak_line,
        cost=meter.cost * pace.share,
        error_ratio=margin,
    )


def _failure(error: BaseException) -> str:
    line = None
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == CELL:
            line = trace.tb_lineno
        trace = trace.tb_next
    where = f" at line {line}" if line is not None else ""
    return f"the shadow run of the cell stopped{where} with {one_sentence(error)}"

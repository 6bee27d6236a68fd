"""The inside of the forked processes: the nursery, which brings back the start of the cell once, and the shadows.

The nursery is forked from the user's process; it is walled off, restores the cell's start, counts what is alive, and
forks a shadow per attempt. A shadow runs its attempt on fake tensors and reports one ``Reading``. Neither ever returns
to the code that forked it: both end in ``os._exit``, so that no handler and no buffer of the user's runs twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import linecache
import math
import re
import signal
import time
from dataclasses import replace
from functools import partial
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

import torch
from torch.utils._python_dispatch import _disable_current_modes

from oomdoctor.allocator.settings import AllocatorSettings
from oomdoctor.errors import ForecastError, OomDoctorError
from oomdoctor.forecast.accumulation import counts_alone
from oomdoctor.forecast.attempts import unfixed
from oomdoctor.forecast.device_in_use import Held, relabel
from oomdoctor.forecast.device_in_use import bring_back as bring_back_on_fakes
from oomdoctor.forecast.devices import DeviceTracker, emulate, lacking
from oomdoctor.forecast.layout import Layout, allocator_settings, is_retry, of_virtual
from oomdoctor.forecast.ledger import CELL, Ledger
from oomdoctor.forecast.loops import (
    asker,
    compile_followed,
    follow_functions,
    follow_lengths,
    follow_loops,
    is_followed,
)
from oomdoctor.forecast.module_memory import ModuleCalls
from oomdoctor.forecast.outcome import reading_of
from oomdoctor.forecast.pace import Pace, StopForecast
from oomdoctor.forecast.piled import Piled, fills_up
from oomdoctor.forecast.reading import OUT_OF_TIME, Reading, no_reading
from oomdoctor.forecast.stand_ins import replace_all
from oomdoctor.forecast.survey import Alive, follow_roles, live_storages, note_roles
from oomdoctor.forecast.tracker import Tracker
from oomdoctor.model.session import Attempt
from oomdoctor.program.compiled import does_nothing, statement_lines
from oomdoctor.program.magics import mask
from oomdoctor.program.modules import importing, put_in_place
from oomdoctor.sandbox.card import CACHED
from oomdoctor.sandbox.copies import one_sentence
from oomdoctor.sandbox.fork import CANNOT_BE_READ, is_severed
from oomdoctor.sandbox.openmp import keep_one_thread
from oomdoctor.sandbox.silence import orphan_workers
from oomdoctor.sandbox.walls import forbid

if TYPE_CHECKING:
    from collections.abc import Callable

    from oomdoctor.model.session import Accelerator, Session
    from oomdoctor.sandbox.card import Card

_EARLIER: Final = "<oomdoctor: shadow of an earlier cell>"
_STEADY_OPERATIONS: Final = 500
"""Operations without a new peak after which a loop that the time limit cut is taken to be in its steady state."""

_AGAIN_S: Final = 0.1
_UNLIKE_SHARE: Final = 0.3
"""Share of the time in which steps that are unlike each other are followed."""


def warm_up() -> None:
    """Load what the first fake tensor loads: some eight hundred modules, which no shadow should wait for."""
    counts_alone()


class OutOfTime(StopForecast):
    """The time for this shadow is over."""


class Start:
    """The start of the cell, as every shadow finds it: what is alive, the modules, how many optimizers.

    ``layout`` says where it lies, in an allocator that is known. Where a device is in use, ``held`` is what lies there,
    and ``prepare`` is still to be done, on fakes.
    """

    __slots__ = ("deques", "held", "layout", "ledger", "modules", "optimizers", "prepare")

    def __init__(self, ledger: Ledger, found: Alive) -> None:
        self.ledger, self.optimizers = ledger, len(found.optimizers)
        self.modules = [ref(module) for module in found.modules]
        self.deques = [ref(one) for one in found.deques if one.maxlen is not None]
        self.held: Held | None = None
        self.layout: Layout | None = None
        self.prepare: Callable[[], None] | None = None


def bring_back(
    prepare: Callable[[], None],
    namespace: dict[str, Any],
    card: Card | None = None,
    accelerator: Accelerator | None = None,
) -> Start:
    """Restore the start of the cell in this process and count what is alive there; have its functions followed.

    Args:
        prepare: restores it.
        namespace: that the cell runs in.
        card: the device to be emulated, None for none.
        accelerator: the memory that is asked about, None where it is one that nothing lies on yet.

    Raises:
        ForecastError: it could not be restored, or tensors live on a real device.
    """
    torch.autograd.set_multithreading_enabled(False)
    orphan_workers()
    in_use = card if card is not None and card.held is not None else None
    if in_use is None:
        try:
            prepare()
        except Exception as error:
            raise ForecastError(f"the start of the cell could not be brought back: {one_sentence(error)}") from error
    keep_one_thread()  # the start of the cell may have brought others back
    gc.unfreeze()
    gc.collect()
    ledger, found = Ledger(), Alive()
    for storage, role in live_storages(found):
        if storage.device.type == "cpu":
            ledger.hold(storage)
            if role is not None:
                ledger.mark(storage, role)
        elif storage.device.type != "meta" and in_use is None:
            raise ForecastError(f"a tensor lives on {storage.device}: only tensors in host memory are forecast so far")
    start = Start(ledger, found)
    if in_use is not None:
        start.held, start.prepare = Held(in_use), prepare
    else:
        start.layout = of_virtual(accelerator, ledger, is_emptied=is_retry(prepare))
    follow_functions(found.functions, namespace)
    del found
    gc.freeze()  # what was alive stays alive, and its pages stay shared
    return start


def run(
    session: Session,
    attempt: Attempt,
    start: Start,
    *,
    budget: int | None,
    cached: bool,
    card: Card | None = None,
    time_s: float,
) -> Reading:
    """Run ``attempt`` on fake tensors in this process, which is of no use for anything else afterwards.

    Args:
        session: holds the namespace that the attempt runs in.
        attempt: what to run.
        start: what was alive before.
        budget: capacity to replay the allocations in.
        cached: whether a caching allocator stands between the tensors and the device.
        card: the device to be emulated, None for none.
        time_s: time after which the run is cut.
    """
    # The virtual accelerator counts tensors alone: what kernels need inside is outside of its memory.
    tracker = Tracker(start.ledger, counts_scratch=not cached and card is None)
    if card is not None:
        asks_host = card.held is not None and session.accelerator.name == "cpu"
        tracker = DeviceTracker(start.ledger, card, asks_host=asks_host)
    pace = Pace(start.optimizers, asker, tracker.ledger)
    pace.until = time.monotonic() + time_s * _UNLIKE_SHARE
    # Of what lies on an emulated device no values are known, so that no loop there has an end that can be told.
    tracker.scalars.until = pace.until if card is None else -math.inf
    calls = ModuleCalls(tracker) if attempt == unfixed(session) else None
    settings, is_left, failure, left_early = AllocatorSettings(), True, None, False
    try:
        if cached or card is not None:
            settings = allocator_settings(session.accelerator)
        codes = [_compiled(text, session.shell, _EARLIER) for text in attempt.replays]
        codes.append(_compiled(attempt.source, session.shell, CELL))
        with _time_limit(time_s, is_enough=lambda: pace.rests and _is_steady(tracker.ledger, pace)):
            _put_in_place(session, start, tracker, pace)
            if calls is not None:
                calls.follow(session.modules)
            _follow(session, attempt, codes, tracker, start)
            is_left = False
    except OutOfTime:
        signal.setitimer(signal.ITIMER_REAL, 0)  # it may have come once more while the limit was being left
        if pace.trains or not (pace.has_trained or _is_steady(tracker.ledger, pace)):
            return no_reading(OUT_OF_TIME)
        pace.is_partial, left_early = True, not _is_steady(tracker.ledger, pace)
    except StopForecast:
        left_early = True
    except SystemExit:
        pass  # the cell ends itself
    except ForecastError as error:
        return no_reading(str(error))
    except OomDoctorError as error:
        return no_reading(str(error), is_unfit=True)
    except BaseException as error:  # noqa: BLE001  the user's code may raise anything; the answer is that it did
        if not _comes_of_cutting(error, pace):
            lacks = lacking(error) if card is None else None
            # Values that fakes do not have, and the walls around it, are a shadow's alone.
            is_ours = isinstance(error, OSError | NotImplementedError) or "torch._subclasses" in type(error).__module__
            breaks = not (lacks or is_ours or tracker.scalars.has_guessed)
            return no_reading(_failure(error), breaks=breaks, lacks=lacks)
        failure = _failure(error)
    note_roles(tracker, start.modules)
    reading = reading_of(
        tracker,
        pace,
        settings,
        is_left=is_left,
        left_early=left_early,
        failure=failure,
        budget=budget,
        cached=cached or (card is not None and card.type in CACHED and tracker.ledger is not tracker.host),
        card=card if card is not None and card.held is None else None,
        layout=start.layout,
        statements=statement_lines(attempt.source),
    )
    return reading if calls is None else replace(reading, modules=calls.told())


def _put_in_place(session: Session, start: Start, tracker: Tracker, pace: Pace) -> None:
    """Put all that a shadow does otherwise into the place of what Python and torch do."""
    follow_loops(pace, tracker.ledger, tracker.scalars)
    follow_lengths(session.namespace)
    pace.fills_up = partial(fills_up, start.deques)
    pace.piled = Piled(session.namespace, is_followed)
    follow_roles(tracker)
    replace_all(tracker, pace, session.shell)
    if isinstance(tracker, DeviceTracker):
        emulate(tracker)
        if start.held is not None:
            assert start.prepare is not None
            start.layout = relabel(tracker, start.held, is_emptied=is_retry(start.prepare))
    forbid()


def _compiled(source: str, shell: Any, name: str) -> CodeType:
    """Return the code of a cell without its magics; lines keep their numbers."""
    masked = mask(source)
    for _, original in masked.hidden:
        if re.match(r"%run\b", original):
            raise ForecastError("the cell runs a script by %run, which a forecast does not follow")
    try:
        code = compile_followed(masked.text, name, getattr(getattr(shell, "compile", None), "flags", 0))
    except (SyntaxError, ValueError) as error:
        raise ForecastError(f"the cell is not Python: {one_sentence(error)}") from error
    if source.lstrip().startswith("%%") and does_nothing(source):
        raise ForecastError(f"the cell is not Python: it begins with {source.split(maxsplit=1)[0]}")
    linecache.cache[name] = (len(masked.text), None, masked.text.splitlines(keepends=True), name)
    return code


def _follow(
    session: Session,
    attempt: Attempt,
    codes: list[CodeType],
    tracker: Tracker,
    start: Start,
) -> None:
    *replays, cell = codes
    with contextlib.ExitStack() as modes:
        modes.enter_context(_disable_current_modes())  # those of the user's process
        modes.enter_context(tracker.fake_mode)
        modes.enter_context(tracker)
        if isinstance(tracker, DeviceTracker) and start.held is not None and start.prepare is not None:
            bring_back_on_fakes(tracker, start.held, start.prepare)
        changes = contextlib.ExitStack()
        texts = {str(module.file): module.source for module in session.cells.modules}
        texts |= {str(edit.file): edit.after for edit in attempt.modules}
        changes.enter_context(importing(texts, compile_followed))
        for edit in attempt.modules:
            put_in_place(edit, compile_followed)
        for make in attempt.live:
            changes.enter_context(make())
        for code in replays:
            _execute(code, session.namespace)
        tracker.ledger.begin()
        _execute(cell, session.namespace)


def _execute(code: CodeType, namespace: dict[str, Any]) -> None:
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.new_event_loop().run_until_complete(eval(code, namespace))
    else:
        exec(code, namespace)


class _time_limit(contextlib.AbstractContextManager[None]):  # noqa: N801
    """Raises ``OutOfTime`` in this thread after so many seconds, or when it is enough, until it gets through."""

    def __init__(self, seconds: float, is_enough: Callable[[], bool]) -> None:
        self._end, self._is_enough = time.monotonic() + seconds, is_enough

    def __enter__(self) -> None:
        signal.signal(signal.SIGALRM, self._look)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S, _AGAIN_S)

    def _look(self, _number: int, _frame: Any) -> None:
        if time.monotonic() >= self._end or self._is_enough():
            raise OutOfTime

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _is_steady(ledger: Ledger, pace: Pace) -> bool:
    """Whether a training, or a loop without optimizer steps, is followed by enough without a new peak."""
    since = ledger.clock - ledger.raised_at
    return not pace.trains and since >= (
        _STEADY_OPERATIONS if pace.rests else max(_STEADY_OPERATIONS, ledger.clock // 2)
    )


def _comes_of_cutting(error: BaseException, pace: Pace) -> bool:
    """Whether the cell may have failed because a loop before had too few iterations: what it had is what was seen.

    A device that there is none of is not meant.
    """
    if isinstance(error, StopIteration) and pace.ended_early:
        return True
    return bool(pace.cuts) and isinstance(error, Exception) and lacking(error) is None


def _failure(error: BaseException) -> str:
    line = None
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == CELL:
            line = trace.tb_lineno
        trace = trace.tb_next
    where = f" at line {line}" if line is not None else ""
    why = f": {CANNOT_BE_READ}" if is_severed(error) else ""
    return f"the shadow run of the cell stopped{where} with {one_sentence(error)}{why}"

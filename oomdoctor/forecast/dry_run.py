"""What a copy of the process does for a forecast: it brings back the start of the cell, and runs an attempt from it.

The first copy is forked from the user's process; it is walled off, restores the cell's start, counts what is alive, and
forks a further one, a dry run, per attempt (see ``dry_runs``). A dry run runs its attempt on fake tensors and reports
one ``Reading``. Neither ever returns to the code that forked it: both end in ``os._exit``, so that no handler and no
buffer of the user's runs twice.
"""

from __future__ import annotations

import contextlib
import gc
import math
import signal
import time
from dataclasses import replace
from types import CodeType
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

import torch
from torch.utils._python_dispatch import _disable_current_modes

from oomdoctor.allocator.settings import AllocatorSettings
from oomdoctor.errors import ForecastError, OomDoctorError
from oomdoctor.forecast.attempts import unfixed
from oomdoctor.forecast.device_in_use import Held, relabel
from oomdoctor.forecast.device_in_use import bring_back as bring_back_on_fakes
from oomdoctor.forecast.devices import DeviceTracker, emulate, lacking
from oomdoctor.forecast.dry_run_result import OUT_OF_TIME, Reading, Settings, no_reading
from oomdoctor.forecast.fake_tensors import counts_alone
from oomdoctor.forecast.live_storages import CELL, Layout, Ledger, allocator_settings, is_retry, of_virtual
from oomdoctor.forecast.loop_hooks import (
    asker,
    follow_functions,
    follow_lengths,
    follow_loops,
    is_followed,
)
from oomdoctor.forecast.loop_model import KeptLists, LoopModel, StopForecast
from oomdoctor.forecast.outcome import Run, reading_of
from oomdoctor.forecast.roles import Alive, ModuleCalls, follow_roles, live_storages, note_roles
from oomdoctor.forecast.stand_ins import replace_all
from oomdoctor.forecast.tracker import Tracker
from oomdoctor.model.session import Attempt
from oomdoctor.objects.frames import steps_of
from oomdoctor.program.compiled import statement_lines
from oomdoctor.sandbox.attempt import compile_cell, execute, in_place
from oomdoctor.sandbox.copies import one_sentence
from oomdoctor.sandbox.fork import CANNOT_BE_READ, is_severed
from oomdoctor.sandbox.openmp import keep_one_thread
from oomdoctor.sandbox.process_groups import run_ddp_on_fakes
from oomdoctor.sandbox.restrictions import forbid, orphan_workers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from oomdoctor.model.session import Accelerator, Session
    from oomdoctor.sandbox.card import Card

_EARLIER: Final = "<oomdoctor: dry run of an earlier cell>"
_STEADY_OPERATIONS: Final = 500
"""Operations without a new peak after which a loop that the time limit cut is taken to be in its steady state."""

_AGAIN_S: Final = 0.1
_UNLIKE_SHARE: Final = 0.3
"""Share of the time in which steps that are unlike each other are followed."""


def warm_up() -> None:
    """Load what the first fake tensor loads: some eight hundred modules, which no dry run should wait for."""
    counts_alone()


class OutOfTime(StopForecast):
    """The time for this dry run is over."""


class Start:
    """The start of the cell, as every dry run finds it: what is alive, the modules, how many optimizers.

    ``layout`` says where it lies, in an allocator that is known. Where a device is in use, ``held`` is what lies there,
    and ``prepare`` is still to be done, on fakes.
    """

    __slots__ = ("held", "layout", "ledger", "modules", "optimizers", "prepare")

    def __init__(self, ledger: Ledger, found: Alive) -> None:
        self.ledger, self.optimizers = ledger, len(found.optimizers)
        self.modules = [ref(module) for module in found.modules]
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
        card: the device to be emulated.
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
            raise ForecastError(f"the start of the cell could not be restored: {one_sentence(error)}") from error
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
    others: Collection[Settings] = (),
) -> Reading:
    """Run ``attempt`` on fake tensors in this process, which is of no use for anything else afterwards.

    Args:
        cached: whether a caching allocator stands between the tensors and the device.
        card: the device to be emulated.
        time_s: time after which the run is cut.
        others: further settings of the allocator that are asked about.
    """
    tracker = _tracker(session, start, card, cached=cached)
    loops = LoopModel(start.optimizers, asker, tracker.ledger, KeptLists(session.namespace, is_followed))
    loops.until = time.monotonic() + time_s * _UNLIKE_SHARE
    # Of what lies on an emulated device no values are known, so that no loop there has an end that can be told.
    tracker.scalars.until = loops.until if card is None else -math.inf
    calls = ModuleCalls(tracker) if attempt == unfixed(session) else None
    run = Run(
        tracker=tracker,
        loops=loops,
        settings=AllocatorSettings(),
        budget=budget,
        cached=cached or (card is not None and tracker.ledger is not tracker.host),
        card=card if card is not None and card.held is None else None,
        layout=None,
        statements=statement_lines(attempt.source),
        others=others,
    )
    try:
        if cached or card is not None:
            run.settings = allocator_settings(session.accelerator)
        codes = [compile_cell(text, _EARLIER, session.shell) for text in attempt.replays]
        codes.append(compile_cell(attempt.source, CELL, session.shell))
        with _time_limit(time_s, is_enough=lambda: loops.rests and _is_steady(tracker.ledger, loops)):
            _put_in_place(session, start, tracker, loops)
            if calls is not None:
                calls.follow(session.modules)
            _follow(session, attempt, codes, tracker, start)
            run.is_left = False
    except BaseException as error:  # noqa: BLE001  the user's code may raise anything; the answer is that it did
        if (reading := _stopped(error, run, card)) is not None:
            return reading
    run.layout = start.layout
    note_roles(tracker, start.modules)
    reading = reading_of(run)
    return reading if calls is None else replace(reading, modules=calls.told())


def _tracker(session: Session, start: Start, card: Card | None, *, cached: bool) -> Tracker:
    if card is None:
        # The virtual accelerator counts tensors alone: what kernels need inside is outside of its memory.
        return Tracker(start.ledger, counts_scratch=not cached)
    return DeviceTracker(start.ledger, card, asks_host=card.held is not None and session.accelerator.name == "cpu")


def _stopped(error: BaseException, run: Run, card: Card | None) -> Reading | None:
    """Return why a run that ``error`` has ended has no figures; None where what it has seen is enough for some."""
    tracker, loops = run.tracker, run.loops
    if isinstance(error, OutOfTime):
        signal.setitimer(signal.ITIMER_REAL, 0)  # it may have come once more while the limit was being left
        if loops.trains or not (loops.has_trained or _is_steady(tracker.ledger, loops)):
            return no_reading(OUT_OF_TIME)
        loops.is_partial, run.left_early = True, not _is_steady(tracker.ledger, loops)
    elif isinstance(error, StopForecast):
        run.left_early = True
    elif isinstance(error, OomDoctorError):
        return no_reading(str(error), is_unfit=not isinstance(error, ForecastError))
    elif _comes_of_cutting(error, loops):
        run.failure = _failure(error)
    elif not isinstance(error, SystemExit):  # by which the cell ends itself
        lacks = lacking(error) if card is None else None
        # Values that fakes do not have, and the walls around it, are a dry run's alone.
        is_ours = isinstance(error, OSError | NotImplementedError) or "torch._subclasses" in type(error).__module__
        breaks = not (lacks or is_ours or tracker.scalars.has_guessed)
        return no_reading(_failure(error), breaks=breaks, lacks_cuda=lacks == "cuda")
    return None


def _put_in_place(session: Session, start: Start, tracker: Tracker, loops: LoopModel) -> None:
    """Put all that a dry run does otherwise into the place of what Python and torch do."""
    follow_loops(loops, tracker.ledger, tracker.scalars)
    follow_lengths(session.namespace)
    follow_roles(tracker)
    replace_all(tracker, loops, session.shell)
    run_ddp_on_fakes()
    if isinstance(tracker, DeviceTracker):
        emulate(tracker)
        if start.held is not None:
            assert start.prepare is not None
            start.layout = relabel(tracker, start.held, is_emptied=is_retry(start.prepare))
    forbid()


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
        changes = contextlib.ExitStack()  # it is never left: what it changed is thrown away with this process
        changes.enter_context(in_place(session, attempt))
        for code in replays:
            execute(code, session.namespace)
        tracker.ledger.begin()
        execute(cell, session.namespace)


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


def _is_steady(ledger: Ledger, loops: LoopModel) -> bool:
    """Whether a training, or a loop without optimizer steps, is followed by enough without a new peak."""
    since = ledger.clock - ledger.raised_at
    return not loops.trains and since >= (
        _STEADY_OPERATIONS if loops.rests else max(_STEADY_OPERATIONS, ledger.clock // 2)
    )


def _comes_of_cutting(error: BaseException, loops: LoopModel) -> bool:
    """Whether the cell may have failed because a loop was cut, and not for a device that there is none of."""
    if isinstance(error, StopIteration) and loops.ended_early:
        return True
    return bool(loops.cuts) and isinstance(error, Exception) and lacking(error) is None


def _failure(error: BaseException) -> str:
    lines = [step.tb_lineno for step in steps_of(error.__traceback__) if step.tb_frame.f_code.co_filename == CELL]
    where = f" at line {lines[-1]}" if lines else ""
    why = f": {CANNOT_BE_READ}" if is_severed(error) else ""
    return f"the dry run of the cell stopped{where} with {one_sentence(error)}{why}"

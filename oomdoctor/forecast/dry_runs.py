"""The copy of the user's process in which dry runs are made, one for each attempt, and what each of them says.

The user's process forks the copy and listens (see ``copies``). All else happens there: it brings back the start of
the cell (see ``dry_run``), forks a dry run for each attempt, watches the time, decides what to try next and tells what
came of it. Only numbers come back.

Limits: where there is no ``fork`` (Windows), or none that is safe (macOS where PyTorch has Metal, whose threads and
connections do not survive one), there are no dry runs. Tensors lie in host memory, which is also where those of the
virtual accelerator live, or on a device that is emulated (see ``devices``).
Source: https://docs.python.org/3/library/multiprocessing.html#contexts-and-start-methods, on macOS.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from oomdoctor.errors import ForecastError
from oomdoctor.forecast.dry_run_result import Reading, Settings, late, no_reading
from oomdoctor.sandbox import reserve
from oomdoctor.sandbox.card import Card, in_use, not_in_use
from oomdoctor.sandbox.copies import Copy, one_sentence, unsafe, wait_for
from oomdoctor.sandbox.fork import processors

if TYPE_CHECKING:
    from oomdoctor.model.plan import Forecast
    from oomdoctor.model.session import Attempt, Session


_GRACE_S: Final = 1.0
"""Time beyond the limit in which the copy may still report before it is killed."""
_LOADING_S: Final = 20.0
"""Time beyond the limit where the copy has to load modules first."""
_MOST_WORKERS: Final = 4
_REPORT_S: Final = 0.3
_REPORT_SHARE: Final = 0.1
"""Time that a dry run gets at the end of the limit to report, and the share of its time: it goes through its trace."""

Work: TypeAlias = "Callable[[DryRuns], Iterator[Any]]"
"""What is done in the copy: begins dry runs, takes their readings, and yields what is told to the user's process."""


def unsupported() -> str | None:
    """Return why there can be no dry run in this process, None if there can."""
    if not hasattr(os, "fork"):
        return "forecasts need fork(), which this system has not"
    torch: Any = sys.modules.get("torch")
    if sys.platform == "darwin" and torch is not None and torch.backends.mps.is_available():
        return "forecasts need fork(), which is not safe on macOS beside Metal"
    if (why := unsafe()) is not None:
        return f"forecasts need copies of the process: {why}"
    try:
        in_use()
    except Exception as error:  # noqa: BLE001  whatever the device answers with, it is not forecast then
        return f"CUDA is in use in this process and does not answer: {one_sentence(error)}"
    return None


class DryRuns:
    """Dry runs, so many at once: copies of a copy of the user's process, each of which runs one attempt.

    The start of the cell is brought back when the first of them is begun. Where that fails, it is their answer.

    Args:
        prepare: restores the start of the cell; called in the forked process, with real tensors, outside of any mode.
        timeout_s: time for all of them.
        workers: how many run at once; None for one per processor, at most four.
        card: the device to run on as if it were here; None for the memory of this machine, and for one that a cell asks
            for in vain.

    Attributes:
        others: settings of the allocator that are asked about besides those in force.
    """

    def __init__(
        self,
        session: Session,
        prepare: Callable[[], None],
        *,
        budget: int | None,
        timeout_s: float,
        workers: int | None = None,
        card: Card | None = None,
    ) -> None:
        self.card = card or in_use()
        self._session, self._prepare, self._budget = session, prepare, budget
        self.others: Collection[Settings] = ()
        self._workers = workers or min(processors(), _MOST_WORKERS)
        self._cached = session.accelerator.read().simulated
        self._timeout_s = timeout_s
        self._end: float | None = None
        self._start: Any = None
        self._running: dict[Copy, tuple[Hashable, Attempt]] = {}
        self._answered: list[tuple[Hashable, Reading]] = []

    def in_copy(self, work: Work, *, waits: bool = True) -> Copy:
        """Fork the copy that does ``work`` with them, and return it.

        Where the caller waits for the end, what dry runs need is loaded here once, and not in each copy anew.
        """
        loads = "oomdoctor.forecast.dry_run" not in sys.modules
        if loads and waits and not reserve.is_limited():  # what is loaded here stays
            from oomdoctor.forecast import dry_run

            dry_run.warm_up()
            loads = False
        return Copy(partial(work, self), limit_s=self._timeout_s + _GRACE_S + (_LOADING_S if loads else 0.0))

    @property
    def has_room(self) -> bool:
        """Whether another dry run may begin."""
        return len(self._running) + len(self._answered) < self._workers and self.left_s > _REPORT_S

    @property
    def busy(self) -> bool:
        """Whether an answer is still to come."""
        return bool(self._running or self._answered)

    @property
    def left_s(self) -> float:
        """Time that is left for all dry runs."""
        return self._timeout_s if self._end is None else self._end - time.monotonic()

    def begin(self, key: Hashable, attempt: Attempt) -> None:
        """Begin a dry run that runs ``attempt``; its answer comes under ``key``."""
        if self._start is None:
            self._bring_back()
        if isinstance(self._start, Reading):
            self._answered.append((key, self._start))
        else:
            self._running[Copy(partial(self._read, attempt), limit_s=self.left_s)] = key, attempt

    def next(self) -> tuple[Hashable, Reading] | None:
        """Return the next answer; None when the time is over, and then no dry run is left."""
        while not self._answered:
            if self.left_s <= 0 or not self._running:
                for copy in self._running:
                    copy.end()
                self._running.clear()
                return None
            wait_for((copy for copy in self._running if not copy.over), self.left_s)
            for copy in list(self._running):
                self._take(copy)
        return self._answered.pop(0)

    def _bring_back(self) -> None:
        from oomdoctor.forecast import dry_run

        dry_run.warm_up()
        self._end = time.monotonic() + self._timeout_s
        try:
            self._start = dry_run.bring_back(
                *(self._prepare, self._session.namespace, self.card), accelerator=self._session.accelerator
            )
        except ForecastError as error:
            self._start = no_reading(str(error))

    def _read(self, attempt: Attempt) -> Iterator[tuple[Reading, dict[Hashable, Any]]]:
        """Run an attempt, in a dry run; tell what it has noted as well."""
        from oomdoctor.forecast import dry_run
        from oomdoctor.forecast.fake_tensors import taken_down

        reading = dry_run.run(
            *(self._session, attempt, self._start),
            budget=self._budget,
            cached=self._cached,
            card=self.card,
            time_s=self.left_s * (1 - _REPORT_SHARE) - _REPORT_S,
            others=self.others,
        )
        yield reading, taken_down()

    def _take(self, copy: Copy) -> None:
        from oomdoctor.forecast.fake_tensors import learn

        readings = copy.poll()
        if not readings and (not copy.over or copy.is_late):
            return
        copy.end()
        key, attempt = self._running.pop(copy)
        reading, noted = readings[0] if readings else (no_reading(copy.failed), {})
        learn(noted)
        if not reading.lacks_cuda:
            self._answered.append((key, reading))
            return
        # It asks for a device that this machine has not: what it would need there can be seen all the same.
        if self.card is None:
            self.card = not_in_use()
        self.begin(key, attempt)


# Forecasts ------------------------------------------------------------------------------------------------------------


def price(
    session: Session,
    attempts: Sequence[Attempt],
    *,
    budget: int | None,
    prepare: Callable[[], None],
    timeout_s: float = 10.0,
    workers: int | None = None,
    card: Card | None = None,
) -> tuple[Forecast, ...]:
    """Forecast what each of ``attempts`` would need, in their order; ``refused`` says why there is none.

    The first is by convention the unchanged cell, to which the slowdown of the others is relative. What was not priced
    in time is refused, and so is what raises. For the other arguments see ``DryRuns``.
    """
    if not attempts:
        return ()
    why, found = unsupported(), dict[int, Reading]()
    if why is None:

        def work(dry_runs: DryRuns) -> Iterator[object]:
            waiting = list(enumerate(attempts))
            while waiting or dry_runs.busy:
                while waiting and dry_runs.has_room:
                    dry_runs.begin(*waiting.pop(0))
                if (answer := dry_runs.next()) is None:
                    return
                yield answer

        runs = DryRuns(session, prepare, budget=budget, timeout_s=timeout_s, workers=workers, card=card)
        copy = runs.in_copy(work)
        found = dict(copy.wait())
        why = copy.failed or late(timeout_s)
    readings = [found.get(index, no_reading(why)) for index in range(len(attempts))]
    readings = [no_reading(late(timeout_s)) if reading.is_late else reading for reading in readings]
    return tuple(reading.priced(budget, readings[0].cost) for reading in readings)

"""The forked copy of this process in which dry runs are made: the nursery, and its shadows, one for each attempt.

The user's process forks the nursery and listens (see ``copies``). All else happens there: it brings back the start of
the cell (see ``child``), forks a shadow for each attempt, watches the time, decides what to try next and tells what
came of it.

Limits: where there is no ``fork`` (Windows), or none that is safe (macOS where PyTorch has Metal, whose threads and
connections do not survive one), there are no shadow runs. Tensors lie in host memory, which is also where those of the
virtual accelerator live, or on a device that is emulated (see ``devices``).
Source: https://docs.python.org/3/library/multiprocessing.html#contexts-and-start-methods, on macOS.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from oomdoctor.errors import ForecastError
from oomdoctor.forecast.reading import Reading, no_reading
from oomdoctor.sandbox import reserve
from oomdoctor.sandbox.copies import Copy, one_sentence, wait_for

if TYPE_CHECKING:
    from oomdoctor.model.session import Attempt, Session
    from oomdoctor.sandbox.card import Card

_GRACE_S: Final = 1.0
"""Time beyond the limit in which the nursery may still report before it is killed."""
_LOADING_S: Final = 20.0
"""Time beyond the limit where the nursery has to load modules first."""
_MOST_WORKERS: Final = 4
_REPORT_S: Final = 0.3
_REPORT_SHARE: Final = 0.1
"""Time that a shadow gets at the end of the limit to report, and the share of its time: it goes through its trace."""

Work: TypeAlias = "Callable[[Shadows], Iterator[Any]]"
"""What is done in the nursery: begins shadows, takes their readings, and yields what is told to the user's process."""


def unsupported() -> str | None:
    """Return why there can be no shadow run in this process, None if there can."""
    if not hasattr(os, "fork"):
        return "forecasts need fork(), which this system has not"
    torch: Any = sys.modules.get("torch")
    if sys.platform == "darwin" and torch is not None and torch.backends.mps.is_available():
        return "forecasts need fork(), which is not safe on macOS beside Metal"
    try:
        _card_in_use()
    except Exception as error:  # noqa: BLE001  whatever the device answers with, it is not forecast then
        return f"CUDA is in use in this process and does not answer: {one_sentence(error)}"
    return None


def _card_in_use() -> Card | None:
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    from oomdoctor.sandbox.card import in_use

    return in_use()


class Nursery(Copy):
    """A copy of the user's process that works with shadows.

    Args:
        session: the user's program.
        prepare: restores the start of the cell; called in the forked process, with real tensors, outside of any mode.
        work: what the nursery does; see ``Work``.
        budget: bytes that there are.
        timeout_s: time for all of it.
        workers: how many shadows run at once; None for one per processor, at most four.
        card: the device to run on as if it were here; None for the memory of this machine, and for one that a cell
            asks for in vain.
        waits: whether the caller waits for the end. Then what shadows need is loaded here once, and not in each
            nursery anew; a caller that goes on is not kept waiting for that.
    """

    def __init__(
        self,
        session: Session,
        prepare: Callable[[], None],
        work: Work,
        *,
        budget: int | None,
        timeout_s: float,
        workers: int | None = None,
        waits: bool = True,
        card: Card | None = None,
    ) -> None:
        loads = "oomdoctor.forecast.child" not in sys.modules
        if loads and waits and not reserve.is_limited():  # what is loaded here stays
            from oomdoctor.forecast import child

            child.warm_up()
            loads = False
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        shadows = Shadows(
            *(session, prepare),
            budget=budget,
            timeout_s=timeout_s,
            workers=workers or min(processors, _MOST_WORKERS),
            card=card or _card_in_use(),
        )
        super().__init__(partial(work, shadows), limit_s=timeout_s + _GRACE_S + (_LOADING_S if loads else 0.0))


class Shadows:
    """The shadows of a nursery, so many at once: copies of it, each of which runs one attempt and tells a reading.

    The start of the cell is brought back when the first of them is begun. Where that fails, it is their answer.

    Attributes:
        card: the device that shadows run on, None for the memory of this machine.
    """

    def __init__(
        self,
        session: Session,
        prepare: Callable[[], None],
        *,
        budget: int | None,
        timeout_s: float,
        workers: int,
        card: Card | None = None,
    ) -> None:
        self.card = card
        self._session, self._prepare, self._workers, self._budget = session, prepare, workers, budget
        self._cached = session.accelerator.read().simulated
        self._timeout_s = timeout_s
        self._end: float | None = None
        self._start: Any = None
        self._running: dict[Copy, tuple[Hashable, Attempt]] = {}
        self._answered: list[tuple[Hashable, Reading]] = []

    @property
    def has_room(self) -> bool:
        """Whether another shadow may begin."""
        return len(self._running) + len(self._answered) < self._workers and self.left_s > _REPORT_S

    @property
    def busy(self) -> bool:
        """Whether an answer is still to come."""
        return bool(self._running or self._answered)

    @property
    def left_s(self) -> float:
        """Time that is left for all shadows."""
        return self._timeout_s if self._end is None else self._end - time.monotonic()

    def begin(self, key: Hashable, attempt: Attempt) -> None:
        """Begin a shadow that runs ``attempt``; its answer comes under ``key``."""
        if self._start is None:
            self._bring_back()
        if isinstance(self._start, Reading):
            self._answered.append((key, self._start))
        else:
            self._running[Copy(partial(self._read, attempt), limit_s=self.left_s)] = key, attempt

    def next(self) -> tuple[Hashable, Reading] | None:
        """Return the next answer; None when the time is over, and then no shadow is left."""
        while not self._answered:
            if self.left_s <= 0 or not self._running:
                for shadow in self._running:
                    shadow.end()
                self._running.clear()
                return None
            wait_for((shadow for shadow in self._running if not shadow.over), self.left_s)
            for shadow in list(self._running):
                self._take(shadow)
        return self._answered.pop(0)

    def _bring_back(self) -> None:
        from oomdoctor.forecast import child

        child.warm_up()
        self._end = time.monotonic() + self._timeout_s
        try:
            self._start = child.bring_back(
                *(self._prepare, self._session.namespace, self.card), accelerator=self._session.accelerator
            )
        except ForecastError as error:
            self._start = no_reading(str(error))

    def _read(self, attempt: Attempt) -> Iterator[tuple[Reading, dict[Hashable, Any]]]:
        """Run an attempt, in a shadow; tell what it has noted as well."""
        from oomdoctor.forecast import child
        from oomdoctor.forecast.fake_tensors import taken_down

        reading = child.run(
            *(self._session, attempt, self._start),
            budget=self._budget,
            cached=self._cached,
            card=self.card,
            time_s=self.left_s * (1 - _REPORT_SHARE) - _REPORT_S,
        )
        yield reading, taken_down()

    def _take(self, shadow: Copy) -> None:
        """Take the answer of a shadow, if it is there."""
        from oomdoctor.forecast.fake_tensors import learn

        readings = shadow.poll()
        if not readings and (not shadow.over or shadow.is_late):
            return
        shadow.end()
        key, attempt = self._running.pop(shadow)
        reading, noted = readings[0] if readings else (no_reading(shadow.failed), {})
        learn(noted)
        if reading.lacks is None:
            self._answered.append((key, reading))
            return
        # It asks for a device that this machine has not: what it would need there can be seen all the same.
        if self.card is None:
            from oomdoctor.sandbox.card import not_in_use

            self.card = not_in_use(reading.lacks)
        self.begin(key, attempt)

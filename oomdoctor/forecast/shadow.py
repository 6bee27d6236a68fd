"""The shadows: forked copies of the nursery, each of which runs one attempt and answers with a reading.

Limits: POSIX; tensors in host memory, which is also where those of the virtual accelerator live.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import time
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Final

from oomdoctor.errors import ForecastError
from oomdoctor.forecast.reading import Reading, one_sentence
from oomdoctor.sandbox.fork import forked

if TYPE_CHECKING:
    from oomdoctor.model.session import Attempt, Session
    from oomdoctor.sandbox.card import Card

_REPORT_S: Final = 0.3
_REPORT_SHARE: Final = 0.1
"""Time that a shadow gets at the end of the limit to report, and the share of its time: it goes through its trace."""


class Shadows:
    """The shadows of a nursery: so many at once, each with a pipe of its own.

    The start of the cell is brought back when the first of them is begun. Where that fails, it is their answer.
    """

    def __init__(
        self,
        session: Session,
        prepare: Callable[[], None],
        *,
        budget: int | None,
        cached: bool,
        timeout_s: float,
        workers: int,
        card: Card | None = None,
    ) -> None:
        self._session, self._prepare, self._workers = session, prepare, workers
        self._budget, self._cached, self._timeout_s = budget, cached, timeout_s
        self._end: float | None = None
        self._start: Any = None
        self._card = card
        self._running: dict[int, tuple[int, Hashable, Attempt, bytearray]] = {}
        self._answered: list[tuple[Hashable, Reading]] = []

    @property
    def card(self) -> Card | None:
        """The device that shadows run on, None for the memory of this machine."""
        return self._card

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
            return
        reader, writer = os.pipe()
        pid = forked(keep={writer})  # what is said to the user's process is said by the nursery alone
        if pid == 0:
            self._shadow(attempt, writer)
        os.close(writer)
        self._running[reader] = (pid, key, attempt, bytearray())

    def next(self) -> tuple[Hashable, Reading] | None:
        """Return the next answer; None when the time is over, and then no shadow is left."""
        while not self._answered:
            left = self.left_s
            if left <= 0 or not self._running:
                self._end_all()
                return None
            ready, _, _ = select.select(list(self._running), [], [], left)
            for reader in ready:
                self._read(reader)
        return self._answered.pop(0)

    def _bring_back(self) -> None:
        from oomdoctor.forecast import child

        child.warm_up()
        self._end = time.monotonic() + self._timeout_s
        try:
            self._start = child.bring_back(
                *(self._prepare, self._session.namespace, self._card), accelerator=self._session.accelerator
            )
        except ForecastError as error:
            self._start = Reading(why=str(error))

    def _shadow(self, attempt: Attempt, writer: int) -> None:
        from oomdoctor.forecast import child

        try:
            reading = child.run(
                self._session,
                attempt,
                self._start,
                budget=self._budget,
                cached=self._cached,
                card=self._card,
                time_s=self.left_s * (1 - _REPORT_SHARE) - _REPORT_S,
            )
        except BaseException as error:  # noqa: BLE001  nothing may leave this process but by its pipe
            reading = Reading(why=f"the shadow process failed with {one_sentence(error)}")
        try:
            written(writer, pickle.dumps(reading))
        finally:
            os._exit(0)

    def _read(self, reader: int) -> None:
        pid, key, attempt, received = self._running[reader]
        chunk = os.read(reader, 1 << 16)
        if chunk:
            received += chunk
            return
        del self._running[reader]
        os.close(reader)
        status = os.waitpid(pid, 0)[1]
        reading = pickle.loads(received) if received else Reading(why=_end_of(status))
        if reading.lacks is None:
            self._answered.append((key, reading))
            return
        # It asks for a device that this machine has not: what it would need there can be seen all the same.
        if self._card is None:
            from oomdoctor.sandbox.card import not_in_use

            self._card = not_in_use(reading.lacks)
        self.begin(key, attempt)

    def _end_all(self) -> None:
        for reader, (pid, *_) in self._running.items():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(reader)
        self._running.clear()


def _end_of(status: int) -> str:
    if not os.WIFSIGNALED(status):
        code = os.WEXITSTATUS(status)
        return (
            f"the cell ends its process, with status {code}" if code else "the shadow process ended without an answer"
        )
    name = signal.Signals(os.WTERMSIG(status)).name
    hint = ", perhaps on writing to memory that is shared with other processes" if name == "SIGSEGV" else ""
    return f"the shadow process was ended by {name}{hint}"


def written(writer: int, data: bytes) -> None:
    """Write all of ``data`` into a pipe."""
    while data:
        data = data[os.write(writer, data) :]

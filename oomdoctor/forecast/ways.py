"""Both ways through a cell that asks for a bool which nobody knows.

Which way needs more memory cannot be told beforehand: a generation that ends with its first token, a rejection loop, a
loss that is the best so far. So the shadow is forked at the first such question: it goes on as if the answer were yes,
its copy as if it were no, and the higher of both peaks is the answer. What comes before the question is run once. Of
later questions each of the two gives the answer of its own; what differs between them is not tried.
"""

from __future__ import annotations

import os
import select
import signal
import time
from dataclasses import replace
from typing import Final

from oomdoctor.forecast.reading import OUT_OF_TIME, Reading
from oomdoctor.sandbox import walls
from oomdoctor.sandbox.fork import forked

_REPORT_S: Final = 0.1
"""Time beyond its limit in which the copy may still report."""
_PATIENCE: Final = 3
_LEAST_S: Final = 5.0
"""The copy may take so many times as long as this process did, and so long at the least: a loop may never end there."""
_TOO_LONG: Final = "what comes if values decide otherwise takes too long to be followed"


def _higher(first: Reading, second: Reading | None) -> Reading:
    """Return the reading of the way that needs more.

    A way that ends in an error is not the one that the cell goes, unless both do. One that took too long may need more
    than the other.
    """
    if second is None or second.why == OUT_OF_TIME:
        return first if first.why is not None else replace(first, missed=first.missed or _TOO_LONG)
    if second.why is not None or first.lacks is not None:
        return first
    if first.why is not None:
        return second
    most = max(first, second, key=lambda one: (max(one.peak, one.reserved or 0), one is first))
    return replace(most, cost=max(first.cost, second.cost))


class Ways:
    """The two processes, as each of them sees itself.

    Attributes:
        answer: what is answered in this one.
    """

    def __init__(self) -> None:
        self.answer = True
        self._pid = self._reader = self._writer = -1
        self._begun = self._end = 0.0

    def choose(self) -> bool:
        """Return the answer of this process; the first call forks the other one."""
        if self._pid < 0:
            self._split()
        return self.answer

    def _split(self) -> None:
        timer = signal.getitimer(signal.ITIMER_REAL)
        self._begun = time.monotonic()
        self._end = self._begun + timer[0] + _REPORT_S
        self._reader, self._writer = os.pipe()
        self._pid = self._fork()
        if self._pid == 0:
            os.close(self._reader)
            self.answer = False
            signal.setitimer(signal.ITIMER_REAL, *timer)  # which a fork does not inherit
        else:
            os.close(self._writer)

    def _fork(self) -> int:
        with walls.own_doings():
            return forked(keep={self._writer})

    def joined(self, reading: Reading) -> Reading:
        """Return the reading of the way that needs more; in the copy, say what it read and end."""
        if self._pid < 0:
            return reading
        if self._pid == 0:
            try:
                os.write(self._writer, reading.to_json().encode())
            finally:
                os._exit(0)
        return _higher(reading, self._received())

    def _received(self) -> Reading | None:
        received, took = b"", time.monotonic() - self._begun
        self._end = min(self._end, self._begun + max(_PATIENCE * took, took + _LEAST_S))
        while (left := self._end - time.monotonic()) > 0 and select.select([self._reader], [], [], left)[0]:
            chunk = os.read(self._reader, 1 << 16)
            if not chunk:
                return Reading.from_json(received.decode()) if received else None
            received += chunk
        with walls.own_doings():
            os.kill(self._pid, signal.SIGKILL)
        return None

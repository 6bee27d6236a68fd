"""A time limit that gets through: an exception in the main thread, again and again until it ends the alarm."""

from __future__ import annotations

import signal
from typing import Any, Final

_AGAIN_S: Final = 0.1


def begin_alarm(seconds: float, error: type[BaseException]) -> None:
    """Raise ``error`` in this thread after so many seconds, and every tenth of a second after that."""

    def expire(_number: int, _frame: Any) -> None:
        raise error

    signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)


def end_alarm() -> None:
    """Raise it no more."""
    signal.setitimer(signal.ITIMER_REAL, 0)

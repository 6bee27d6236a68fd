"""A time limit that gets through: an exception in the thread that set it, again and again until it ends the alarm.

By the interval timer of the process; where there is none (Windows) by a thread, which does not get through to a call
that never returns to Python. Whoever started the process ends it then.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from typing import Any, Final

__all__ = ["begin_alarm", "end_alarm"]

_AGAIN_S: Final = 0.1

_ended: threading.Event | None = None


def begin_alarm(seconds: float, error: type[BaseException]) -> None:
    """Raise ``error`` in this thread after so many seconds, and every tenth of a second after that."""
    if not hasattr(signal, "setitimer"):
        _begin_thread(seconds, error)
        return

    def expire(_number: int, _frame: Any) -> None:
        raise error

    signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)


def end_alarm() -> None:
    """Raise it no more."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, 0)
    elif _ended is not None:
        _ended.set()


def _begin_thread(seconds: float, error: type[BaseException]) -> None:
    global _ended
    ended, thread = threading.Event(), ctypes.c_ulong(threading.get_ident())
    _ended = ended

    def expire() -> None:
        wait_s = seconds
        while not ended.wait(wait_s):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(error))
            wait_s = _AGAIN_S

    threading.Thread(target=expire, daemon=True).start()

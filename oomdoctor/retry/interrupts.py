"""Interrupts that come while state is being put back wait until it is: half of it put back would be no state at all."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_back() -> Iterator[None]:
    """Hold SIGINT back while the body runs; it arrives at its end, once.

    Python delivers signals to the main thread alone, so that there is nothing to hold back on another one.
    """
    before = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if before is None:  # or a handler that was set by C, which Python cannot put back
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)

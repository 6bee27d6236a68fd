"""Locks: whether one is held is seen, and told. To put it back could take it from another thread, or stop that one."""

from __future__ import annotations

import re
import threading
from typing import Any, Final

__all__ = ["is_lock", "times_held"]

_LOCK: Final[Any] = type(threading.Lock())
_LOCK_OF_THREAD: Final[Any] = type(threading.RLock())
_COUNT: Final = re.compile(r" count=(\d+)")


def is_lock(cls: type) -> bool:
    """Return whether a class is one of Python's two kinds of locks."""
    return cls is _LOCK or cls is _LOCK_OF_THREAD


def times_held(lock: Any) -> int:
    """Return how many times a lock is held; of one that belongs to its thread, by this thread."""
    if type(lock) is _LOCK:
        return int(lock.locked())
    counted = _COUNT.search(repr(lock)) if lock._is_owned() else None  # Python 3.11 tells it nowhere else
    return 0 if counted is None else int(counted[1])

"""The soft limit on this process's data that oomdoctor sets for a while, beside the one that is the user's own.

``RLIMIT_DATA`` counts private writable memory that is mapped. Its soft value may be lowered and raised again up to the
hard one without any right. What is told of limits elsewhere is what the user has set; ours is never told as theirs.
Ours is known by the bytes within its last page, which the kernel does not look at: also where a program has read it,
and sets it again later.

Limits: Linux alone has a kernel that compares it with mappings (since 4.7). A program that is started while ours is in
force begins with it.

Source: getrlimit(2), ``may_expand_vm`` in mm/mmap.c.
"""

from __future__ import annotations

import mmap
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, NamedTuple

resource: Any
if sys.platform == "linux":
    import resource
    from resource import getrlimit as getrlimit  # whatever the guard tells the program by these names
    from resource import setrlimit
else:  # pragma: no cover
    resource = None

NAME: Final = "RLIMIT_DATA"
_MARK: Final = 0xD0C
_lock = threading.Lock()
_users: tuple[int, int] | None = None
"""Soft and hard value that were the user's when ours was set last; the very pair that puts them back."""
_ours = -1
"""What is in force of ours, below zero for nothing."""


def untold() -> int | None:
    """Tell nothing: nobody looks."""
    return None


left: Callable[[], int | None] = untold
"""Tells how many bytes can still be had below what the kernel ends processes by, None where nobody looks at that."""
room: int | None = None
"""Bytes that ours left when the last cell raised, None where it was not in force."""
unfilled = 0
"""Bytes that ours took for used when the last cell raised, because they were mapped, though nothing was in them."""


class Ceiling(NamedTuple):
    """A limit that the user has asked for above a cell: it is theirs, though it is not set in the system.

    ``limit`` is of what is mapped. What the C library held free when the cell began (``malloc_free``) is no part of
    what the cell may take. Both are in bytes.
    """

    limit: int
    name: str
    malloc_free: int = 0


ceiling: Ceiling | None = None
"""That of the cell which runs, or ran last."""


def users() -> tuple[int, int] | None:
    """Return the user's own soft and hard value in bytes, ``RLIM_INFINITY`` for none; None on other systems.

    Where ours was inherited, and theirs is not known, the hard value is taken for both.
    """
    if resource is None:
        return None
    soft_now, hard = now = getrlimit(resource.RLIMIT_DATA)
    if soft_now % mmap.PAGESIZE != _MARK:
        return now
    return _users if _users is not None and _users[1] == hard else (hard, hard)


def soft() -> int | None:
    """Return the user's own soft value in bytes, None where none is set."""
    own = users()
    return None if own is None or own[0] == resource.RLIM_INFINITY else own[0]


def put(soft_bytes: int) -> bool:
    """Set ours, where the user's own is not lower; return whether ours is in force.

    A program that sets its own meanwhile has the last word: its value is taken for the user's from then on.
    """
    global _users, _ours
    with _lock:
        own = users()
        if own is None:
            return False
        soft_bytes = max(soft_bytes, 0) // mmap.PAGESIZE * mmap.PAGESIZE + _MARK
        if own[0] != resource.RLIM_INFINITY and own[0] <= soft_bytes:
            _put_back()
            return False
        setrlimit(resource.RLIMIT_DATA, (soft_bytes, own[1]))
        _users, _ours = own, soft_bytes
        return True


def lift() -> None:
    """Put the user's own back. It takes no memory to do so."""
    with _lock:
        _put_back()


def lift_in_copy() -> None:
    """Put the user's own back in a forked copy, where another thread may have held the lock."""
    global _lock
    _lock = threading.Lock()
    _put_back()


def is_in_force() -> bool:
    """Return whether ours is in force."""
    return _ours >= 0


def note_room(data: int, not_filled: int) -> None:
    """Note what ours leaves beyond the ``data`` that are mapped, before it is lifted: what was refused was more."""
    global room, unfilled
    room, unfilled = (max(_ours - data, 0), not_filled) if is_in_force() else (None, 0)


def forget() -> None:
    """Forget the limit above a cell, and what a limit of ours has left."""
    global ceiling, room, unfilled
    ceiling, room, unfilled = None, None, 0


def _put_back() -> None:
    global _ours
    own = users() if is_in_force() else None
    if own is not None and own != getrlimit(resource.RLIMIT_DATA):
        setrlimit(resource.RLIMIT_DATA, own)
    _ours = -1

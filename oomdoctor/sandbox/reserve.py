"""The reserve: memory kept back for the moment in which nothing can be had.

A private mapping that is made where a limit on host memory is set or near, and let go first of all when a cell has
failed: the traceback, the look and the diagnosis live in its room. Limits on a process (``RLIMIT_DATA``,
``RLIMIT_AS``) count address space, a memory cgroup and the machine count pages that were touched, so there the
mapping is populated, with pages that the kernel may take back (``MADV_FREE``): a process that runs out there is not
told but ended, and what a program can have with them is the program's. Copies that the process forks do not get it
(``MADV_DONTFORK``), and no figure that is told counts it.

Limits: Linux alone. Elsewhere an address space without a limit makes a failure a matter of the paging file.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

from oomdoctor.model.sizes import MIB
from oomdoctor.sandbox import data_limit

_WANTED: Final = 96 * MIB
"""A diagnosis takes 7 MiB where all was loaded before, and 44 MiB where not, besides the traceback, the display and a
retry's own bookkeeping. Source: resident set around a failure of one Linear layer; `benchmarks/starved.py`.
"""
_LEAST: Final = 8 * MIB
"""Below it nothing is kept for the diagnosis."""
_SHARE_OF_LIMIT: Final = 8
_SHARE_OF_FREE: Final = 4
"""One part in so many: what a limit leaves is the user's first."""
FOR_THREAD: Final = 16 * MIB
"""Room with which a thread begins: its stack, 8 MiB by default, and what the interpreter makes for it."""
FOR_MESSAGES: Final = 3 * MIB
"""What is kept until a failure was answered: ZeroMQ ends the process where a message comes that it has no room for. The
interpreter takes 1 MiB at a time.
"""
_FAILED: Final = ctypes.c_void_p(-1).value

_kept: Final[list[tuple[int, int, int]]] = []
"""Address, size and touched bytes of what is kept: one at most. Whoever takes it out has it alone."""
_NOTHING: Final = 0, 0, 0
_owner = 0
_released = 0
_most_resident = 0
"""Bytes of what is kept that were resident when they were last counted: until memory is kept anew they become fewer."""


def take(free: int, limit: int, *, populated: bool) -> int:
    """Keep memory back, where no more than ``FOR_MESSAGES`` is kept; return how much is kept now, in bytes.

    ``free`` bytes can still be had below ``limit``; its pages are ``populated`` where the limit counts pages.
    """
    global _owner, _released, _most_resident
    if address_space() > FOR_MESSAGES:
        return address_space()
    let_go()
    _owner = os.getpid()
    size = min(_WANTED, limit // _SHARE_OF_LIMIT, free // _SHARE_OF_FREE) // mmap.PAGESIZE * mmap.PAGESIZE
    libc = _libc()
    if size < _LEAST:
        size = FOR_MESSAGES if size >= FOR_MESSAGES else 0
    if libc is None or not size:
        return 0
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (mmap.MAP_POPULATE if populated else 0)
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if address == _FAILED:
        return 0
    libc.madvise(address, size, mmap.MADV_DONTFORK)
    if populated:
        libc.madvise(address, size, mmap.MADV_FREE)
    _kept.append((address, size, size if populated else 0))
    _released, _most_resident = 0, size if populated else 0
    return size


def let_go(keep: int = 0) -> None:
    """Give it back, but for ``keep`` bytes. It takes no memory to do so.

    Nothing is given back twice, whatever interrupts this or runs beside it: another's memory may lie there by then.
    """
    global _released
    try:
        address, size, touched = _kept.pop()
    except IndexError:
        return
    if _owner != os.getpid():
        return
    given = max(size - keep, 0)
    if given < size:
        _kept.append((address + given, size - given, min(touched, size - given)))
    if given:
        _libc().munmap(address, given)
        _released += given


def give_up() -> None:
    """Give all of it to the program: nothing is kept back from what it does next."""
    global _released
    let_go()
    _released = 0


def has_room(size: int) -> bool:
    """Return whether ``size`` bytes of address space can be had now: what a thread needs to begin, for one."""
    # Limits of a process count private mappings alone; Windows has no flags.
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    try:
        mmap.mmap(-1, size, **private).close()
    except OSError:
        return False
    return True


def is_limited() -> bool:
    """Return whether a limit on host memory is set for this process, or was set or near when memory was kept back."""
    return of_process() is not None or _owner == os.getpid()


def address_space() -> int:
    """Return how many bytes of this process's address space are kept back."""
    return _own()[1]


def released() -> int:
    """Return how many bytes were kept back until they were given back, and are not kept again."""
    return _released


def resident() -> int:
    """Return how many bytes of this process's resident set are kept back, those that the kernel has not taken."""
    global _most_resident
    address, _, touched = _own()
    pages = ctypes.create_string_buffer(touched // mmap.PAGESIZE)
    if touched:
        _libc().mincore(address, touched, pages)
    _most_resident = pages.raw.count(b"\1") * mmap.PAGESIZE
    return _most_resident


def most_resident() -> int:
    """Return what ``resident`` returns at most; to count takes 0.3 ms."""
    return min(_most_resident, _own()[2])


def process_resident() -> int:
    """Return the resident set of this process, without what is kept back. Linux alone tells."""
    return _pages(1) * mmap.PAGESIZE - resident()


def of_process() -> tuple[int, int] | None:
    """Return ``(free, limit)`` of the strictest limit on this process, in bytes; None where the user has set none."""
    if sys.platform != "linux":
        return None
    import resource

    data, space = data_limit.soft(), data_limit.getrlimit(resource.RLIMIT_AS)[0]
    if data is None and space == resource.RLIM_INFINITY:
        return None
    limits = [] if data is None else [(data, 5)]
    limits += [] if space == resource.RLIM_INFINITY else [(space, 0)]
    return min((max(soft - _pages(column) * mmap.PAGESIZE, 0), soft) for soft, column in limits)


def _pages(column: int) -> int:
    """Return a column of ``statm``: address space, resident set, or data and stack. Source: proc_pid_statm(5)."""
    with open("/proc/self/statm", "rb", buffering=0) as file:  # noqa: PTH123 - it is read beside each cell
        return int(file.read().split()[column])


def _own() -> tuple[int, int, int]:
    """Return what is kept and this process's, zeros for nothing: a copy that was forked has nothing at that address."""
    return next(iter(_kept), _NOTHING) if _owner == os.getpid() else _NOTHING


@cache
def _libc() -> Any:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    size, number = ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes = (ctypes.c_void_p, size, number, number, number, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, size)
    libc.mincore.argtypes = (ctypes.c_void_p, size, ctypes.c_char_p)
    libc.madvise.argtypes = (ctypes.c_void_p, size, number)
    return libc


# Large blocks of malloc -----------------------------------------------------------------------------------------------

# glibc takes a block from its heap once one as large was freed, up to 32 MiB. What lies between blocks in use there can
# be neither given back nor joined, and what an aligned block leaves is too small for the next one of its size. A limit
# on the process counts all of it: three steps of a small GPT leave 950 MiB of address space where 330 MiB do, and no
# smaller batch fits into what is left. A mapping of its own goes back whole; that its pages are new each time was not
# measurable. Source: mallopt(3) on ``M_MMAP_THRESHOLD``; ``DEFAULT_MMAP_THRESHOLD_MAX`` and ``free`` in malloc.c of
# glibc.

_TRIM, _MMAP = -1, -3
"""``M_TRIM_THRESHOLD`` and ``M_MMAP_THRESHOLD``."""
_TUNABLES: Final = "GLIBC_TUNABLES"
_APART: Final = MIB
_MOST: Final = 32 * MIB
"""What the threshold grows to by itself in a program with large tensors; what may be free at the top is twice that."""


_is_apart = False


def keep_large_blocks_apart() -> None:
    """Have blocks of 1 MiB and more be mapped from now on, where nobody has said otherwise by the environment."""
    global _is_apart
    libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    is_set = [name for name in os.environ if name.startswith("MALLOC_")] or "malloc" in os.environ.get(_TUNABLES, "")
    if not _is_apart and not is_set and hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
        libc.mallopt(_MMAP, _APART)
        _is_apart = True


def let_large_blocks_join() -> None:
    """Have blocks come from the heap again as they do once a program has freed large ones."""
    global _is_apart
    if _is_apart:
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP, _MOST)
        libc.mallopt(_TRIM, 2 * _MOST)
        _is_apart = False


@contextlib.contextmanager
def large_blocks_apart() -> Iterator[None]:
    """Run the body with large blocks apart where host memory is limited."""
    if _is_apart or not is_limited():
        yield
        return
    keep_large_blocks_apart()
    try:
        yield
    finally:
        let_large_blocks_join()

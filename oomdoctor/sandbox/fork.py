"""A fork whose copy is alone: one thread, and no read position, lock or socket in common with the process it is of.

Every copy of the user's process is made here. What a copy and its origin would share otherwise:

- *Pools of threads.* OpenMP's does not survive a fork, and a parallel region in the copy would wait for it for ever. So
  every parallel region there has one thread.
- *Positions in files and streams.* What the copy reads, the user's process would miss. So files are opened anew at
  the position that they have, and a pipe, socket or terminal cannot be read at all.
- *Memory shared with others*, with the locks in it. The copy gets one of its own, with the same content.

Limits: shared memory is found in ``/proc``, which is Linux's.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import random
import signal
import stat
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Final

from oomdoctor.sandbox.openmp import keep_one_thread

MOST_SCORE: Final = 1000
CANNOT_BE_READ: Final = "a pipe, socket or terminal cannot be read in a copy of the process"

_MOST_COPIED: Final = 64 << 20
"""Bytes of shared memory that are copied where no file gives them again; writes to what is larger end the copy."""

_MAP_NORESERVE: Final = 0x4000
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_MREMAP_TO: Final = 1 | 2
"""MREMAP_MAYMOVE and MREMAP_FIXED. Source of these: ``linux/mman.h`` and ``asm-generic/mman-common.h``."""

_is_copy = False


def processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def forked(keep: Collection[int] = (), *, prepare: Callable[[], None] | None = None) -> int:
    """Do what ``os.fork`` does; the copy is alone, ignores interrupts and draws what its origin would have drawn.

    It shares the descriptors ``keep`` with its origin, and calls ``prepare`` first.
    """
    # CPython seeds ``random`` anew in every forked process: the end of ``random.py``.
    state, pid = random.getstate(), -1
    with _history_goes_on(), signals_held_back() as came:
        with warnings.catch_warnings():
            # Python 3.12 warns of forks beside threads; the copy touches nothing that another thread may hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            came.clear()
            _be_alone(keep, prepare)
            random.setstate(state)
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return 0
    try:
        for number in came:
            signal.raise_signal(number)
    except BaseException:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # with SIGCHLD ignored, the system reaps it
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        raise
    return pid


@contextlib.contextmanager
def signals_held_back() -> Iterator[set[int]]:
    """Note signals in place of handling them: what a handler raises, in a hook of the fork say, would be lost."""
    came: set[int] = set()
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # others get none
        handlers = {one: kept for one in signal.valid_signals() if callable(kept := signal.getsignal(one))}
    for number in handlers:
        signal.signal(number, lambda number, _: came.add(number))
    try:
        yield came
    finally:
        for number, kept in handlers.items():
            signal.signal(number, kept)


@contextlib.contextmanager
def _history_goes_on() -> Iterator[None]:
    """Let IPython's thread that writes the history live through the fork; the copy writes none.

    IPython ends it before each fork, and begins it again in the next cell. ``Thread.start`` waits without an end for
    a thread that begins and then finds no memory, and a copy is forked where memory ran out.

    Source: ``HistoryManager._stop_thread``, IPython/core/history.py from 9.2 on.
    """
    manager: Any = getattr(sys.modules.get("IPython.core.history"), "HistoryManager", None)
    if not hasattr(manager, "_stop_thread"):
        yield
        return
    known = manager._instances
    manager._instances = type(known)()
    try:
        yield
    finally:
        manager._instances = known


def go_first(more: int) -> None:
    """Raise the score by which the kernel chooses whom it ends where memory is full, for the rest of this process.

    Source: ``oom_score_adj``, proc_pid_oom_score_adj(5).
    """
    path = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError, ValueError):
        path.write_text(str(min(int(path.read_text(encoding="ascii")) + more, MOST_SCORE)), encoding="ascii")


def is_copy() -> bool:
    """Tell whether this process is a copy, in which nothing needs to be put back."""
    return _is_copy


def is_severed(error: BaseException) -> bool:
    """Whether ``error`` is what a copy gets where it reads from a pipe, a socket or a terminal."""
    return isinstance(error, OSError) and error.errno in (errno.EBADF, errno.ENOTSOCK)


def _be_alone(keep: Collection[int], prepare: Callable[[], None] | None) -> None:
    global _is_copy
    _is_copy = True
    try:
        if prepare is not None:
            prepare()
        keep_one_thread()
        _own_shared_memory()
        _own_descriptors(keep)
    except BaseException:  # noqa: BLE001  nothing may run on in the copy as if it were the user's process
        os._exit(1)


def _mappings() -> Iterator[tuple[int, int, str, int, int, str]]:
    """Yield what is mapped into this process: begin, end, rights, offset in the file, inode and place of the file."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return
    for line in maps.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        span, rights, offset, _device, inode, *place = line.split(maxsplit=5)
        begin, end = (int(part, 16) for part in span.split("-"))
        yield begin, end, rights, int(offset, 16), int(inode), "".join(place)


def _own_shared_memory() -> None:
    """Replace memory that others see by private memory of the same content.

    A file is mapped anew, so that pages are copied only when they are written to. What is not a file, as that of a
    device, and what is too large to be copied, becomes read-only.
    """
    shared = [mapping for mapping in _mappings() if mapping[2][1] == "w" and mapping[2][3] == "s"]
    if not shared:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    files, copied = _open_files(), 0
    for begin, end, _, offset, inode, place in shared:
        size, rights = end - begin, mmap.PROT_READ | mmap.PROT_WRITE
        source = _opened(place, inode, files)
        if source is not None:
            own = libc.mmap(None, size, rights, mmap.MAP_PRIVATE | _MAP_NORESERVE, source, offset)
            os.close(source)
        elif place.endswith("(deleted)") and copied + size <= _MOST_COPIED:
            copied += size
            own = libc.mmap(None, size, rights, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
            if own != _MAP_FAILED and not _filled(own, begin, size):
                own = _MAP_FAILED
        else:
            own = _MAP_FAILED
        if own == _MAP_FAILED or libc.mremap(own, size, size, _MREMAP_TO, begin) == _MAP_FAILED:
            libc.mprotect(begin, size, mmap.PROT_READ)


def _open_files() -> dict[tuple[str, int], Path]:
    """Return the paths by which open files can be opened again, by the names and inodes that they are mapped under."""
    found = {}
    for path in _descriptors():
        with contextlib.suppress(OSError):
            found[str(path.readlink()), path.stat().st_ino] = path
    return found


def _opened(place: str, inode: int, files: dict[tuple[str, int], Path]) -> int | None:
    """Open the regular file that is mapped, None where it is none or cannot be opened."""
    for path in filter(None, (Path(place), files.get((place, inode)))):
        with contextlib.suppress(OSError):
            found = path.stat()
            if stat.S_ISREG(found.st_mode) and found.st_ino == inode:
                return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return None


def _filled(address: int, begin: int, size: int) -> bool:
    """Copy memory, and return whether all of it could be read; of a file that was cut, the end cannot."""
    target = (ctypes.c_char * size).from_address(address)
    with contextlib.suppress(OSError), open("/proc/self/mem", "rb", buffering=0) as memory:  # noqa: PTH123
        memory.seek(begin)
        return memory.readinto(target) == size
    return False


def _descriptors() -> list[Path]:
    return list(Path("/dev/fd").iterdir())


def _own_descriptors(keep: Collection[int]) -> None:
    """Open files anew, for reading; sever the rest: what is written vanishes, and reading raises an error."""
    severed = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    for path in _descriptors():
        number = int(path.name)
        if number not in keep and number != severed:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed
                _own_descriptor(path, number, severed)
    os.close(severed)
    sys.stdout = sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  (until the process ends)


def _own_descriptor(path: Path, number: int, severed: int) -> None:
    import fcntl  # which Windows has not

    found, inherited = os.fstat(number), os.get_inheritable(number)
    mode, kind = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE, stat.S_IFMT(found.st_mode)
    is_read = mode != os.O_WRONLY and number not in (1, 2)
    if kind == stat.S_IFCHR and is_read and (mode == os.O_RDONLY or found.st_rdev == Path(os.devnull).stat().st_rdev):
        if not os.isatty(number):
            return  # /dev/null and its like have no position
    elif kind in (stat.S_IFREG, stat.S_IFDIR) and is_read:
        with contextlib.suppress(OSError):
            own = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            os.lseek(own, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
            os.dup2(own, number, inherited)
            os.close(own)
            return
    os.dup2(severed, number, inherited)

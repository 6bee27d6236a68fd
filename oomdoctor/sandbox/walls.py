"""The walls around a shadow process: it computes, and nothing that it does reaches the world.

What was open is severed when the process is forked (see ``fork``). Two layers come on top, each for what the other
cannot see: Landlock, where the kernel has it, refuses writes, connections and signals of compiled code as well; an
audit hook refuses what Python code tries, with a reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, Final


class Blocked(PermissionError):
    """Something that a shadow run must not do."""


def raise_limits() -> None:
    """Lift the soft limits of memory, which the program to be judged may be running up against."""
    import resource

    for limit in (resource.RLIMIT_DATA, resource.RLIMIT_AS):
        _soft, hard = resource.getrlimit(limit)
        resource.setrlimit(limit, (hard, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    # Should the machine run out of memory, this process is to go, not the user's.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def bound_memory() -> None:
    """Let this process take half of what the machine has left, so that it ends before others have to."""
    if not sys.platform.startswith("linux"):
        return
    import resource

    import psutil

    most = psutil.Process().memory_info().data + psutil.virtual_memory().available // 2
    _soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def wall_off() -> None:
    """Keep this process from changing files, from the network, and from the signals meant for its parent."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in ("SIGTERM", "SIGCHLD"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    if tempfile.tempdir is None:  # modules ask for it when they are loaded, and finding one out would be a write
        tempfile.tempdir = os.environ.get("TMPDIR", "/tmp")
    _restrict_by_landlock()


_SYS_CREATE_RULESET: Final = 444
_SYS_ADD_RULE: Final = 445
_SYS_RESTRICT_SELF: Final = 446
_PR_SET_NO_NEW_PRIVS: Final = 38
_WRITE_FILE: Final = 1 << 1
_CHANGES: Final = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))
"""LANDLOCK_ACCESS_FS_*: write a file, remove, make. Source: ``linux/landlock.h``, ABI 1."""


class _Ruleset(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def _restrict_by_landlock() -> None:
    """Refuse changes of files, connections by TCP and signals outwards, as far as this kernel knows how to."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    abi = libc.syscall(_SYS_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if abi < 1:
        return
    rules = _Ruleset(
        fs=_CHANGES | ((1 << 14) if abi >= 3 else 0),  # truncate
        net=3 if abi >= 4 else 0,  # bind, connect
        scoped=3 if abi >= 6 else 0,  # abstract sockets, signals
    )
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    ruleset = libc.syscall(_SYS_CREATE_RULESET, ctypes.byref(rules), ctypes.c_size_t(size), ctypes.c_uint32(0))
    if ruleset < 0:
        return
    nowhere = os.open(os.devnull, os.O_RDWR)
    exception = _PathBeneath(allowed=_WRITE_FILE, parent_fd=nowhere)
    libc.syscall(_SYS_ADD_RULE, ruleset, 1, ctypes.byref(exception), ctypes.c_uint32(0))
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.syscall(_SYS_RESTRICT_SELF, ruleset, ctypes.c_uint32(0))
    os.close(ruleset)
    os.close(nowhere)


_FORBIDDEN: Final = {
    "socket.connect": "connect to the network",
    "socket.bind": "open a port",
    "socket.sendto": "send to the network",
    "socket.getaddrinfo": "connect to the network",
    "os.kill": "send a signal",
    "os.killpg": "send a signal",
    "sqlite3.connect": "open a database",
    **{f"os.{name}": "start a process" for name in ("system", "exec", "posix_spawn", "spawn", "fork", "forkpty")},
    "subprocess.Popen": "start a process",
    **{f"os.{name}": "change files" for name in ("truncate", "chmod", "chown", "link", "symlink", "rename")},
    **{f"os.{name}": "change files" for name in ("remove", "mkdir", "rmdir")},
}


def forbid() -> None:
    """Refuse from now on, for the rest of this process, what would reach the world from Python code."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in _FORBIDDEN:
            raise Blocked(f"the cell would {_FORBIDDEN[event]}, which a forecast must not do")
        if event == "open" and _writes(args) and args[0] != os.devnull:
            raise Blocked(f"the cell would write to {args[0]}, which a forecast must not do")

    sys.addaudithook(hook)


def _writes(args: tuple[Any, ...]) -> bool:
    _path, mode, flags = args
    if isinstance(mode, str):
        return bool(set(mode) & set("wax+"))
    return isinstance(flags, int) and flags & os.O_ACCMODE != os.O_RDONLY

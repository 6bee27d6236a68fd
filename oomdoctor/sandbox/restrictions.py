"""The walls around a dry run: it computes, and nothing that it does reaches the world.

What was open is severed when the process is forked (see ``fork``). Two layers come on top, each for what the other
cannot see: Landlock, where the kernel has it, refuses writes, connections and signals of compiled code as well; an
audit hook refuses what Python code tries, with a reason. What cells do all the time is not refused but does nothing:
they write to no file, show nothing, ask nothing and start no thread. Nothing is ever put back.
"""

from __future__ import annotations

import builtins
import ctypes
import io
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from typing import Any, Final

from oomdoctor.sandbox import data_limit, fork


class Blocked(PermissionError):
    """Something that a dry run must not do."""


def raise_limits() -> None:
    """Lift the soft limits of memory, which the program to be judged may be running up against.

    Where a memory cgroup leaves less, that is the limit: the copy is told then, and not ended.
    """
    import resource

    for limit in (resource.RLIMIT_DATA, resource.RLIMIT_AS):
        _soft, hard = resource.getrlimit(limit)
        resource.setrlimit(limit, (hard, hard))
    if (left := data_limit.left()) is not None:
        _limit_data(left)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    fork.go_first(fork.MOST_SCORE)  # and not the user's process


def bound_memory(processes: int = 1) -> None:
    """Let this process, one of so many, take its share of what the machine has left: half of it for one alone."""
    if not sys.platform.startswith("linux"):
        return
    import psutil

    available, left = psutil.virtual_memory().available, data_limit.left()
    _limit_data((available if left is None else min(available, left)) // (1 + processes))


def _limit_data(more: int) -> None:
    """Let this process map so many bytes more."""
    import resource

    import psutil

    most = psutil.Process().memory_info().data + more
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


# Output, questions and files ------------------------------------------------------------------------------------------

# The modules as things whose attributes may be assigned.
_builtins: Any = builtins
_io: Any = io
_time: Any = time


def keep_to_itself(shell: Any) -> None:
    """Turn writes into none and keep output, questions and windows from the user, for the rest of this process."""
    torch: Any = sys.modules["torch"]
    # The pool of OpenMP did not survive the fork, and to wait for it would never end.
    torch.set_num_threads = torch.set_num_interop_threads = do_nothing
    if (tqdm := sys.modules.get("tqdm.std")) is not None:  # which has a thread
        tqdm.tqdm.monitor_interval = 0
    _write_nothing()
    _say_nothing(shell)


def orphan_workers() -> None:
    """Keep this process from shutting down the workers of its parent when it drops a loader's iterator."""
    from torch.utils.data import dataloader

    iterator: Any = dataloader._MultiProcessingDataLoaderIter
    iterator._shutdown_workers = iterator.__del__ = lambda self: None


def fetch_here(loader: Any) -> None:
    """Have a ``DataLoader`` fetch its batches in this process."""
    settings = {"num_workers": 0, "pin_memory": False, "persistent_workers": False, "timeout": 0}
    loader.__dict__.update(
        settings, prefetch_factor=None, worker_init_fn=None, _DataLoader__multiprocessing_context=None
    )


def do_nothing(*_args: Any, **_kwargs: Any) -> None:
    """Do nothing."""


_FILE_CALLS: Final = ("mkdir", "makedirs", "remove", "unlink", "rename", "replace", "rmdir", "removedirs", "symlink")
_TREE_CALLS: Final = ("copy", "copy2", "copyfile", "copytree", "move", "rmtree")


def _write_nothing() -> None:
    """Turn writes into none, so that a cell which saves its model is followed to its end."""
    opened = builtins.open

    def read_only(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not set(mode) & set("wax+"):
            return opened(file, mode, *args, **kwargs)
        kwargs.pop("opener", None)
        return opened(os.devnull, mode.replace("x", "w"), *args, **kwargs)

    _builtins.open = _io.open = read_only
    for name in _FILE_CALLS:
        setattr(os, name, do_nothing)
    for name in _TREE_CALLS:
        setattr(shutil, name, do_nothing)
    slept = time.sleep
    # A thread beside the program's, as of a progress bar, would take all its time for itself.
    _time.sleep = lambda seconds: None if threading.current_thread() is threading.main_thread() else slept(seconds)


def _say_nothing(shell: Any) -> None:
    """Keep output, questions and windows from the user."""

    def ask(*_args: Any) -> str:
        raise EOFError("the cell asks for input")

    _builtins.input = ask
    sys.displayhook = do_nothing
    for name, function in (("matplotlib.pyplot", "show"), ("jupyter_client.session", "Session.send")):
        owner = sys.modules.get(name)
        *path, last = function.split(".")
        for part in path:
            owner = getattr(owner, part, None)
        if owner is not None:
            setattr(owner, last, do_nothing)
    if shell is not None:
        for name in ("system", "getoutput", "run_line_magic", "run_cell_magic"):
            object.__setattr__(shell, name, do_nothing)
        publisher = getattr(shell, "display_pub", None)
        if publisher is not None:
            object.__setattr__(publisher, "publish", do_nothing)
            object.__setattr__(publisher, "clear_output", do_nothing)

"""What a copy of the process keeps to itself: it writes to no file, shows nothing, asks nothing, starts no thread.

Everything here is done to a process that was forked to be thrown away; nothing is ever put back.
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
import sys
import threading
import time
from typing import Any, Final

import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

# The modules as things whose attributes may be assigned.
_torch: Any = torch
_builtins: Any = builtins
_io: Any = io
_time: Any = time


def keep_to_itself(shell: Any) -> None:
    """Turn writes into none and keep output, questions and windows from the user, for the rest of this process.

    Args:
        shell: the IPython shell, None in a script.
    """
    # The pool of OpenMP did not survive the fork, and to wait for it would never end.
    _torch.set_num_threads = _torch.set_num_interop_threads = _nothing
    if (tqdm := sys.modules.get("tqdm.std")) is not None:  # which has a thread
        tqdm.tqdm.monitor_interval = 0
    _write_nothing()
    _say_nothing(shell)


def orphan_workers() -> None:
    """Keep this process from shutting down the workers of its parent when it drops a loader's iterator."""
    iterator: Any = _MultiProcessingDataLoaderIter
    iterator._shutdown_workers = iterator.__del__ = lambda self: None


def _nothing(*_args: Any, **_kwargs: Any) -> None:
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
        setattr(os, name, _nothing)
    for name in _TREE_CALLS:
        setattr(shutil, name, _nothing)
    slept = time.sleep
    # A thread beside the program's, as of a progress bar, would take all its time for itself.
    _time.sleep = lambda seconds: None if threading.current_thread() is threading.main_thread() else slept(seconds)


def _say_nothing(shell: Any) -> None:
    """Keep output, questions and windows from the user."""

    def ask(*_args: Any) -> str:
        raise EOFError("the cell asks for input")

    _builtins.input = ask
    sys.displayhook = _nothing
    for name, function in (("matplotlib.pyplot", "show"), ("jupyter_client.session", "Session.send")):
        owner = sys.modules.get(name)
        *path, last = function.split(".")
        for part in path:
            owner = getattr(owner, part, None)
        if owner is not None:
            setattr(owner, last, _nothing)
    if shell is not None:
        for name in ("system", "getoutput", "run_line_magic", "run_cell_magic"):
            object.__setattr__(shell, name, _nothing)
        publisher = getattr(shell, "display_pub", None)
        if publisher is not None:
            object.__setattr__(publisher, "publish", _nothing)
            object.__setattr__(publisher, "clear_output", _nothing)

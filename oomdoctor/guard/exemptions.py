"""What runs without the guard's limit: mappings of files, the start of programs and threads, looks at the limit itself.

The kernel counts ``np.memmap`` and ``torch.load(..., mmap=True)`` as data, though their pages are the file's and can be
dropped until they are written to. A program that is started inherits the limit of the moment, without the thread that
would move it. The stack of a thread is mapped as a whole, and little of it is ever used. And whoever asks for the limit
of data is to be told, and to set, their own. While the guard is there, the functions that do so are wrapped. No module
is loaded for it: a module's are wrapped at the first cell after its import.

Limits: what a program maps by ``mmap.mmap(..., access=ACCESS_COPY)`` itself is counted; what code in C starts inherits.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

from oomdoctor.sandbox import data_limit

_FILES: Final = frozenset({("numpy", "memmap", "__new__"), ("torch", "UntypedStorage", "from_file")})
"""Module, class and function of what maps files."""
_SYSTEM: Final = ("os", "", "system")
"""It lasts as long as its program does."""
_SITES: Final = (
    *_FILES,
    _SYSTEM,
    ("os", "", "posix_spawn"),
    ("subprocess", "", "_fork_exec"),
    ("_posixsubprocess", "", "fork_exec"),  # by which multiprocessing spawns
    *(("threading", "", name) for name in ("_start_new_thread", "_start_joinable_thread")),
    *(("resource", "", name) for name in ("getrlimit", "setrlimit", "prlimit")),
)
_ABSENT: Final = object()
_wrapped: Final[dict[tuple[str, str], tuple[Any, Any, Any]]] = {}
"""Owner, what stood there before, and the wrapper."""
_seen: Final[set[tuple[str, str, str]]] = set()
_apart: list[Callable[[bool], AbstractContextManager[None]]] = []


def install(apart: Callable[[bool], AbstractContextManager[None]]) -> None:
    """Wrap the functions of what is loaded.

    Args:
        apart: makes the context that they run in, and is told whether they map a file.
    """
    _apart[:] = [apart]
    install_late()


def install_late() -> None:
    """Wrap those of what was loaded since."""
    if len(_seen) == len(_SITES) or not _apart:
        return
    for site in _SITES:
        module, kind, name = site
        loaded = sys.modules.get(module) if site not in _seen else None
        owner = getattr(loaded, kind, None) if kind else loaded
        function = getattr(owner, name, None)
        if loaded is not None and (owner is not None or not kind):
            _seen.add(site)
        if owner is None or function is None:
            continue
        make = _released if site == _SYSTEM else functools.partial(_in_room, is_file=site in _FILES)
        before, wrapper = vars(owner).get(name, _ABSENT), make(function)
        if not kind:
            wrapper.__module__ = module  # where pickle finds it
        setattr(owner, name, staticmethod(wrapper) if kind else wrapper)
        _wrapped[module, name] = owner, before, vars(owner)[name]


def remove() -> None:
    """Put the functions back."""
    _apart.clear()
    for (_, name), (owner, before, wrapper) in _wrapped.items():
        if vars(owner).get(name) is wrapper:
            delattr(owner, name) if before is _ABSENT else setattr(owner, name, before)
    _wrapped.clear()
    _seen.clear()


def _in_room(function: Callable[..., Any], *, is_file: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not _apart:
            return function(*args, **kwargs)
        with _apart[0](is_file):
            return function(*args, **kwargs)

    return wrapper


def _released(system: Callable[..., int]) -> Callable[..., int]:
    """Return ``os.system`` whose shell sets the user's own limit: ours stays in force for what runs beside it."""

    @functools.wraps(system)
    def wrapper(command: Any) -> int:
        if not data_limit.is_in_force():
            return system(command)
        own = data_limit.soft()
        limit = "unlimited" if own is None else own // 1024
        return system(f"ulimit -S -d {limit} 2>/dev/null; ".encode() + os.fsencode(command))

    return wrapper

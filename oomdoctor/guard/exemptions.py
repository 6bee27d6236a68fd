"""What runs without the guard's limit: private mappings of files, and the start of programs.

The kernel counts ``np.memmap`` and ``torch.load(..., mmap=True)`` as data, though their pages are the file's and can be
dropped until they are written to. A program that is started inherits the limit of the moment, without the thread that
would move it. While the guard is there, the functions that do so are wrapped. No module is loaded for it: a module's
are wrapped at the first cell after its import.

Limits: what a program maps by ``mmap.mmap(..., access=ACCESS_COPY)`` itself is counted; what code in C starts inherits.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

_SITES: Final = (
    ("numpy", "memmap", "__new__"),
    ("torch", "UntypedStorage", "from_file"),
    ("subprocess", "", "_fork_exec"),
    ("_posixsubprocess", "", "fork_exec"),  # by which multiprocessing spawns
    ("os", "", "posix_spawn"),
    ("os", "", "system"),
)
"""Module, class and function."""
_ABSENT: Final = object()
_wrapped: Final[dict[tuple[str, str], tuple[Any, Any, Any]]] = {}
"""Owner, what stood there before, and the wrapper."""
_apart: list[Callable[[], AbstractContextManager[None]]] = []


def install(apart: Callable[[], AbstractContextManager[None]]) -> None:
    """Wrap the functions of what is loaded; ``apart`` makes the context that they run in."""
    _apart[:] = [apart]
    install_late()


def install_late() -> None:
    """Wrap those of what was loaded since."""
    if len(_wrapped) == len(_SITES) or not _apart:
        return
    for module, kind, name in _SITES:
        loaded = sys.modules.get(module) if (module, name) not in _wrapped else None
        owner = getattr(loaded, kind, None) if kind else loaded
        function = getattr(owner, name, None)
        if owner is None or function is None:
            continue
        before, wrapper = vars(owner).get(name, _ABSENT), _in_room(function)
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


def _in_room(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not _apart:
            return function(*args, **kwargs)
        with _apart[0]():
            return function(*args, **kwargs)

    return wrapper

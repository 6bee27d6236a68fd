"""Lets private mappings of files pass by the guard's limit: ``np.memmap`` and ``torch.load(..., mmap=True)``.

The kernel counts them as data, though their pages are the file's and can be dropped until they are written to. While
the guard is there, the two functions that make such mappings are wrapped: ``numpy.memmap.__new__`` and
``torch.UntypedStorage.from_file``. No module is loaded for it: torch's is wrapped at the first cell after its import.

Limits: what a program maps by ``mmap.mmap(..., access=ACCESS_COPY)`` itself is counted.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

_SITES: Final = (("numpy", "memmap", "__new__"), ("torch", "UntypedStorage", "from_file"))
_ABSENT: Final = object()
_wrapped: Final[dict[str, tuple[Any, str, Any, Any]]] = {}
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
        owner = getattr(sys.modules.get(module), kind, None) if module not in _wrapped else None
        function = getattr(owner, name, None)
        if owner is None or function is None:
            continue
        before = vars(owner).get(name, _ABSENT)
        wrapper = staticmethod(_in_room(function))
        setattr(owner, name, wrapper)
        _wrapped[module] = owner, name, before, wrapper


def remove() -> None:
    """Put the functions back."""
    _apart.clear()
    for owner, name, before, wrapper in _wrapped.values():
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

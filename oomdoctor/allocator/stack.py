"""This thread's stack of torch dispatch modes: modes put on, taken out from wherever they are, or all set aside.

Only the base class's ``__enter__`` and ``__exit__`` are used, which do the bookkeeping of the stack and nothing of what
a mode does of its own when a program enters or leaves it.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _get_current_dispatch_mode_stack

if TYPE_CHECKING:
    from collections.abc import Iterator

_BASE: Final[Any] = TorchDispatchMode


def holds(mode: TorchDispatchMode) -> bool:
    """Whether ``mode`` is on in this thread."""
    return any(mode is other for other in _get_current_dispatch_mode_stack())


def makes_fakes() -> bool:
    """Whether a ``FakeTensorMode`` is on; it stands below all other modes, whenever it was entered."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def put_on(mode: TorchDispatchMode) -> None:
    """Put ``mode`` on top."""
    _BASE.__enter__(mode)


def take_out(mode: TorchDispatchMode) -> None:
    """Take ``mode`` out and leave the others, those above it included, as they are."""
    aside: list[TorchDispatchMode] = []
    while (top := _get_current_dispatch_mode()) is not None:
        _BASE.__exit__(top, None, None, None)
        if top is mode:
            break
        aside.append(top)
    for other in reversed(aside):
        _BASE.__enter__(other)


@contextmanager
def set_aside() -> Iterator[None]:
    """Run a block with no dispatch mode on."""
    aside: list[TorchDispatchMode] = []
    while (top := _get_current_dispatch_mode()) is not None:
        _BASE.__exit__(top, None, None, None)
        aside.append(top)
    try:
        yield
    finally:
        for mode in reversed(aside):
            _BASE.__enter__(mode)

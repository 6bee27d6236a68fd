"""Large blocks of ``malloc``: each a mapping of its own while memory is short.

glibc takes a block from its heap once one as large was freed, up to 32 MiB. What lies between blocks in use there can
be neither given back nor joined, and a limit on the process counts it: the same steps then take a fifth to a third more
than their tensors do. A mapping of its own goes back whole, for the price of touching new pages.

Source: mallopt(3) on ``M_MMAP_THRESHOLD``; ``DEFAULT_MMAP_THRESHOLD_MAX`` and ``free`` in malloc.c of glibc.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from typing import Any, Final

from oomdoctor.model import reserve
from oomdoctor.model.sizes import MIB

__all__ = ["large_blocks_apart"]

_TRIM, _MMAP = -1, -3
"""``M_TRIM_THRESHOLD`` and ``M_MMAP_THRESHOLD``."""
_APART: Final = MIB
_MOST: Final = 32 * MIB
"""What the threshold grows to by itself in a program with large tensors; what may be free at the top is twice that."""


@contextlib.contextmanager
def large_blocks_apart() -> Iterator[None]:
    """Have blocks of 1 MiB and more be mapped where host memory is limited, and nobody has said otherwise."""
    libc: Any = ctypes.CDLL(None) if sys.platform == "linux" and reserve.is_limited() else None
    is_set = "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", "")
    if is_set or not hasattr(libc, "mallopt") or not hasattr(libc, "malloc_trim"):
        yield
        return
    libc.malloc_trim(0)
    libc.mallopt(_MMAP, _APART)
    try:
        yield
    finally:
        libc.mallopt(_MMAP, _MOST)
        libc.mallopt(_TRIM, 2 * _MOST)

"""Large blocks of ``malloc``: each a mapping of its own where memory is limited.

glibc takes a block from its heap once one as large was freed, up to 32 MiB. What lies between blocks in use there can
be neither given back nor joined, and what an aligned block leaves is too small for the next one of its size. A limit on
the process counts all of it: three steps of a small GPT leave 950 MiB of address space where 330 MiB do, and no smaller
batch fits into what is left. A mapping of its own goes back whole; that its pages are new each time was not measurable.

Source: mallopt(3) on ``M_MMAP_THRESHOLD``; ``DEFAULT_MMAP_THRESHOLD_MAX`` and ``free`` in malloc.c of glibc.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from typing import Any, Final

from oomdoctor.model.sizes import MIB
from oomdoctor.sandbox import reserve

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
    if _is_apart or not reserve.is_limited():
        yield
        return
    keep_large_blocks_apart()
    try:
        yield
    finally:
        let_large_blocks_join()

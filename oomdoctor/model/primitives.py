"""Errors of oneDNN, whose words do not tell whether it was memory that was wanting."""

from __future__ import annotations

import mmap
from typing import Final

__all__ = ["is_short_of_memory"]

_WORDS: Final = ("could not create a primitive", "could not execute a primitive")
"""What is left of the status. Source: ``error::wrap_c_api`` in oneDNN's ``include/oneapi/dnnl/dnnl_common.hpp``."""
_ROOM: Final = 64 << 20
"""What a primitive's code and scratchpad have room in: the code takes less than 1 MiB, the scratchpad what it does."""


def is_short_of_memory(exc: BaseException) -> bool:
    """Return whether ``exc`` is oneDNN's, and the system refuses memory while the frames of ``exc`` hold theirs."""
    words = BaseException.__dict__["args"].__get__(exc)
    if type(exc) is not RuntimeError or not words or not str(words[0]).startswith(_WORDS):
        return False
    try:
        mmap.mmap(-1, _ROOM, **_PRIVATE).close()
    except OSError:
        return True
    return False


_PRIVATE: Final[dict[str, int]] = (
    {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
)
"""Limits of a process count private mappings alone; Windows has no flags."""

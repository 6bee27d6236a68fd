"""Errors of oneDNN, which do not tell whether it was memory that was wanting."""

from __future__ import annotations

import mmap
from typing import Final

from oomdoctor.model import reserve

__all__ = ["is_memory_refused", "is_short_of_memory"]

_WORDS: Final = ("could not create a primitive", "could not execute a primitive", "could not create a memory object")
"""What is left of the status. Source: ``error::wrap_c_api`` in oneDNN's ``include/oneapi/dnnl/dnnl_common.hpp``."""
_MARK: Final = "__oomdoctor_short_of_memory__"
_ROOM: Final = 64 << 20
"""What a primitive's code and scratchpad have room in: the code takes less than 1 MiB, the scratchpad what it does."""


def is_short_of_memory(exc: BaseException) -> bool:
    """Return whether ``exc`` is oneDNN's, and the system refuses memory while the frames of ``exc`` hold theirs.

    What was found when it was first asked is noted on ``exc`` and stays: later its frames hold less.
    """
    words = BaseException.__dict__["args"].__get__(exc)
    if type(exc) is not RuntimeError or not words or not str(words[0]).startswith(_WORDS):
        return False
    noted: dict[str, bool] = vars(exc)
    if _MARK not in noted:
        noted[_MARK] = is_memory_refused()
    return noted[_MARK]


def is_memory_refused() -> bool:
    """Return whether the system refuses this process the memory that a primitive has room in, now.

    What was kept back and has been given back since, the primitive did not have.
    """
    try:
        mmap.mmap(-1, _ROOM + reserve.released(), **_PRIVATE).close()
    except OSError:
        return True
    return False


_PRIVATE: Final[dict[str, int]] = (
    {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
)
"""Limits of a process count private mappings alone; Windows has no flags."""

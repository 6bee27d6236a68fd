"""The garbage collector, held back while many objects are made that it would go through for nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[bool]:
    """Have the garbage collector wait; gives whether it was on.

    A snapshot or a look at a failure makes many objects, so the collector would go through all that there are, which
    takes 0.2 s of a large program, and would run finalizers of the user's in its midst. It has its turn right after.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield was_on
    finally:
        if was_on:
            gc.enable()

"""A fork after which the program draws what it would have drawn.

Source: the end of ``random.py`` in CPython, which seeds its generator anew in every forked process.
"""

from __future__ import annotations

import os
import random

__all__ = ["forked"]


def forked() -> int:
    """Do what ``os.fork`` does, and leave the generator of ``random`` as it is."""
    state = random.getstate()
    pid = os.fork()
    if pid == 0:
        random.setstate(state)
    return pid

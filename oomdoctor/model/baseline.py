"""What this process took before the user's program made anything: the interpreter and the modules that are loaded.

It is no cause of a failure, so shares of a limit are shares of what the limit leaves beside it. It is noted at the end
of cells: what a cell has added that loaded modules is theirs, but for what the program is later found to hold of it.
"""

from __future__ import annotations

import sys

_modules = 0
_last = 0
_bare = 0


def note(used: int) -> None:
    """Take note of the bytes that this process uses now."""
    global _modules, _last, _bare
    if len(sys.modules) != _modules:
        _modules, _bare = len(sys.modules), _bare + max(used - _last, 0)
    _last = used


def bare(used: int, held: int) -> int | None:
    """Return what the bare process takes, in bytes; None where it was not noted.

    Args:
        used: that this process uses now; ``held``: what of it is known to be the program's.
    """
    return min(_bare, max(used - held, 0)) if _last else None

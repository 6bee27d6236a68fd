"""What a forked copy of a guarded process begins with: no limit, and the first place in the kernel's choice.

Workers of a DataLoader and of ``multiprocessing`` are such copies. They inherit the limit of the moment, without the
thread that would move it, so it is lifted there. Where the memory of the group runs out all the same, the kernel is to
end a worker and not the notebook.

Limits: hooks of a fork cannot be taken away; without a guard they do nothing. A worker that is started anew, by
``spawn``, is no copy: it begins without the limit (see ``exemptions``), and with the score of the kernel.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

from oomdoctor.sandbox.fork import go_first

_SCORE: Final = 500
_guards: Final[list[Callable[[], bool]]] = []
_is_registered = False


def register(be_a_copy: Callable[[], bool]) -> None:
    """Have ``be_a_copy`` called in each copy that is forked from now on; it tells whether the kernel is to end it."""
    global _is_registered
    _guards.append(be_a_copy)
    if not _is_registered and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_in_copy)
        _is_registered = True


def unregister(be_a_copy: Callable[[], bool]) -> None:
    """Have it called no more."""
    if be_a_copy in _guards:
        _guards.remove(be_a_copy)


def _in_copy() -> None:
    for be_a_copy in _guards:
        if be_a_copy():
            go_first(_SCORE)

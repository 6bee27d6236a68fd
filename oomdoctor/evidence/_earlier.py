"""Errors of before whose tracebacks are still alive: each keeps the frames that it passed through, and their locals.

The interpreter keeps the last one that was shown. When the next is shown, the old one is let go of and yet not freed:
the frame of IPython that ran the cell holds the result of the run, and that the error, so that only the garbage
collector finds it. Errors that the program kept (``except Exception as e: saved = e``) are alive as well, and no name
leads from them to their frames. So at a failure all that the collector knows are looked through.
"""

from __future__ import annotations

import sys
from collections.abc import Container
from typing import Any

from oomdoctor.objects.alive import alive
from oomdoctor.objects.chain import chained, traceback_of

__all__ = ["earlier_errors"]


def earlier_errors(exc: BaseException | None, filenames: Container[str]) -> tuple[BaseException, ...]:
    """Return the errors of before that went through a cell and are alive, that last shown first.

    Args:
        exc: the failure at hand, which is none of them; without one, only what was last shown is looked at.
        filenames: of the code of cells.
    """
    own = {id(link) for link in chained(exc)}
    found: dict[int, BaseException] = {}
    last: Any = getattr(sys, "last_value", None)
    if issubclass(type(last), BaseException) and id(last) not in own:
        found[id(last)] = last
    for error in alive(BaseException) if exc is not None else ():
        if id(error) not in own and _passed(error, filenames):
            found.setdefault(id(error), error)
    return tuple(found.values())


def _passed(error: BaseException, filenames: Container[str]) -> bool:
    traceback: Any = traceback_of(error)
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename in filenames:
            return True
        traceback = traceback.tb_next
    return False

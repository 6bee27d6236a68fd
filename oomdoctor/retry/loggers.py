"""Loggers: their levels and handlers are put back; what was written to a log file is told.

No name of the user's needs to lead to one: they are asked for by their own names, and a handler that a cell adds is
there twice when the cell has run twice.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

from oomdoctor.objects.named import is_installed
from oomdoctor.retry.settings import Setting

__all__ = ["Loggers"]

_Stand = tuple[Any, ...]
_NEW: Final[_Stand] = (logging.NOTSET, True, False, [], [])


class Loggers:
    """All loggers but the root, as a setting, and the sizes of log files.

    Args:
        source: the cell's text.
    """

    def __init__(self, source: str) -> None:
        self._source, self._loaded = source, len(sys.modules)
        self._names = set(logging.root.manager.loggerDict)
        self._files = dict(_sizes())
        self.setting = Setting("loggers", _stands, self._put)

    def lost(self) -> Iterator[str]:
        """Yield a sentence for each log file that was written to."""
        for path, size in _sizes():
            if self._files.get(path, size) != size:
                yield f"the log file {path} was written to"

    def _put(self, before_all: dict[str, _Stand]) -> None:
        """Put back what was changed; one of the user's own that is new is as if nobody had touched it.

        Handlers of a library's logger are left alone: it may have added them itself, and does so once.
        """
        stands = _stands()
        for name in stands.keys() | before_all.keys():
            is_librarys, now = self._is_librarys(name), stands.get(name, _NEW)
            before = before_all.get(name, now if is_librarys and name not in self._names else _NEW)
            if now == before:
                continue
            logger = logging.getLogger(name)
            level, logger.propagate, logger.disabled, handlers, filters = before
            logger.setLevel(level)
            if not is_librarys:
                logger.handlers[:], logger.filters[:] = handlers, filters

    def _is_librarys(self, name: str) -> bool:
        """Return whether a library may have made a logger: it bears its name, or was loaded by the cell."""
        package = name.partition(".")[0]
        if package in sys.modules:
            return is_installed(package)
        is_told = f'"{name}"' in self._source or f"'{name}'" in self._source
        return not is_told and name not in self._names and len(sys.modules) != self._loaded


def _stands() -> dict[str, _Stand]:
    """Return how each logger stands that is not as it was made."""
    return {
        name: (one.level, one.propagate, one.disabled, one.handlers[:], one.filters[:])
        for name, one in logging.root.manager.loggerDict.items()
        if not isinstance(one, logging.PlaceHolder)
        and (one.level or one.handlers or not one.propagate or one.disabled or one.filters)
    }


def _sizes() -> Iterator[tuple[str, int]]:
    for handler in [reference() for reference in list(vars(logging)["_handlerList"])]:
        if isinstance(handler, logging.FileHandler):
            with suppress(OSError):
                yield handler.baseFilename, os.stat(handler.baseFilename).st_size  # noqa: PTH116 - asked before each cell

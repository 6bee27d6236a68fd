"""What a cell changes beside its own objects: settings of the process and of torch, functions of modules, log files.

Settings and functions are put back; what was written to a log file is told.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Final

__all__ = ["Surroundings"]

_PATCHED: Final = frozenset({FunctionType, BuiltinFunctionType, type})


def _torch_settings(torch: Any) -> list[tuple[Callable[..., Any], Any]]:
    """Return how to set each of torch's settings, with what it is set to."""
    return [
        (torch.set_grad_enabled, torch.is_grad_enabled()),
        (torch.set_default_dtype, torch.get_default_dtype()),
        (torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled()),
    ]


class Surroundings:
    """What was set when it was taken.

    Args:
        modules: those that names of the user's lead to.
    """

    def __init__(self, modules: Iterable[ModuleType]) -> None:
        self._environ = os.environ.copy()
        self._filters = list(warnings.filters)
        self._path = list(sys.path)
        # Only what is put back: whatever else a module holds, as ``sys`` does a traceback, must not live on for this.
        self._modules = [
            (module, {name: value for name, value in vars(module).items() if type(value) in _PATCHED})
            for module in modules
        ]
        self._torch = _torch_settings(sys.modules["torch"]) if "torch" in sys.modules else []
        self._logs = dict(_log_sizes())

    def lost(self) -> Iterator[str]:
        """Yield a sentence for each log file that was written to."""
        for path, size in _log_sizes():
            if self._logs.get(path, size) != size:
                yield f"the log file {path} was written to"

    def restore(self) -> None:
        """Put settings back, and functions and classes of modules that others stand in for now."""
        if os.environ != self._environ:
            os.environ.clear()
            os.environ.update(self._environ)
        if warnings.filters != self._filters:
            warnings.resetwarnings()  # tells those who remember what was filtered; the list itself stays
            list.extend(vars(warnings)["filters"], self._filters)
        if sys.path != self._path:
            sys.path[:] = self._path
        for module, before in self._modules:
            now = vars(module)
            for name, value in before.items():
                if now.get(name) is not value:
                    now[name] = value
        for put, value in self._torch:
            put(value)


def _log_sizes() -> Iterator[tuple[str, int]]:
    for handler in [reference() for reference in list(vars(logging)["_handlerList"])]:
        if isinstance(handler, logging.FileHandler):
            with suppress(OSError):
                yield handler.baseFilename, os.stat(handler.baseFilename).st_size  # noqa: PTH116 - asked before each cell

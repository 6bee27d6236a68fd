"""What a cell changes beside its own objects: settings of the process and of torch, functions of modules, log files.

Settings and functions are put back; what was written to a log file is told.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from functools import partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Final, TypeAlias

__all__ = ["Surroundings"]

_PATCHED: Final = frozenset({FunctionType, BuiltinFunctionType, type})


_Setting: TypeAlias = "tuple[Callable[[], Any], Callable[[Any], Any]]"
"""How to read a setting, and how to set it."""


def _torch_settings(torch: Any) -> list[_Setting]:
    """Return torch's settings that a program may change; none of them initialises a device."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    calls = [
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        (torch.get_num_threads, torch.set_num_threads),
        (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
        (torch.multiprocessing.get_sharing_strategy, torch.multiprocessing.set_sharing_strategy),
    ]
    calls += [(partial(getattr, cudnn, flag), partial(setattr, cudnn, flag)) for flag in _CUDNN]
    kernels = [name for name in _SDP if hasattr(cuda, f"enable_{name}_sdp")]  # cudnn's came with torch 2.5
    calls += [(getattr(cuda, f"{name}_sdp_enabled"), getattr(cuda, f"enable_{name}_sdp")) for name in kernels]
    return calls


_CUDNN: Final = ("enabled", "benchmark", "deterministic")
_SDP: Final = ("flash", "mem_efficient", "math", "cudnn")


def _where_told() -> AbstractContextManager[None]:
    """Pass over what torch will not tell: the matmul precision, once it was set by other means for one backend."""
    return suppress(RuntimeError)


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
        torch = sys.modules.get("torch")
        self._torch: list[tuple[_Setting, Any]] = []
        for setting in _torch_settings(torch) if torch is not None else []:
            with _where_told():
                self._torch.append((setting, setting[0]()))
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
        for (read, put), value in self._torch:
            with _where_told():
                if read() != value:
                    put(value)


def _log_sizes() -> Iterator[tuple[str, int]]:
    for handler in [reference() for reference in list(vars(logging)["_handlerList"])]:
        if isinstance(handler, logging.FileHandler):
            with suppress(OSError):
                yield handler.baseFilename, os.stat(handler.baseFilename).st_size  # noqa: PTH116 - asked before each cell

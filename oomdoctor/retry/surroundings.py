"""What a cell changes beside its own objects: settings of the process and of torch, functions of modules, log files.

Settings and functions are put back; what was written to a log file is told.
"""

from __future__ import annotations

import builtins
import gc
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Final, TypeAlias

from oomdoctor.retry.installed import is_installed, own_modules
from oomdoctor.retry.modes import Modes

__all__ = ["Surroundings"]

_PATCHED: Final = frozenset({FunctionType, BuiltinFunctionType, type})


_Setting: TypeAlias = "tuple[Callable[[], Any], Callable[[Any], Any]]"
"""How to read a setting, and how to set it."""


@cache
def _torch_settings(torch: Any) -> list[_Setting]:
    """Return torch's settings that a program may change; none of them initialises a device."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    calls = [
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        (torch.get_num_threads, torch.set_num_threads),
        (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
        (torch.multiprocessing.get_sharing_strategy, torch.multiprocessing.set_sharing_strategy),
    ]
    calls += [(torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled)]
    calls += [(partial(_default_device, torch), torch.set_default_device)]
    if hasattr(torch, "get_autocast_dtype"):  # since torch 2.4
        for device in ("cpu", "cuda"):
            for read, put in (
                ("is_autocast_enabled", "set_autocast_enabled"),
                ("get_autocast_dtype", "set_autocast_dtype"),
            ):
                calls.append((partial(getattr(torch, read), device), partial(getattr(torch, put), device)))
    calls += [(partial(getattr, cudnn, flag), partial(setattr, cudnn, flag)) for flag in _CUDNN]
    kernels = [name for name in _SDP if hasattr(cuda, f"enable_{name}_sdp")]  # cudnn's came with torch 2.5
    calls += [(getattr(cuda, f"{name}_sdp_enabled"), getattr(cuda, f"enable_{name}_sdp")) for name in kernels]
    return calls


def _default_device(torch: Any) -> Any:
    """Return the device that was set as default, None where none was. torch's own asking may initialise it."""
    context = getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)
    return None if context is None else context.device


def _process_settings() -> list[_Setting]:
    """Return settings of Python and of the libraries that are loaded."""
    calls: list[_Setting] = [
        (os.getcwd, os.chdir),
        (sys.getrecursionlimit, sys.setrecursionlimit),
        (partial(getattr, logging.root, "level"), logging.root.setLevel),
        (partial(_copied, logging.root.handlers), partial(_refill, logging.root.handlers)),
        (gc.get_threshold, lambda counts: gc.set_threshold(*counts)),
        (gc.get_debug, gc.set_debug),
        (partial(_copied, gc.callbacks), partial(_refill, gc.callbacks)),
    ]
    if (numpy := sys.modules.get("numpy")) is not None and hasattr(numpy, "set_printoptions"):
        calls.append((numpy.geterr, lambda value: numpy.seterr(**value)))
        calls.append((numpy.get_printoptions, lambda value: numpy.set_printoptions(**value)))
    if (printed := getattr(sys.modules.get("torch._tensor_str"), "PRINT_OPTS", None)) is not None:
        calls.append((partial(_copied, vars(printed)), partial(_refill, vars(printed))))
    if (decimals := sys.modules.get("decimal")) is not None:
        calls.append((lambda: decimals.getcontext().prec, partial(_set_on, decimals.getcontext, "prec")))
    rc = getattr(sys.modules.get("matplotlib"), "rcParams", None)
    if isinstance(rc, dict):
        calls.append((partial(_copied, rc), partial(_refill, rc)))
    if (figures := getattr(sys.modules.get("matplotlib._pylab_helpers"), "Gcf", None)) is not None:
        calls.append((partial(set, figures.figs), partial(_keep_only, figures.figs)))
    for name, tables in _GLOBAL_HOOKS.items():
        home = vars(sys.modules[name]) if name in sys.modules else {}
        found = [home[one] for one in tables if isinstance(home.get(one), dict)]
        calls += [(partial(set, table), partial(_keep_only, table)) for table in found]
    return calls


def _streams() -> dict[str, Any]:
    return {"stdin": sys.stdin, "stdout": sys.stdout, "stderr": sys.stderr}


def _handlers() -> tuple[Any, ...]:
    return tuple(map(_handler_of, _SIGNALS))


def _put_handlers(before: tuple[Any, ...]) -> None:
    for number, handler in zip(_SIGNALS, before, strict=True):
        # None is a handler that was set by C. Not the main thread: told by ``lost``.
        if handler is not None and _handler_of(number) != handler and _is_main_thread():
            signal.signal(number, handler)


def _is_users(handler: Any) -> bool:
    """Return whether a handler is one that no library sets around what it runs, as asyncio does."""
    if isinstance(handler, int):
        return True
    function = getattr(handler, "__func__", handler)
    return type(function) is FunctionType and not is_installed(function.__globals__.get("__name__"))


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _copied(container: Any) -> Any:
    return dict(dict.items(container)) if isinstance(container, dict) else list(container)


def _refill(container: Any, copy: Any) -> None:
    base: Any = dict if isinstance(container, dict) else list
    base.clear(container)
    base.update(container, copy) if base is dict else base.extend(container, copy)


def _keep_only(table: dict[Any, Any], names: set[Any]) -> None:
    for name in [name for name in table if name not in names]:
        del table[name]


def _set_on(owner: Callable[[], Any], name: str, value: Any) -> None:
    setattr(owner(), name, value)


_GLOBAL_HOOKS: Final = {
    "torch.nn.modules.module": (
        *("_global_forward_hooks", "_global_forward_pre_hooks", "_global_forward_hooks_always_called"),
        *("_global_forward_hooks_with_kwargs", "_global_backward_hooks", "_global_backward_pre_hooks"),
        *("_global_buffer_registration_hooks", "_global_module_registration_hooks"),
        "_global_parameter_registration_hooks",
    ),
    "torch.optim.optimizer": ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"),
}
_handler_of: Final[Callable[[int], Any]] = vars(sys.modules["_signal"])["getsignal"]
"""Without the names that ``signal.getsignal`` looks up: asked for each signal before each cell."""
_SIGNALS: Final = tuple(sorted(set(map(int, signal.valid_signals())) - {signal.SIGINT}))
"""Those whose handlers are put back. SIGINT's is exchanged by the kernel around a cell, and by us around a restore."""
_CUDNN: Final = ("enabled", "benchmark", "deterministic")
_SDP: Final = ("flash", "mem_efficient", "math", "cudnn")


_UNTOLD: Final = (RuntimeError, OSError)
"""torch does not tell the matmul precision once it was set by other means for one backend; the folder may be gone."""


class _Environment:
    """The environment, as the system has it: to decode each variable before each cell would take time.

    Args:
        environ: ``os.environ``.
    """

    def __init__(self, environ: Any) -> None:
        self._variables: dict[Any, Any] = getattr(environ, "_data", environ)
        self._is_systems = self._variables is not environ  # and not what a test has put in its place
        self._before = self._variables.copy()

    def restore(self) -> None:
        """Put all variables back."""
        now, before = self._variables, self._before
        if now == before:
            return
        if self._is_systems:
            for key in now.keys() - before.keys():
                os.unsetenv(key)
            for key, value in before.items():
                if now.get(key) != value:
                    os.putenv(key, value)
        now.clear()
        now.update(before)


def _read(settings: Iterable[_Setting]) -> Iterator[tuple[_Setting, Any]]:
    """Yield each setting that can be read, with what it is."""
    for setting in settings:
        try:
            yield setting, setting[0]()
        except _UNTOLD:
            continue


class Surroundings:
    """What was set when it was taken.

    Args:
        modules: those that names of the user's lead to. own: those of the user's own.
        collects: whether the garbage collector was on.
    """

    def __init__(self, modules: Iterable[ModuleType], own: Iterable[ModuleType], *, collects: bool) -> None:
        self._environ = _Environment(os.environ)
        self._filters = list(warnings.filters)
        self._path = list(sys.path)
        # Only what is put back: whatever else a module holds, as ``sys`` does a traceback, must not live on for this.
        self._modules = [
            (module, {name: value for name, value in vars(module).items() if type(value) in _PATCHED})
            for module in (builtins, *modules)
        ]
        torch = sys.modules.get("torch")
        self._own = {module.__name__ for module in own}
        self._settings = list(_read([*_process_settings(), *(_torch_settings(torch) if torch is not None else ())]))
        self._modes = None if torch is None else Modes(torch)
        self._handlers, self._on_interrupt = _handlers(), _handler_of(signal.SIGINT)
        self._collects = collects
        self._streams = self._left = _streams()
        self._logs = dict(_log_sizes())

    def end(self) -> None:
        """Note the streams that the cell leaves. Those of a later cell may be exchanged for reasons of its own."""
        self._left = _streams()

    def leave(self, later: Surroundings) -> None:
        """Have the streams stay as they are that a later cell has exchanged."""
        exchanged = {name: now for name, now in later._left.items() if now is not later._streams[name]}
        self._streams = {**self._streams, **exchanged}

    def lost(self) -> Iterator[str]:
        """Yield a sentence for each log file that was written to, and for what cannot be set back."""
        for path, size in _log_sizes():
            if self._logs.get(path, size) != size:
                yield f"the log file {path} was written to"
        if self._modes is not None:
            yield from self._modes.lost()
        now = _handler_of(signal.SIGINT)
        if now is not self._on_interrupt and _is_users(now):
            yield "the handler of SIGINT was changed, and interrupts need it now"
        if _handlers() != self._handlers and not _is_main_thread():
            yield "handlers of signals were changed, and the main thread alone can put them back"

    def restore(self) -> None:
        """Put settings back, and functions and classes of modules that others stand in for now."""
        self._environ.restore()
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
        for module in own_modules():
            if module.__name__ not in self._own:
                _forget(module.__name__)
        for (read, put), value in self._settings:
            with suppress(*_UNTOLD):
                if read() != value:
                    put(value)
        (gc.enable if self._collects else gc.disable)()
        _put_handlers(self._handlers)
        for name, before in self._streams.items():
            if self._left[name] is not before and getattr(sys, name) is self._left[name]:
                setattr(sys, name, before)
        if self._modes is not None:
            self._modes.restore()


def _forget(name: str) -> None:
    """Take back the first import of a module of the user's: to import it is to run it."""
    module = sys.modules.pop(name, None)
    parent, _, own = name.rpartition(".")
    holder = vars(sys.modules[parent]) if parent in sys.modules else {}
    if module is not None and holder.get(own) is module:
        del holder[own]


def _log_sizes() -> Iterator[tuple[str, int]]:
    for handler in [reference() for reference in list(vars(logging)["_handlerList"])]:
        if isinstance(handler, logging.FileHandler):
            with suppress(OSError):
                yield handler.baseFilename, os.stat(handler.baseFilename).st_size  # noqa: PTH116 - asked before each cell

"""Settings of Python, of torch and of other libraries: how each is read, and how it is set.

Tables of pairs of functions, of attributes and of containers. What is exotic is only compared: see ``_exotic``.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from operator import attrgetter
from typing import Any, Final, NamedTuple

from oomdoctor.objects.containers import GONE, copied, living, refill, weak
from oomdoctor.objects.kinds import module_of
from oomdoctor.objects.named import is_installed, is_ours

UNTOLD: Final = (RuntimeError, OSError, AttributeError)
"""torch does not tell the matmul precision once it was set by other means for one backend; the folder may be gone."""


class Setting(NamedTuple):
    """One setting.

    Attributes:
        name: by which it is known from one cell to the next.
        put: sets it; None where it is only told that it was changed.
        is_torchs: whether what a cell computes depends on it.
    """

    name: str
    read: Callable[[], Any]
    put: Callable[[Any], Any] | None = None
    is_torchs: bool = False

    def is_still(self, value: Any) -> bool:
        """Return whether it is what it was when it was read; what cannot be read now is taken to be."""
        try:
            now = self.read()
        except UNTOLD:
            return True
        if self.put is None and type(now) is list:  # libraries add functions of theirs once, when they are loaded
            return not any(_is_users(one) for one in (*now, *value) if (one in now) != (one in value))
        return bool(now == value)

    def put_back(self, value: Any) -> None:
        """Set it, if it is another."""
        if self.put is not None and not self.is_still(value):
            with suppress(*UNTOLD):
                self.put(value)


_Pairs = tuple[tuple[str, ...], ...]
_KERNELS: Final = (
    *("mkldnn_enabled", "mkldnn_deterministic", "onednn_allow_tf32", "cudnn_allow_tf32", "cublas_allow_tf32"),
    *("cpu_allow_fp16_reduced_precision_reduction", "math_sdp_allow_fp16_bf16_reduction", "qengine"),
    *("deterministic_fill_uninitialized_memory", "linalg_preferred_backend", "nnpack_enabled"),
)
_PRECISIONS: Final = (
    *(("generic", "all"), ("cuda", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn")),
    *(("mkldnn", "all"), ("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn")),
)
"""What is set for all of a backend comes before what is set for one of its operators."""
_FUNCTIONS: Final[dict[str, _Pairs]] = {
    "os": (("getcwd", "chdir"),),
    "sys": (("getrecursionlimit", "setrecursionlimit"), ("getswitchinterval", "setswitchinterval")),
    "gc": (("get_threshold", "set_threshold"), ("get_debug", "set_debug")),
    "socket": (("getdefaulttimeout", "setdefaulttimeout"),),
    "numpy": (("geterr", "seterr"), ("geterrcall", "seterrcall"), ("get_printoptions", "set_printoptions")),
    "torch": (
        ("is_grad_enabled", "set_grad_enabled"),
        ("get_default_dtype", "set_default_dtype"),
        ("get_deterministic_debug_mode", "set_deterministic_debug_mode"),
        ("get_float32_matmul_precision", "set_float32_matmul_precision"),
        ("get_num_threads", "set_num_threads"),
        ("is_anomaly_enabled", "autograd.set_detect_anomaly"),
        ("multiprocessing.get_sharing_strategy", "multiprocessing.set_sharing_strategy"),
        ("is_warn_always_enabled", "set_warn_always"),
        ("is_autocast_cache_enabled", "set_autocast_cache_enabled"),
        *(("is_autocast_enabled", "set_autocast_enabled", device) for device in ("cpu", "cuda")),
        *(("get_autocast_dtype", "set_autocast_dtype", device) for device in ("cpu", "cuda")),
        *((f"_C._get_{name}", f"_C._set_{name}") for name in _KERNELS),
        ("_C._is_multithreading_enabled", "_C._set_multithreading_enabled"),
        *(
            (f"backends.cuda.{name}_sdp_enabled", f"backends.cuda.enable_{name}_sdp")
            for name in ("flash", "mem_efficient", "math", "cudnn")
        ),
        *(("_C._get_fp32_precision_getter", "_C._set_fp32_precision_setter", *of) for of in _PRECISIONS),
    ),
}
"""What one function tells and another one sets, by their module, with the arguments that both take first."""
_ATTRIBUTES: Final = (
    *("backends.cudnn.enabled", "backends.cudnn.benchmark", "backends.cudnn.deterministic"),
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    *("backends.cuda.matmul.allow_fp16_accumulation", "backends.opt_einsum.enabled"),
    *("backends.mha._is_fastpath_enabled", "__future__._overwrite_module_params_on_conversion"),
    "__future__._swap_module_params_on_conversion",
)
"""Of torch."""
_CONTENTS: Final = (
    ("gc", "callbacks"),
    ("torch._tensor_str", "PRINT_OPTS.__dict__"),
    ("matplotlib._pylab_helpers", "Gcf.figs"),
)
"""Lists and dicts that hold settings and figures."""
_HOOKED: Final = ("torch.nn.modules.module", "torch.optim.optimizer")
"""Where hooks of all modules and all optimizers are."""
_COMPILERS: Final = (
    *("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config", "torch.compiler.config"),
    *("torch._export.config", "torch.fx.config", "torch.fx.experimental._config", "torch.distributed.config"),
)
_TRANSFORMERS: Final = ("input_transformers_cleanup", "input_transformers_post", "ast_transformers")
_HALF: Final = 0.5
_PREFIXES: Final = ("_get_", "get_", "get", "_is_", "is_")


def _told(path: str) -> str:
    name = path.rpartition(".")[2]
    return name.removeprefix(next(filter(name.startswith, _PREFIXES), "")).replace("_", " ")


def _within(module: str, path: str) -> Any:
    """Return what an attribute of a module leads to, ``GONE`` where it is not loaded or has none."""
    try:
        return attrgetter(path)(sys.modules[module])
    except (KeyError, *UNTOLD):
        return GONE


def _put_by(put: Callable[..., Any], value: Any) -> None:
    put(**value) if type(value) is dict else put(*value) if type(value) is tuple else put(value)


def _by_functions(module: str, get: str, set_: str, *given: str) -> Iterator[Setting]:
    read, put = _within(module, get), _within(module, set_)
    if read is not GONE and put is not GONE:
        name = " ".join((_told(get), *given))
        yield Setting(name, partial(read, *given), partial(_put_by, partial(put, *given)), module == "torch")


def _by_attribute(path: str) -> Iterator[Setting]:
    inner, _, name = path.rpartition(".")
    if (owner := _within("torch", inner)) is not GONE:
        yield Setting(f"torch.{path}", partial(getattr, owner, name), partial(setattr, owner, name), True)


def _by_contents(module: str, path: str) -> Iterator[Setting]:
    container = _within(module, path)
    if type(container) is list or isinstance(container, dict):
        # Not what hooks close over: a cell that takes one away may free memory by that.
        read, put = (set, _keep_only) if path.startswith(("_global", "Gcf")) else (copied, refill)
        yield Setting(f"{module}.{path}", partial(read, container), partial(put, container))


def _keep_only(table: Any, names: set[Any]) -> None:
    for name in [name for name in table if name not in names]:
        del table[name]


def _of_torch(torch: Any) -> list[Setting]:
    """Return those of torch that no pair of functions tells and sets; none of them initialises a device."""

    def default() -> Any:  # None where none was set. torch's own asking may initialise it.
        return getattr(_within("torch", "_GLOBAL_DEVICE_CONTEXT.device_context"), "device", None)

    def set_default(device: Any) -> None:
        torch.set_default_device(device)
        if device is None:  # as where none was ever set: torch 2.4 fails where it is asked for one that was taken back
            vars(torch._GLOBAL_DEVICE_CONTEXT).pop("device_context", None)

    modes = Setting("modes of torch", partial(_Modes, torch), None, True)
    # The processor's, of this thread; torch does not tell it.
    denormal = Setting("denormal numbers", lambda: sys.float_info.min * _HALF == 0.0, torch.set_flush_denormal, True)
    return [Setting("default device", default, set_default, True), modes, denormal]


def _exotic(shell: Any) -> Iterator[Setting]:
    """Yield what is only compared: of libraries, and of the user's IPython shell what functions it calls."""
    if (decimals := sys.modules.get("decimal")) is not None:
        yield Setting("the context of decimals", partial(_decimals, decimals))
    if (options := _within("pandas._config.config", "_global_config")) is not GONE:
        yield Setting("the options of pandas", partial(repr, options))
    if (found := _within("matplotlib", "rcParams")) is not GONE:  # the backend is chosen when the first figure is made
        read = lambda: {name: value for name, value in dict.items(found) if name != "backend"}  # noqa: E731
        yield Setting("the options of matplotlib", read)
    if (locale := sys.modules.get("locale")) is not None:
        yield Setting("the locale", partial(locale.setlocale, locale.LC_ALL))
    for name in _COMPILERS:
        if (entries := _within(name, "_config")) is not GONE:
            yield Setting(f"the settings of {name}", partial(_overrides, entries))
    for name, functions in (getattr(getattr(shell, "events", None), "callbacks", None) or {}).items():
        yield Setting(f"the callbacks of {name}", partial(list, functions))
    for kind, table in (getattr(getattr(shell, "magics_manager", None), "magics", None) or {}).items():
        yield Setting(f"the {kind} magics", partial(lambda of: list(of.values()), table))
    for name in _TRANSFORMERS if shell is not None else ():
        yield Setting(f"the {name}", partial(lambda of: list(getattr(shell, of)), name))


def _overrides(entries: dict[str, Any]) -> tuple[Any, ...]:
    """Return what a program has set of settings of compilation: variables of a context since torch 2.13."""
    held = [getattr(entry, "user_override", entry) for entry in entries.values()]
    return tuple([one.get() if type(one) is ContextVar else one for one in held])


def _decimals(decimals: Any) -> str:
    context = decimals.getcontext().copy()
    context.clear_flags()
    return repr(context)


def _is_users(function: Any) -> bool:
    """Return whether a function, or what stands for a handler of signals, is of the user's own."""
    function = getattr(function, "__func__", function)
    return isinstance(function, int) or not is_installed(getattr(function, "__module__", None))


class _Modes:
    """The modes that are entered and not ours, held weakly, and whether inference mode is on.

    Equal to others where none that is alive was entered or left. The default device is a mode too, and a setting.
    """

    def __init__(self, torch: Any) -> None:
        core, default = torch._C, _within("torch", "_GLOBAL_DEVICE_CONTEXT.device_context")
        stack = [core._get_function_stack_at(at) for at in range(core._len_torch_function_stack())]
        stack += [core._get_dispatch_stack_at(at) for at in range(core._len_torch_dispatch_stack())]
        self._held = [weak(mode) for mode in stack if mode is not default and not is_ours(module_of(type(mode)))]
        self._infers = torch.is_inference_mode_enabled()

    def _alive(self) -> list[int]:
        return [id(mode) for held in self._held if (mode := living(held)) is not GONE]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Modes) and (self._infers, self._alive()) == (other._infers, other._alive())

    __hash__ = None  # type: ignore[assignment]


_known: list[Setting] = []
_known_with: tuple[int, str, Any] = (0, "", None)


def of_libraries() -> list[Setting]:
    """Return those of modules that are loaded, looked for anew where another one, or another shell, is there."""
    global _known, _known_with
    shell = getattr(_within("IPython.core.interactiveshell", "InteractiveShell"), "_instance", None)
    here = len(sys.modules), next(reversed(sys.modules)), shell
    if here != _known_with:
        found = [one for name, pairs in _FUNCTIONS.items() for pair in pairs for one in _by_functions(name, *pair)]
        found += [one for path in _ATTRIBUTES for one in _by_attribute(path)]
        hooks = [
            (name, path) for name in _HOOKED for path in vars(sys.modules.get(name, builtins)) if path[:8] == "_global_"
        ]
        found += [one for name, path in (*_CONTENTS, *hooks) for one in _by_contents(name, path)]
        torch = sys.modules.get("torch")
        _known, _known_with = [*found, *(() if torch is None else _of_torch(torch)), *_exotic(shell)], here
    return _known

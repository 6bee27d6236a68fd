"""Settings of Python, of torch and of other libraries that are loaded: how each is read, and how it is set.

All are read before every cell, and those that are another by then are set when the cell is taken back.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any, Final, NamedTuple

from oomdoctor.objects.containers import copied, refill
from oomdoctor.objects.kinds import module_of
from oomdoctor.objects.named import is_installed, is_ours
from oomdoctor.objects.recipes import GONE, living, weak

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
            return bool(self.read() == value)
        except UNTOLD:
            return True


_known: list[Setting] = []
_known_with: tuple[int, str, Any] = (0, "", None)


def settings() -> list[Setting]:
    """Return the settings that a program may change, in the order in which they are to be put back.

    Those of libraries are looked for anew where another module, or another shell, is there than the last time.
    """
    global _known, _known_with
    torch, shell = sys.modules.get("torch"), _shell()
    here = len(sys.modules), next(reversed(sys.modules)), shell
    if here != _known_with:
        _known, _known_with = [*_of_libraries(), *_of_shell(shell)], here
    return [*_of_process(), *_known, *(_of_torch(torch) if torch is not None else ())]


def read(found: Iterable[Setting]) -> Iterator[tuple[Setting, Any]]:
    """Yield each setting that can be read, with what it is."""
    for setting in found:
        try:
            yield setting, setting.read()
        except UNTOLD:
            continue


def _of_process() -> list[Setting]:
    return [
        Setting("folder", os.getcwd, os.chdir),
        Setting("recursion", sys.getrecursionlimit, sys.setrecursionlimit),
        Setting("switching", sys.getswitchinterval, sys.setswitchinterval),
        Setting("root level", partial(getattr, logging.root, "level"), logging.root.setLevel),
        Setting("logging disabled", partial(getattr, logging.root.manager, "disable"), logging.disable),
        _contents("root handlers", logging.root.handlers),
        Setting("collections", gc.get_threshold, lambda counts: gc.set_threshold(*counts)),
        Setting("collector's debugging", gc.get_debug, gc.set_debug),
        _contents("collector's callbacks", gc.callbacks),
        # An alarm that goes off when its handler was taken back would end the process.
        Setting("alarm", lambda: signal.getitimer(signal.ITIMER_REAL)[0] > 0, _put_alarm),
    ]


def _of_libraries() -> list[Setting]:
    """Return those of libraries that are loaded."""
    found: list[Setting] = []
    if (numpy := sys.modules.get("numpy")) is not None and hasattr(numpy, "set_printoptions"):
        found.append(Setting("numpy errors", numpy.geterr, lambda value: numpy.seterr(**value)))
        found.append(Setting("numpy error call", numpy.geterrcall, numpy.seterrcall))
        found.append(Setting("numpy printing", numpy.get_printoptions, lambda value: numpy.set_printoptions(**value)))
    if (printed := getattr(sys.modules.get("torch._tensor_str"), "PRINT_OPTS", None)) is not None:
        found.append(_contents("torch printing", vars(printed)))
    if (decimals := sys.modules.get("decimal")) is not None:
        found.append(Setting("decimals", partial(_decimals, decimals), partial(_put_decimals, decimals)))
    if (options := getattr(sys.modules.get("pandas._config.config"), "_global_config", None)) is not None:
        dicts = _dicts_in(options)
        found.append(Setting("pandas", lambda: dict(enumerate(map(dict.copy, dicts))), partial(_put_all, dicts)))
    if (sockets := sys.modules.get("socket")) is not None and hasattr(sockets, "setdefaulttimeout"):
        found.append(Setting("time of sockets", sockets.getdefaulttimeout, sockets.setdefaulttimeout))
    rc = getattr(sys.modules.get("matplotlib"), "rcParams", None)
    if isinstance(rc, dict):
        found.append(_contents("matplotlib", rc))
    if (figures := getattr(sys.modules.get("matplotlib._pylab_helpers"), "Gcf", None)) is not None:
        found.append(Setting("figures", partial(set, figures.figs), partial(_keep_only, figures.figs)))
    for name, tables in _GLOBAL_HOOKS.items():
        home = vars(sys.modules[name]) if name in sys.modules else {}
        held = [(one, home[one]) for one in tables if isinstance(home.get(one), dict)]
        found += [Setting(one, partial(set, table), partial(_keep_only, table)) for one, table in held]
    return found


def _shell() -> Any:
    shells = getattr(sys.modules.get("IPython.core.interactiveshell"), "InteractiveShell", None)
    return getattr(shells, "_instance", None)


def _of_shell(shell: Any) -> list[Setting]:
    """Return what functions of the user's own IPython's shell calls: they are told, and not put back."""
    callbacks = getattr(getattr(shell, "events", None), "callbacks", None) or {}
    magics = getattr(getattr(shell, "magics_manager", None), "magics", None) or {}
    found = [Setting(f"callbacks of {name}", partial(list, held)) for name, held in callbacks.items()]
    found += [Setting(f"{kind} magics", partial(dict, table)) for kind, table in magics.items()]
    names = _TRANSFORMERS if shell is not None else ()
    return found + [Setting(name, partial(_of_attribute, shell, name)) for name in names]


def is_of_users(before: Any, now: Any) -> bool:
    """Return whether what differs is the user's; libraries add functions of theirs once, when they are loaded."""
    if type(now) is _Modes:
        return True
    first, second = (list(one.values()) if isinstance(one, dict) else one for one in (before, now))
    return any(_is_users_function(one) for one in (*first, *second) if (one in first) != (one in second))


def _of_attribute(owner: Any, name: str) -> list[Any]:
    return list(getattr(owner, name))


@cache
def _of_torch(torch: Any) -> list[Setting]:
    """Return those of torch; none of them initialises a device."""
    core, cuda, cudnn = torch._C, torch.backends.cuda, torch.backends.cudnn
    found = [
        Setting("gradients", torch.is_grad_enabled, torch.set_grad_enabled),
        Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype),
        Setting("deterministic", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        Setting("matmul precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        Setting("threads", torch.get_num_threads, torch.set_num_threads),
        Setting("anomalies", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
        Setting("sharing", torch.multiprocessing.get_sharing_strategy, torch.multiprocessing.set_sharing_strategy),
        Setting("default device", partial(_default_device, torch), torch.set_default_device),
        Setting("warnings", torch.is_warn_always_enabled, torch.set_warn_always),
        Setting("cached casts", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        Setting("modes of torch", partial(_Modes, torch)),
        # The processor's, of this thread; torch does not tell it.
        Setting("denormal numbers", lambda: sys.float_info.min * _HALF == 0.0, torch.set_flush_denormal),
    ]
    if hasattr(torch, "get_autocast_dtype"):  # since torch 2.4
        for device in ("cpu", "cuda"):
            for name, put in (
                ("is_autocast_enabled", "set_autocast_enabled"),
                ("get_autocast_dtype", "set_autocast_dtype"),
            ):
                asked, set_ = partial(getattr(torch, name), device), partial(getattr(torch, put), device)
                found.append(Setting(f"{put} {device}", asked, set_))
    found += [_attribute(cudnn, flag) for flag in _CUDNN]
    kernels = [name for name in _SDP if hasattr(cuda, f"enable_{name}_sdp")]  # cudnn's came with torch 2.5
    found += [
        Setting(name, getattr(cuda, f"{name}_sdp_enabled"), getattr(cuda, f"enable_{name}_sdp")) for name in kernels
    ]
    for name in _IN_C:
        if hasattr(core, f"_get_{name}") and hasattr(core, f"_set_{name}"):
            found.append(Setting(name, getattr(core, f"_get_{name}"), getattr(core, f"_set_{name}")))
    found.append(Setting("backward threads", core._is_multithreading_enabled, core._set_multithreading_enabled))
    found += [_attribute(cuda.matmul, flag) for flag in _REDUCTIONS]
    for module, names in ((torch.backends, _OF_BACKENDS), (torch, _OF_FUTURE)):
        for path in names:
            owner, _, name = path.rpartition(".")
            if (home := getattr(module, owner, None)) is not None:
                found.append(_attribute(home, name))
    if hasattr(core, "_get_fp32_precision_getter"):  # since torch 2.9; what is set for all comes before what is for one
        found += [
            Setting(
                f"precision {backend} {of}",
                partial(core._get_fp32_precision_getter, backend, of),
                partial(core._set_fp32_precision_setter, backend, of),
            )
            for backend, of in _PRECISIONS
        ]
    return [one._replace(is_torchs=True) for one in found]


def _is_users_function(function: Any) -> bool:
    """Return whether a function is of the user's own."""
    function = getattr(function, "__func__", function)
    return not is_installed(getattr(function, "__module__", None))


class _Modes:
    """The modes that are entered and not ours, held weakly, and whether inference mode is on.

    Equal to others where none that is alive was entered or left. The default device is a mode too, and a setting.
    """

    __slots__ = ("_held", "_infers")

    def __init__(self, torch: Any) -> None:
        core, default = torch._C, getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)
        stack = [core._get_function_stack_at(at) for at in range(core._len_torch_function_stack())]
        stack += [core._get_dispatch_stack_at(at) for at in range(core._len_torch_dispatch_stack())]
        self._held = [weak(mode) for mode in stack if mode is not default and not is_ours(module_of(type(mode)))]
        self._infers = torch.is_inference_mode_enabled()

    def _alive(self) -> list[int]:
        return [id(mode) for held in self._held if (mode := living(held)) is not GONE]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Modes) and (self._infers, self._alive()) == (other._infers, other._alive())

    __hash__ = None  # type: ignore[assignment]


def _default_device(torch: Any) -> Any:
    """Return the device that was set as default, None where none was. torch's own asking may initialise it."""
    context = getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)
    return None if context is None else context.device


def _attribute(owner: Any, name: str) -> Setting:
    path = f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"
    return Setting(path, partial(getattr, owner, name), partial(setattr, owner, name))


def _contents(name: str, container: Any) -> Setting:
    """Return a setting that is all that a list or a dict holds."""
    return Setting(name, partial(copied, container), partial(refill, container))


def _keep_only(table: dict[Any, Any], names: set[Any]) -> None:
    for name in [name for name in table if name not in names]:
        del table[name]


def _dicts_in(options: dict[str, Any]) -> list[dict[str, Any]]:
    inner = [one for value in options.values() if type(value) is dict for one in _dicts_in(value)]
    return [options, *inner]


def _put_all(dicts: list[dict[str, Any]], before: dict[int, dict[str, Any]]) -> None:
    for at, copy in before.items():
        refill(dicts[at], copy)


def _put_alarm(was_set: bool) -> None:
    if not was_set:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _decimals(decimals: Any) -> dict[str, Any]:
    context = decimals.getcontext()
    return {"traps": dict(context.traps)} | {name: getattr(context, name) for name in _OF_DECIMALS}


def _put_decimals(decimals: Any, before: dict[str, Any]) -> None:
    for name, value in before.items():
        setattr(decimals.getcontext(), name, value)


_HALF: Final = 0.5
_GLOBAL_HOOKS: Final = {
    "torch.nn.modules.module": (
        *("_global_forward_hooks", "_global_forward_pre_hooks", "_global_forward_hooks_always_called"),
        *("_global_forward_hooks_with_kwargs", "_global_backward_hooks", "_global_backward_pre_hooks"),
        *("_global_buffer_registration_hooks", "_global_module_registration_hooks"),
        "_global_parameter_registration_hooks",
    ),
    "torch.optim.optimizer": ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"),
}
_TRANSFORMERS: Final = ("input_transformers_cleanup", "input_transformers_post", "ast_transformers")
_OF_DECIMALS: Final = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")
_CUDNN: Final = ("enabled", "benchmark", "deterministic")
_SDP: Final = ("flash", "mem_efficient", "math", "cudnn")
_IN_C: Final = (
    *("mkldnn_enabled", "mkldnn_deterministic", "onednn_allow_tf32", "cudnn_allow_tf32", "cublas_allow_tf32"),
    *("cpu_allow_fp16_reduced_precision_reduction", "math_sdp_allow_fp16_bf16_reduction", "qengine"),
    *("deterministic_fill_uninitialized_memory", "linalg_preferred_backend", "nnpack_enabled"),
)
_REDUCTIONS: Final = (
    *("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction", "allow_fp16_accumulation"),
)
_OF_BACKENDS: Final = ("opt_einsum.enabled", "mha._is_fastpath_enabled")
_OF_FUTURE: Final = (
    "__future__._overwrite_module_params_on_conversion",
    "__future__._swap_module_params_on_conversion",
)
_PRECISIONS: Final = (
    *(("generic", "all"), ("cuda", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn")),
    *(("mkldnn", "all"), ("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn")),
)

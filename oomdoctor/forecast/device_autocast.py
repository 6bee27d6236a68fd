"""Autocast of a device on fakes that have the keys of the CPU.

Autocast of the CPU has rules of its own, so it cannot stand in: a softmax that CUDA does in float32 would stay in
bfloat16. The rules of the device are put on a dispatch key that nothing else here uses, and that is switched with the
state of ``torch.autocast``. What the rules are is asked of this torch: the kernel that it has for autocast of the
device is called with arguments that cannot be computed with, and what it casts them to tells its rule.

Limits: autocast of the CPU within that of the device is refused. An operator whose kernel tells nothing is left as it
is, and named where the program calls it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils._python_dispatch import _disable_current_modes

from oomdoctor.errors import ForecastError

if TYPE_CHECKING:
    from oomdoctor.forecast.devices import DeviceTracker

_KEY: Final = torch._C._dispatch_key_parse("AutocastPrivateUse1")
_KEYS: Final = torch._C.DispatchKeySet(_KEY)
_STATE: Final = "privateuseone"

_norms: Final = torch.ops.aten.norm
_DUMMIES: Final = (
    *(("Optional[Tensor]", ()), ("List[int]", [1]), ("List[SymInt]", [1]), ("List[bool]", [False])),
    *(("float", 1.0), ("bool", False), ("str", "ij,jk->ik")),
)
"""What is given to an operator to find out its rule: by a part of the type's name."""

_torch: Any = torch
_library: Any = None
_fallback: Any = None
_casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
"""Weights by their identity, each with its copy in the lower precision; until autocast is left, as in torch."""


def replace(tracker: DeviceTracker, check: Callable[[], None]) -> None:
    """Let ``torch.autocast`` of the device work in this process; ``check`` looks at it when it is first on."""
    set_enabled, clear = torch.set_autocast_enabled, torch.clear_autocast_cache

    def switch(*args: Any) -> None:
        set_enabled(*args)
        kind, enabled = args if len(args) == 2 else ("cuda", *args)
        if not enabled and kind != "cuda":
            return
        if kind not in ("cpu", "cuda"):
            raise ForecastError(f"autocast of {kind} is not forecast")
        if torch.is_autocast_enabled("cpu") and torch.is_autocast_enabled("cuda"):
            raise ForecastError("autocast of the CPU inside of that of the device is not forecast")
        if kind == "cuda":
            is_first = _library is None
            if is_first and enabled:
                _register(tracker)
            set_enabled(_STATE, enabled)
            torch._C._dispatch_tls_set_dispatch_key_included(_KEY, enabled)
            if is_first and enabled:
                check()

    def clear_all() -> None:
        clear()
        _casts.clear()

    _torch.set_autocast_enabled, _torch.clear_autocast_cache = switch, clear_all


def _register(tracker: DeviceTracker) -> None:
    global _library, _fallback
    _fallback = _torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    _fallback.m.fallback_fallthrough("AutocastPrivateUse1")  # operators without a rule are left as they are
    _library = [_torch.library.Library(space, "IMPL") for space in ("aten",)]
    spaces = {"aten": _library[0]}
    for name, rule in rules().items():
        space, _, plain = name.partition("::")
        if space not in spaces:
            spaces[space] = _torch.library.Library(space, "IMPL")
            _library.append(spaces[space])
        made = _noted(tracker, plain) if rule is None else _RULES[rule]
        spaces[space].impl(plain, made(_operator(name)), "AutocastPrivateUse1")


def _operator(name: str) -> Any:
    space, _, plain = name.partition("::")
    packet, _, overload = plain.partition(".")
    return getattr(getattr(getattr(torch.ops, space), packet), overload or "default")


class _Told(Exception):
    """An operation was reached."""


class _Probe(torch.Tensor):
    """A tensor that says that it lies on a device, and notes the first thing that is done with one of its kind."""

    @staticmethod
    def __new__(cls: Any, dtype: torch.dtype) -> Any:
        plain = torch.empty(1, dtype=dtype, device="meta")
        return torch.Tensor._make_subclass(
            cls, plain, dispatch_device=True, device_for_backend_keys=torch.device("cpu")
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.prim.device.default:
            return torch.device("cuda", 0)
        raise _Told(func, (kwargs or {}).get("dtype"))


def rules() -> dict[str, str | None]:
    """Return what autocast of CUDA does with each operator: names of ``_RULES``, None where its kernel tells nothing.

    The lower precision is float16 meanwhile. A kernel that casts floats is told by what it does with those alone, one
    that casts halves by those, and one that promotes by both at once; one that asks for a type is told by having it
    among its arguments.
    """
    found: dict[str, str | None] = {}
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), torch.is_autocast_cache_enabled()
    set_enabled = torch._C.set_autocast_enabled
    with torch.inference_mode(False), _disable_current_modes(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            set_enabled("cuda", True)
            torch.set_autocast_dtype("cuda", torch.float16)
            torch.set_autocast_cache_enabled(False)
            for name in torch._C._dispatch_get_all_op_names():
                if torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA"):
                    found[name] = _rule(_operator(name), torch._C._dispatch_key_parse("AutocastCUDA"))
        finally:
            set_enabled("cuda", before[0])
            torch.set_autocast_dtype("cuda", before[1])
            torch.set_autocast_cache_enabled(before[2])
    return found


def _rule(operator: Any, key: Any) -> str | None:
    wide, half = torch.float32, torch.float16
    reached, cast = _reached(operator, key, (wide,))
    if cast == "banned":
        return "banned"
    if "dtype" in (argument.name for argument in operator._schema.arguments):
        return "fp32_set_opt_dtype"
    if reached in (_norms.ScalarOpt_dtype, _norms.ScalarOpt_dim_dtype):
        return "fp32_append_dtype"
    if cast is half:
        return "lower_precision_fp"
    if _reached(operator, key, (half,))[1] is wide:
        return "fp32"
    return "promote" if wide in (_reached(operator, key, pair)[1] for pair in ((half, wide), (wide, half))) else None


def _reached(operator: Any, key: Any, dtypes: tuple[torch.dtype, ...]) -> tuple[Any, Any]:
    """Call the kernel at ``key`` with probes of these types in turn; return what it calls first, and with which type.

    Source: ``cached_cast`` casts by ``Tensor.to``, which arrives here as ``_to_copy``.
    """
    types = iter(dtypes)
    last = dtypes[-1]

    def dummy(argument: Any) -> Any:
        kind = str(argument.type)
        if kind == "Tensor":
            return _Probe(next(types, last))
        if kind == "List[Tensor]":
            return [_Probe(next(types, last)), _Probe(next(types, last))]
        if argument.has_default_value() or kind.startswith("Optional"):
            return argument.default_value
        return next((value for word, value in _DUMMIES if word in kind), 1)

    arguments = operator._schema.arguments
    args = [dummy(argument) for argument in arguments if not argument.kwarg_only]
    kwargs = {argument.name: dummy(argument) for argument in arguments if argument.kwarg_only}
    try:
        with torch._C._IncludeDispatchKeyGuard(key):
            operator(*args, **kwargs)
    except _Told as told:
        func, dtype = told.args
        return func, dtype if func is torch.ops.aten._to_copy.default else None
    except RuntimeError as error:
        return None, "banned" if "unsafe to autocast" in str(error) else None
    except (IndexError, NotImplementedError, TypeError, ValueError):
        pass  # of the operator itself, which was reached
    return None, None


def _below() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(_KEYS)


def _is_eligible(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype is not torch.float64
        and value.device.type == "cuda"
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value`` in ``dtype``, from the cache where it is a weight. Source: ``cached_cast``."""
    if type(value) in (list, tuple):
        return [_cast(item, dtype) for item in value]
    if not _is_eligible(value) or value.dtype is dtype:
        return value
    is_weight = value.requires_grad and value.is_leaf and not value._is_view() and value.dtype is torch.float32
    caches = torch.is_autocast_cache_enabled() and not torch.is_inference_mode_enabled()
    if not is_weight or not caches or dtype is not torch.get_autocast_dtype("cuda"):
        return value.to(dtype)
    if id(value) not in _casts:
        _casts[id(value)] = value, value.to(dtype)
    return _casts[id(value)][1]


def _casting(choose: Callable[[Any], torch.dtype]) -> Any:
    def rule(operator: Any) -> Any:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            with _below():
                dtype = choose((args, kwargs))
                # From the right, as compilers evaluate the arguments of a call: where copies lie depends on it.
                cast = {name: _cast(value, dtype) for name, value in reversed(kwargs.items())}
                return operator(*[_cast(value, dtype) for value in reversed(args)][::-1], **cast)

        return kernel

    return rule


def _widest(given: Any) -> torch.dtype:
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(given) if _is_eligible(leaf)]
    wide = any(tensor.dtype is torch.float32 for tensor in tensors)
    return torch.float32 if wide else torch.get_autocast_dtype("cuda")


def _with_dtype(operator: Any) -> Any:
    """Return the rule that asks for results in float32 where nothing else is asked for."""
    position = [argument.name for argument in operator._schema.arguments].index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = args[position] if position < len(args) else kwargs.get("dtype")
        if given is None and _is_eligible(args[0]):
            args, kwargs = args[:position], kwargs | {"dtype": torch.float32}
        with _below():
            return operator(*args, **kwargs)

    return kernel


def _norm(operator: Any) -> Any:
    """Return the rule for norms, whose overloads with a dtype are others."""
    typed = _norms.ScalarOpt_dtype if operator is _norms.Scalar else _norms.ScalarOpt_dim_dtype

    def kernel(tensor: torch.Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False) -> Any:
        rest = () if operator is _norms.Scalar else (dim, keepdim)
        with _below():
            return typed(tensor, p, *rest, dtype=torch.float32 if _is_eligible(tensor) else tensor.dtype)

    return kernel


def _noted(tracker: DeviceTracker, name: str) -> Any:
    """Return the rule that leaves an operator as it is, and says that this may be wrong."""

    def rule(operator: Any) -> Any:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            tracker.meter.cannot_tell(f"autocast of {name}")
            with _below():
                return operator(*args, **kwargs)

        return kernel

    return rule


def _banned(_operator: Any) -> Any:
    def kernel(*_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError(
            "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
            "Many models use a sigmoid layer right before the binary cross entropy layer."
        )

    return kernel


_RULES: Final[dict[str, Callable[[Any], Any]]] = {
    "lower_precision_fp": _casting(lambda _given: torch.get_autocast_dtype("cuda")),
    "fp32": _casting(lambda _given: torch.float32),
    "fp32_set_opt_dtype": _with_dtype,
    "fp32_append_dtype": _norm,
    "promote": _casting(_widest),
    "banned": _banned,
}

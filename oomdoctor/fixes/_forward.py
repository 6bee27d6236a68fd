"""Forwards of live modules replaced for a while, and what forbids to run one in another way.

What the fixes share that run a module's ``forward`` in another way. The replacement is an instance attribute, a bound
method as the original is, so that ``copy.deepcopy`` and ``pickle`` of a model in its scope give a model of its own.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias

import torch
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from oomdoctor.errors import OomDoctorError
from oomdoctor.objects.kinds import submodules

_DIMENSIONS: Final = 4
"""Batch, heads, length and features: what the kernels take."""
_SOFTMAXES: Final = frozenset({torch.ops.aten._softmax.default, torch.ops.aten._safe_softmax.default})

Forward: TypeAlias = Callable[..., Any]
Run: TypeAlias = Callable[[Any, Forward, tuple[Any, ...], dict[str, Any]], Any]
"""Runs ``forward`` of a module in its own way: ``run(module, forward, args, kwargs)``."""

_NOT_REPLACEABLE: Final = {
    "DataParallel": "nn.DataParallel copies the model with its replaced forward to every device",
    "FullyShardedDataParallel": "the parameters are sharded, and gathered by hooks around each forward",
    "OptimizedModule": "torch.compile has compiled the forward already",
    "ScriptModule": "a scripted module's forward cannot be replaced",
}

_REPEATABLE_HOOKS: Final = frozenset({"WeightNorm"})
"""Hooks of ``torch.nn.utils`` that only derive a weight from two others."""


class Replaced:
    """What stands in the place of a module's ``forward``, as an attribute of the module."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._own: Forward | None = vars(module).get("forward")

    @property
    def __wrapped__(self) -> Forward:
        """The module's own forward, by which libraries read what arguments it takes."""
        return self._own or type(self._module).forward.__get__(self._module)


def refuse_unless_plain(path: str, module: Any, also: dict[str, str] | None = None) -> None:
    """Refuse a module whose forward, or that of a part of it, cannot be replaced by an attribute.

    Args:
        also: further names of classes, with the reason.

    Raises:
        OomDoctorError: it is compiled, replicated or sharded.
    """
    reasons = _NOT_REPLACEABLE | (also or {})
    for name, part in submodules(module, path):
        for cls in type(part).__mro__:
            if cls.__name__ in reasons:
                raise OomDoctorError(f"{name} is left as it is: {reasons[cls.__name__]}")
        if getattr(part, "_compiled_call_impl", None) is not None:  # by its method ``compile``
            raise OomDoctorError(f"{name} is left as it is: {reasons['OptimizedModule']}")


def refuse_hooks(path: str, module: Any) -> None:
    """Raise ``OomDoctorError`` for forward hooks below a module, which would be called more than once."""
    for name, part in submodules(module, path):
        if part is module:
            continue
        hooks = (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
        if any(type(hook).__name__ not in _REPEATABLE_HOOKS for hook in hooks):
            raise OomDoctorError(f"{name} is left as it is: its forward hooks would be called more than once")


def active_dropout(module: Any) -> bool:
    """Tell whether a part of ``module`` drops values as it stands, as the proposals announce."""
    return any(part.training and _drop_probability(part) > 0 for part in module.modules())


def _drop_probability(part: Any) -> float:
    if isinstance(part, _DropoutNd):
        return float(part.p)
    if isinstance(part, torch.nn.RNNBase | torch.nn.MultiheadAttention):
        return float(part.dropout)
    return 0.0


def devices(module: Any) -> tuple[torch.device, ...]:
    """Return the accelerators that parameters of a module lie on."""
    return tuple({one.device for one in module.parameters() if one.device.type not in ("cpu", "meta")})


def refuse_batch_norm(path: str, module: Any) -> None:
    """Raise ``OomDoctorError`` where a layer of a module takes its statistics over the whole batch as it stands."""
    for name, part in submodules(module, path):
        couples = isinstance(part, _BatchNorm) and (part.training or part.running_mean is None)
        if couples or (isinstance(part, _NormBase) and part.training and part.track_running_stats):
            raise OomDoctorError(f"{name} takes its statistics over the whole batch: it is not split")


def is_shadow_run() -> bool:
    """Tell whether tensors have no values here: a forecast is under way."""
    return type(torch.empty(0)) is not torch.Tensor


def rng_marks(devices: Iterable[torch.device] = ()) -> tuple[Any, ...]:
    """Return where the random number generators stand, for comparison: Python's, NumPy's and, by value, torch's.

    In a shadow run those of devices stand still, and that of the host moves with them.
    """
    states = [torch.get_rng_state()]
    for device in () if is_shadow_run() else devices:
        # Apple's devices are one, and their state is asked for without a device.
        given = () if device.type == "mps" else (device,)
        states.append(getattr(torch, device.type).get_rng_state(*given))
    with _disable_current_modes():  # the states have values, which modes of a shadow run would not give
        return *host_marks(), *(state.numpy().tobytes() for state in states)


def host_marks() -> tuple[Any, ...]:
    """Return where the random number generators of Python and NumPy stand, for comparison."""
    if (numpy := sys.modules.get("numpy")) is None:
        return (random.getstate(),)
    _, keys, position, *_ = numpy.random.get_state()
    return random.getstate(), keys.tobytes(), position


class Checked(TorchFunctionMode):
    """Refuses attention that fused kernels take otherwise than when it is written out, or that none of them takes.

    A mask that leaves a query nothing to attend to gives, written out, a mean of all, or what is not a number.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function of torch that is no such attention."""
        kwargs = kwargs or {}
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        given = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
        is_mask = isinstance(given, torch.Tensor) and given.dtype is torch.bool and not is_shadow_run()
        if is_mask and not bool(given.any(-1).all()):
            raise OomDoctorError("a mask leaves a query nothing to attend to, which the fused kernel takes otherwise")
        with _Softmax() as seen:  # type: ignore[no-untyped-call]
            result = func(*args, **kwargs)
        query = kwargs.get("query", args[0] if args else None)
        if seen.ran and query.dim() == _DIMENSIONS:
            drops = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
            raise OomDoctorError(
                f"PyTorch has no fused kernel for this attention{' with dropout' if drops else ''} on "
                f"{query.device.type}: it writes out the scores"
            )
        return result


class _Softmax(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees whether a softmax runs as an operation of its own, which it does for scores that are written out."""

    ran = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran = self.ran or func in _SOFTMAXES
        return func(*args, **(kwargs or {}))

"""Forwards of live modules replaced for a while, and recomputed in the backward pass with the state left single.

What the fixes share that run a module's ``forward`` in another way. The replacement is an instance attribute, a bound
method as the original is, so that ``copy.deepcopy`` and ``pickle`` of a model in its scope give a model of its own.
Limits: a state that a forward keeps outside of its module (a global list, a file) is not seen.
"""

from __future__ import annotations

import gc
import inspect
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import wraps
from types import MethodType, TracebackType
from typing import Any, Final, TypeAlias

import torch
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from oomdoctor.errors import OomDoctorError
from oomdoctor.fixes import _generators
from oomdoctor.objects.kinds import submodules

__all__ = [
    "StateWatch",
    "active_dropout",
    "compiled",
    "devices",
    "drops",
    "host_marks",
    "is_shadow_run",
    "recomputed",
    "refuse_batch_norm",
    "refuse_hooks",
    "refuse_unless_plain",
    "replaced",
    "rng_marks",
    "running_statistics",
    "splittable",
]

Forward: TypeAlias = Callable[..., Any]
Run: TypeAlias = Callable[[Any, Forward, tuple[Any, ...], dict[str, Any]], Any]
"""Runs ``forward`` of a module in its own way: ``run(module, forward, args, kwargs)``."""

_MISSING: Final = object()
_RUNNING_STATISTICS: Final = ("running_mean", "running_var", "num_batches_tracked")
_NOT_REPLACEABLE: Final = {
    "DataParallel": "nn.DataParallel copies the model with its replaced forward to every device",
    "FullyShardedDataParallel": "the parameters are sharded, and gathered by hooks around each forward",
    "OptimizedModule": "torch.compile has compiled the forward already",
    "ScriptModule": "a scripted module's forward cannot be replaced",
}

_REPEATABLE_HOOKS: Final = frozenset({"WeightNorm"})
"""Hooks of ``torch.nn.utils`` that only derive a weight from two others."""


@contextmanager
def replaced(modules: Iterable[Any], run: Run) -> Iterator[None]:
    """Have every one of ``modules`` run its forward through ``run``; put back what was there on exit.

    A copy of a module made meanwhile goes on through ``run`` as well, with itself in the module's place, and has its
    class's own forward once the context is left.
    """
    done: list[tuple[dict[str, Any], Any, MethodType]] = []
    in_place = [True]
    try:
        for module in modules:
            held = vars(module)
            before = held.get("forward", _MISSING)
            held["forward"] = mine = _method(module, run, in_place)
            done.append((held, before, mine))
        yield
    finally:
        in_place[0] = False
        for held, before, mine in reversed(done):
            # What the user's code has put around it meanwhile stays, and reaches the original through it.
            if held.get("forward") is mine:
                if before is _MISSING:
                    del held["forward"]
                else:
                    held["forward"] = before
        _forget_copies([mine.__func__ for _, _, mine in done])


def _forget_copies(functions: list[Any]) -> None:
    """Take from copies of modules the forward that they were copied with."""
    for method in gc.get_referrers(*functions) if functions else ():
        if type(method) is MethodType and isinstance(method.__self__, torch.nn.Module):
            held = vars(method.__self__)
            if held.get("forward") is method:
                del held["forward"]


def _method(module: Any, run: Run, in_place: list[bool]) -> MethodType:
    original: Forward = module.forward

    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        inner = original if self is module else MethodType(type(self).forward, self)
        return run(self, inner, args, kwargs) if in_place[0] else inner(*args, **kwargs)

    # Libraries read which arguments a forward takes; of a method, ``inspect`` leaves the first one out.
    with suppress(TypeError, ValueError):
        taken = inspect.signature(original)
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        forward.__signature__ = taken.replace(parameters=[own, *taken.parameters.values()])  # type: ignore[attr-defined]
    return MethodType(forward, module)


def refuse_unless_plain(path: str, module: Any, also: dict[str, str] | None = None) -> None:
    """Refuse a module whose forward, or that of a part of it, cannot be replaced by an attribute.

    Args:
        path: the expression for ``module``.
        module: looked at with every module below it.
        also: further names of classes, with the reason.

    Raises:
        OomDoctorError: it is compiled, replicated or sharded.
    """
    reasons = _NOT_REPLACEABLE | (also or {})
    for name, part in submodules(module, path):
        for cls in type(part).__mro__:
            if cls.__name__ in reasons:
                raise OomDoctorError(f"{name} is left as it is: {reasons[cls.__name__]}")
    if (found := compiled(path, module)) is not None:
        raise OomDoctorError(f"{found} is left as it is: {_NOT_REPLACEABLE['OptimizedModule']}")


def compiled(path: str, module: Any) -> str | None:
    """Return the expression for a part of ``module`` that ``torch.compile`` or its ``compile`` was called on."""
    for name, part in submodules(module, path):
        if type(part).__name__ == "OptimizedModule" or getattr(part, "_compiled_call_impl", None) is not None:
            return name
    return None


def splittable(models: Iterable[tuple[str, Any]], also: dict[str, str]) -> list[tuple[str, Any]]:
    """Return those of the models, with their paths, that have parameters, each of which can be run in parts.

    Raises:
        OomDoctorError: there are none, or the forward of one cannot be replaced, for the reasons in ``also`` as well.
    """
    found = [(path, model) for path, model in models if any(True for _ in model.parameters())]
    if not found:
        raise OomDoctorError("no model was found among the names of the notebook")
    for path, model in found:
        refuse_unless_plain(path, model, also)
        refuse_hooks(path, model, own=False)
    return found


def refuse_hooks(path: str, module: Any, *, own: bool) -> None:
    """Refuse a module with forward hooks below it: they would be called more often than the user meant.

    Args:
        path: the expression for ``module``.
        module: looked at with every module below it.
        own: whether its own hooks would be as well.

    Raises:
        OomDoctorError: there are such hooks.
    """
    for name, part in submodules(module, path):
        if part is module and not own:
            continue
        hooks = (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
        if any(type(hook).__name__ not in _REPEATABLE_HOOKS for hook in hooks):
            raise OomDoctorError(f"{name} is left as it is: its forward hooks would be called more than once")


def active_dropout(module: Any) -> bool:
    """Tell whether a part of ``module`` drops values as it stands."""
    return any(part.training and drops(part) for part in module.modules())


def drops(part: Any) -> bool:
    """Tell whether ``part`` is a layer that drops values in training mode, as the proposals announce."""
    return _drop_probability(part) > 0


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
    """Refuse a module with a layer that takes its statistics over the whole batch as it stands.

    Raises:
        OomDoctorError: there is such a layer.
    """
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
    states = [torch.get_rng_state(), *(() if is_shadow_run() else (_device_rng(one) for one in devices))]
    with _disable_current_modes():  # the states have values, which modes of a shadow run would not give
        return *host_marks(), *(state.numpy().tobytes() for state in states)


def _device_rng(device: torch.device) -> Any:
    # Apple's devices are one, and their state is asked for without a device.
    return torch.mps.get_rng_state() if device.type == "mps" else getattr(torch, device.type).get_rng_state(device)


class StateWatch:
    """Tells what a forward changed in its module, the running statistics of normalisation layers apart.

    As a context manager it stands around one recomputation: running statistics are updated in copies that are thrown
    away, so that each batch counts once, and any other change is an error.

    Source: ``torch.nn.modules.batchnorm._NormBase`` keeps them in its buffers; a forward in training mode updates
    them and does not read them. ``torch.native_batch_norm`` updates those that it is given without counting up their
    version, which is how a module of the user's own may keep them.
    """

    def __init__(self, path: str, module: Any) -> None:
        self._path, self._module = path, module
        self._spared: list[tuple[dict[str, Any], str, Any]] = []
        self._before = self._marks()
        self._parameters = self._parameter_marks()

    def changed(self) -> str | None:
        """Return the path of something that is not as it was when the watch began, None if all is."""
        now = self._marks()
        if now == self._before:
            return None
        names = [name for name in now.keys() | self._before.keys() if now.get(name) != self._before.get(name)]
        return min(names)

    def __enter__(self) -> None:
        if self._parameters != self._parameter_marks():
            raise OomDoctorError(
                f"{self._path} cannot be recomputed: its parameters are no longer those that its forward ran with"
            )
        for part in self._module.modules():
            for name, buffer in running_statistics(part):
                self._spared.append((part._buffers, name, buffer))
                part._buffers[name] = buffer.clone()
        self._before = self._marks() | {"Python's or NumPy's random numbers": host_marks()}

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        drawn = self._before.pop("Python's or NumPy's random numbers")
        what = "Python's or NumPy's random numbers" if drawn != host_marks() else self.changed()
        for buffers, name, buffer in reversed(self._spared):
            buffers[name] = buffer
        self._spared.clear()
        if what is not None and (kind is None or kind.__name__ == "_StopRecomputationError"):
            raise OomDoctorError(
                f"{self._path} cannot be recomputed: its forward changes {what}, which would then happen twice"
            )

    def _marks(self) -> dict[str, Any]:
        parts = list(submodules(self._module, self._path))
        own = {name: mark for path, part in parts for name, mark in _marks(path, part)}
        return own | dict(_generators.marks(parts))

    def _parameter_marks(self) -> list[tuple[int, int]]:
        """Return which parameters there are, by identity: ``torch.func.functional_call`` exchanges them for a call."""
        return [
            (id(parameter), parameter._version)
            for _, part in submodules(self._module, self._path)
            for parameter in part._parameters.values()
            if parameter is not None
        ]


def running_statistics(part: Any) -> list[tuple[str, Any]]:
    """Return the buffers of ``part`` that its forward may update unseen, by name."""
    if isinstance(part, _NormBase):
        names = _RUNNING_STATISTICS if part.training and part.track_running_stats else ()
    else:
        names = tuple(name for name, held in part._buffers.items() if _is_vector(held))
    return [(name, part._buffers[name]) for name in names if part._buffers.get(name) is not None]


def _is_vector(buffer: Any) -> bool:
    return buffer is not None and buffer.ndim == 1 and buffer.is_floating_point()


def host_marks() -> tuple[Any, ...]:
    """Return where the random number generators of Python and NumPy stand, for comparison."""
    if (numpy := sys.modules.get("numpy")) is None:
        return (random.getstate(),)
    _, keys, position, *_ = numpy.random.get_state()
    return random.getstate(), keys.tobytes(), position


def _marks(path: str, part: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a forward may change: buffers written or replaced, plain attributes, the length of containers."""
    for name, buffer in part._buffers.items():
        if buffer is not None and not (isinstance(part, _NormBase) and name in _RUNNING_STATISTICS):
            yield f"{path}.{name}", (id(buffer), buffer._version)
    for name, value in vars(part).items():
        if type(value) in (int, float, bool, str):
            yield f"{path}.{name}", value
        elif type(value) in (list, dict, set):
            yield f"{path}.{name}", (id(value), len(value))


def recomputed(path: str, module: Any, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``forward`` so that it keeps its inputs alone and is run again in the backward pass.

    Every tensor is handed over by position, however deep it was: of the others, torch keeps neither the version nor
    the device whose random numbers have to be drawn again.

    Source: ``torch.utils.checkpoint.get_device_states`` looks at positional arguments only.
    """
    leaves, form = pytree.tree_flatten((args, kwargs))
    places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    rest = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    there = {leaves[at].device for at in places}
    elsewhere = {parameter.device for parameter in module.parameters()} - there - {torch.device("cpu")}
    anchors = [torch.empty(0, device=device) for device in elsewhere if device.type != "meta"]

    def run(*tensors: Any) -> Any:
        filled = list(rest)
        for at, tensor in zip(places, tensors, strict=False):
            filled[at] = tensor
        inner_args, inner_kwargs = pytree.tree_unflatten(filled, form)
        return forward(*inner_args, **inner_kwargs)

    tensors = [leaves[at] for at in places]
    versions = [None if tensor.is_inference() else tensor._version for tensor in tensors]
    out = checkpoint(
        run, *tensors, *anchors, use_reentrant=False, context_fn=lambda: (nullcontext(), StateWatch(path, module))
    )
    if versions != [None if tensor.is_inference() else tensor._version for tensor in tensors]:
        raise OomDoctorError(f"{path} cannot be recomputed: its forward changes its input in place")
    return out

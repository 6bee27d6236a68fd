"""Forwards of live modules replaced, what forbids that, and modules that are run again in the backward pass.

A replacement is an instance attribute, a bound method as the original is, so that ``copy.deepcopy`` and ``pickle`` of a
model in its scope give a model of its own, and keys of ``state_dict`` stay what they are.

``recompute(model, "layer1.0", "features[0:3]")`` marks modules that keep their inputs alone, and the state of torch's
random number generators, so that dropout draws the same masks again. Unlike with plain ``torch.utils.checkpoint``,
running statistics of normalisation layers count each batch once, and a forward that changes anything else of its own is
an error when it is first run again. Limits: generators of the user's own, and what a forward keeps outside of its
module (a global list, a file). The trial of a change shows both.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from types import TracebackType
from typing import Any, Final, TypeAlias

import torch
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.checkpoint import checkpoint

from oomdoctor.errors import OomDoctorError, UsageError
from oomdoctor.objects.kinds import submodules
from oomdoctor.objects.rng import generator_marks

_DIMENSIONS: Final = 4
"""Batch, heads, length and features: what the kernels take."""
_SOFTMAXES: Final = frozenset(
    getattr(torch.ops.aten, name).default for name in ("_softmax", "_safe_softmax") if hasattr(torch.ops.aten, name)
)  # torch 2.4 has the first alone

Forward: TypeAlias = Callable[..., Any]

_NOT_REPLACEABLE: Final = {
    "DataParallel": "nn.DataParallel copies the model with its replaced forward to every device",
    "FullyShardedDataParallel": "the parameters are sharded, and gathered by hooks around each forward",
    "OptimizedModule": "torch.compile has compiled the forward already",
    "ScriptModule": "a scripted module's forward cannot be replaced",
}

_REPEATABLE_HOOKS: Final = frozenset({"WeightNorm"})
"""Hooks of ``torch.nn.utils`` that only derive a weight from two others."""
_RUNNING_STATISTICS: Final = ("running_mean", "running_var", "num_batches_tracked")
_TENSOR: Final = object()
"""Stands for a tensor among other arguments."""
_STRETCH: Final = re.compile(r"(?P<path>.*?)\[(?P<start>\d+):(?P<stop>\d+)\]")


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
    """Raise ``OomDoctorError`` where the forward of a part of a module cannot be replaced by an attribute."""
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
    parts = [part for part in module.modules() if part.training]
    drops = [part.p for part in parts if isinstance(part, _DropoutNd)]
    drops += [part.dropout for part in parts if isinstance(part, torch.nn.RNNBase | torch.nn.MultiheadAttention)]
    return any(probability > 0 for probability in drops)


def devices(module: Any) -> tuple[torch.device, ...]:
    """Return the accelerators that parameters of a module lie on."""
    return tuple({one.device for one in module.parameters() if one.device.type not in ("cpu", "meta")})


def refuse_batch_norm(path: str, module: Any) -> None:
    """Raise ``OomDoctorError`` where a layer of a module takes its statistics over the whole batch as it stands."""
    for name, part in submodules(module, path):
        couples = isinstance(part, _BatchNorm) and (part.training or part.running_mean is None)
        if couples or (isinstance(part, _NormBase) and part.training and part.track_running_stats):
            raise OomDoctorError(f"{name} takes its statistics over the whole batch: it is not split")


def is_dry_run() -> bool:
    """Tell whether tensors have no values here: a forecast is under way."""
    return type(torch.empty(0)) is not torch.Tensor


def rng_marks(devices: Iterable[torch.device] = ()) -> tuple[Any, ...]:
    """Return where the random number generators stand, for comparison: Python's, NumPy's and, by value, torch's.

    In a dry run those of devices stand still, and that of the host moves with them.
    """
    states = [torch.get_rng_state()]
    for device in () if is_dry_run() else devices:
        # Apple's devices are one, and their state is asked for without a device.
        given = () if device.type == "mps" else (device,)
        states.append(getattr(torch, device.type).get_rng_state(*given))
    with _disable_current_modes():  # the states have values, which modes of a dry run would not give
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
        is_mask = isinstance(given, torch.Tensor) and given.dtype is torch.bool and not is_dry_run()
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


def recompute(model: Any, *modules: str) -> None:
    """Have ``modules`` of ``model`` run again in the backward pass; without gradients they run as ever.

    Args:
        model: a ``torch.nn.Module``. What was marked in it before is marked no longer, so that a cell with this call
            may run again.
        modules: paths as ``model.named_modules()`` gives them, ``"layer1.0"``, with ``*`` for any one name,
            ``"blocks.*"``; layers of a ``Sequential`` that are run again together as ``"features[0:3]"``.

    Raises:
        UsageError: there is no such module.
        OomDoctorError: it is compiled, replicated or sharded, or has forward hooks below it; raised in the backward
            pass by a module that changes its own state, its input, or draws random numbers of Python or NumPy.
    """
    stretches: dict[str, list[tuple[int, int]]] = {}
    for text in modules:
        found = _STRETCH.fullmatch(text)
        name = text if found is None else found["path"]
        pattern = re.compile(re.escape(name).replace(r"\*", r"[^.]+"))
        paths = [path for path, _ in model.named_modules(remove_duplicate=False) if pattern.fullmatch(path)]
        if not paths:
            names = ", ".join(name for name, _ in model.named_children())
            raise UsageError(f"{type(model).__name__} has no module {name!r}: it is made of {names}")
        for path in paths:
            stretches.setdefault(path, []).extend([] if found is None else [(int(found["start"]), int(found["stop"]))])
    refuse_unless_plain(type(model).__name__, model)
    for path, spans in stretches.items():
        module = model.get_submodule(path)
        refuse_hooks(path, module)
        if spans and type(module).forward is not torch.nn.Sequential.forward:
            raise UsageError(f"{path!r} is a {type(module).__name__}: stretches are those of a Sequential")
    for part in model.modules():
        if type(mark := vars(part).get("forward")) is _Recomputed:
            mark.remove()
    for path, spans in stretches.items():
        module = model.get_submodule(path)
        module.forward = _Recomputed(module, path or type(model).__name__, sorted(spans))


class _Recomputed(Replaced):
    """The ``forward`` of a module that is run again in the backward pass, whole or in stretches of its layers."""

    def __init__(self, module: Any, path: str, stretches: list[tuple[int, int]]) -> None:
        super().__init__(module)
        self._path, self._stretches = path, stretches

    def remove(self) -> None:
        """Put the module's own forward back."""
        del self._module.forward
        if self._own is not None:
            self._module.forward = self._own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.__wrapped__(*args, **kwargs)
        if not self._stretches:
            return recomputed(self._path, self._module, self.__wrapped__, args, kwargs)
        (out,), layers, at = args, list(self._module), 0
        for start, stop in self._stretches:
            out = _run(layers[at:start], out)
            layers_here = torch.nn.ModuleList(layers[start:stop])
            name = f"{self._path}[{start}:{stop}]"
            out = recomputed(name, layers_here, partial(_run, layers_here), (out,), {})
            at = stop
        return _run(layers[at:], out)


def _run(layers: Any, out: Any) -> Any:
    for layer in layers:
        out = layer(out)
    return out


def recomputed(path: str, module: Any, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``forward`` so that it keeps its inputs alone and is run again in the backward pass.

    Every tensor is handed over by position, however deep it was: torch asks no others for the device whose random
    numbers have to be drawn again. Source: ``torch.utils.checkpoint.get_device_states``.
    """
    leaves, form = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    rest = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    elsewhere = {one.device for one in module.parameters()} - {one.device for one in tensors} - {torch.device("cpu")}
    anchors = [torch.empty(0, device=device) for device in elsewhere if device.type != "meta"]

    def run(*given: Any) -> Any:
        following = iter(given)
        filled = [next(following) if leaf is _TENSOR else leaf for leaf in rest]
        inner_args, inner_kwargs = pytree.tree_unflatten(filled, form)
        return forward(*inner_args, **inner_kwargs)

    versions = [None if tensor.is_inference() else tensor._version for tensor in tensors]
    out = checkpoint(
        run, *tensors, *anchors, use_reentrant=False, context_fn=lambda: (nullcontext(), StateWatch(path, module))
    )
    if versions != [None if tensor.is_inference() else tensor._version for tensor in tensors]:
        raise OomDoctorError(f"{path} cannot be recomputed: its forward changes its input in place")
    return out


class StateWatch:
    """Tells what a forward changed in its module, the running statistics of normalisation layers apart.

    As a context manager it stands around one recomputation: running statistics are updated in copies that are thrown
    away, so that each batch counts once, and any other change is an error. ``torch.native_batch_norm`` updates those
    that it is given without counting up their version, which is how a module of the user's own may keep them.
    """

    def __init__(self, path: str, module: Any) -> None:
        self._path, self._module = path, module
        self._spared: list[tuple[dict[str, Any], str, Any]] = []
        self._before = self._marks()
        self._parameters = self._parameter_marks()

    def changed(self) -> str | None:
        """Return the path of something that is not as it was when the watch began, None if all is."""
        now = self._marks()
        names = now.keys() | self._before.keys()
        return min((name for name in names if now.get(name) != self._before.get(name)), default=None)

    def __enter__(self) -> None:
        if self._parameters != self._parameter_marks():
            raise OomDoctorError(
                f"{self._path} cannot be recomputed: its parameters are no longer those that its forward ran with"
            )
        for part in self._module.modules():
            for name, buffer in _running_statistics(part):
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
        return own | dict(generator_marks(parts))

    def _parameter_marks(self) -> list[tuple[int, int]]:
        """Return which parameters there are, by identity: ``torch.func.functional_call`` exchanges them for a call."""
        return [
            (id(parameter), parameter._version)
            for _, part in submodules(self._module, self._path)
            for parameter in part._parameters.values()
            if parameter is not None
        ]


def _running_statistics(part: Any) -> list[tuple[str, Any]]:
    """Return the buffers of ``part`` that its forward may update unseen, by name."""
    if isinstance(part, _NormBase):
        names = _RUNNING_STATISTICS if part.training and part.track_running_stats else ()
    else:
        held = {name: buffer for name, buffer in part._buffers.items() if buffer is not None}
        names = tuple(name for name, buffer in held.items() if buffer.ndim == 1 and buffer.is_floating_point())
    return [(name, part._buffers[name]) for name in names if part._buffers.get(name) is not None]


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

"""Modules run again in the backward pass instead of keeping their activations: the trade of time for memory.

``recompute(model, "layer1.0", "features[0:3]")`` marks them. A marked module keeps its inputs alone, and the state of
torch's random number generators, so that dropout draws the same masks again. Unlike with plain
``torch.utils.checkpoint``, running statistics of normalisation layers count each batch once, and a forward that
changes anything else of its own is an error when it is first run again. The mark is an attribute of the module beside
its ``forward``: keys of ``state_dict``, copies and pickles stay what they are.

Limits: recomputing puts back the state of torch's own generators alone, so what draws from another one draws other
numbers; a state that a forward keeps outside of its module (a global list, a file) is changed twice. The trial of a
change shows both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from types import TracebackType
from typing import Any, Final

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from oomdoctor.errors import OomDoctorError, UsageError
from oomdoctor.fixes import _forward
from oomdoctor.objects.kinds import submodules

_RUNNING_STATISTICS: Final = ("running_mean", "running_var", "num_batches_tracked")
_STRETCH: Final = re.compile(r"(?P<path>.*?)\[(?P<start>\d+):(?P<stop>\d+)\]")


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
    _forward.refuse_unless_plain(type(model).__name__, model)
    for path, spans in stretches.items():
        module = model.get_submodule(path)
        _forward.refuse_hooks(path, module)
        if spans and type(module).forward is not torch.nn.Sequential.forward:
            raise UsageError(f"{path!r} is a {type(module).__name__}: stretches are those of a Sequential")
    for part in model.modules():
        if type(mark := vars(part).get("forward")) is _Recomputed:
            mark.remove()
    for path, spans in stretches.items():
        module = model.get_submodule(path)
        module.forward = _Recomputed(module, path or type(model).__name__, sorted(spans))


class _Recomputed(_forward.Replaced):
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


def recomputed(path: str, module: Any, forward: _forward.Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
            for name, buffer in _running_statistics(part):
                self._spared.append((part._buffers, name, buffer))
                part._buffers[name] = buffer.clone()
        self._before = self._marks() | {"Python's or NumPy's random numbers": _forward.host_marks()}

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        drawn = self._before.pop("Python's or NumPy's random numbers")
        what = "Python's or NumPy's random numbers" if drawn != _forward.host_marks() else self.changed()
        for buffers, name, buffer in reversed(self._spared):
            buffers[name] = buffer
        self._spared.clear()
        if what is not None and (kind is None or kind.__name__ == "_StopRecomputationError"):
            raise OomDoctorError(
                f"{self._path} cannot be recomputed: its forward changes {what}, which would then happen twice"
            )

    def _marks(self) -> dict[str, Any]:
        parts = submodules(self._module, self._path)
        return {name: mark for path, part in parts for name, mark in _marks(path, part)}

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

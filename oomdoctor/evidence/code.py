"""What the user's code and objects are like, read without running any of it.

The cells, and the modules of the user's own that they import, are read as text (their AST, with IPython's own lines
masked) and the objects through their dictionaries. What a name leads to is taken from the namespace as it stands.
Limits: installed packages are not read, and what a framework calls on the user's behalf is not followed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Final

from oomdoctor.evidence import _models, _program_settings
from oomdoctor.evidence._models import parameters
from oomdoctor.evidence._trainers import Passed, trainers
from oomdoctor.model.code import CodeFacts, ReplicaFacts, TrainingLoop
from oomdoctor.model.fix import Detect
from oomdoctor.model.session import Cells, Standing
from oomdoctor.model.site import Site
from oomdoctor.objects import jittor
from oomdoctor.objects.frames import own_names
from oomdoctor.objects.kinds import Kind, kind_of, module_of, mro_of, name_of, plain_dict, submodules
from oomdoctor.objects.known import Objects
from oomdoctor.program import kept_tensors
from oomdoctor.program.code_names import growing
from oomdoctor.program.definitions import Program, read
from oomdoctor.program.dependencies import Ground, ground, is_gradless_at, lines_among, unreached
from oomdoctor.program.gradients import runs_model
from oomdoctor.program.names import FirstUse, bound_names, first_uses
from oomdoctor.program.repeatability import Repetition, not_repeatable
from oomdoctor.program.training_loops import training_loops
from oomdoctor.sandbox.copies import answered


def facts(
    cells: Cells,
    namespace: Mapping[str, Any],
    modules: Iterable[tuple[str, Any]] = (),
    optimizers: Iterable[tuple[str, Any]] = (),
    loaders: Iterable[tuple[str, Any]] = (),
    *,
    local: Iterable[tuple[str, Any, tuple[int, int]]] = (),
    local_optimizers: Iterable[tuple[str, Any, tuple[int, int]]] = (),
    line: int | None = None,
    running: Iterable[tuple[int, int]] = (),
    standing: Mapping[tuple[int, int], Standing] | None = None,
    passed: Passed | None = None,
    loaded: Container[str] = sys.modules,
    detectors: Mapping[str, Detect] | None = None,
    tries: bool = True,
    is_kept: bool = False,
) -> CodeFacts:
    """Return what the cells and the objects show; types and dictionaries of what is in the globals are looked at.

    Args:
        modules, optimizers, loaders: ``(path, object)``; to ``local`` ones only locals lead, of a function that begins
            at ``(cell, line)``.
        line: of the failing cell, that was running; ``running``: ``(cell, line)`` of all that was, and stood so.
        passed: the trainer of a library that the failure came out of; ``loaded``: the names of loaded modules.
        tries: whether samples of loaders with workers are made in a copy of the process.
        is_kept: whether every tensor was copied when the failing cell began.
    """
    modules, optimizers, loaders, running = tuple(modules), tuple(optimizers), tuple(loaders), tuple(running)
    own_optimizers = [(path, optimizer) for path, optimizer, _ in local_optimizers]
    told = _of_objects(modules, optimizers, tuple(local), own_optimizers)
    kinds = _kinds(namespace, optimizers) | {one.path: "model" for one in told["models"]}
    kinds |= {one.path: "loss" for one in told["losses"]}
    program = read(cells)
    under = ground(program)
    ahead = _ahead(program, cells.failing.source, namespace, line, running, standing or {})
    off = {name for name, value in namespace.items() if value is False}
    repetition = _repetition(program, cells.failing.source, namespace, under, ahead, off=off, is_kept=is_kept)
    loops = training_loops(program, kinds, line, running)
    found = {"modules": modules, "optimizers": optimizers, "loaders": loaders, "models": told["models"]}
    objects = Objects(namespace=namespace, losses=told["losses"], kinds=kinds, loops=loops, line=line, **found)
    return CodeFacts(
        **told,
        **_program_settings.told(program, under, modules, loaders, loaded, line, off | _off_within(namespace)),
        failing_cell=cells.failing.number,
        loops=tuple(replace(loop, batch_shape=_batch_shape(loop, namespace)) for loop in loops),
        runs_model=runs_model(program, kinds),
        not_repeatable=repetition.once,
        not_reached=repetition.ahead,
        written_anew=repetition.anew,
        grad_disabled=is_gradless_at(program, {(program.failing, line), *running}),
        hooks=kept_tensors.hooks(program, under),
        batch_sizes=_program_settings.batch_sizes(loaders),
        loaders=_program_settings.loaders(loaders, tries=tries),
        reruns=_reruns(cells),
        grows=() if line is None else _grows(cells),
        trainers=trainers(program, under, passed, modules),
        sites=dict(_sites(program, objects, detectors or {}, lines_among(program, ahead), running)),
    )


def _sites(
    program: Program, objects: Objects, practices: Mapping[str, Detect], late: Container[tuple[int, int]], running: Any
) -> Iterator[tuple[str, tuple[Site, ...]]]:
    met = {detect: detect(program, objects) for detect in practices.values()}  # several fixes may mend one practice
    yield from ((fix, _timed(fix, met[one], late, running)) for fix, one in practices.items() if met[one])


def _kinds(namespace: Mapping[str, Any], optimizers: Iterable[tuple[str, Any]]) -> dict[str, str]:
    kinds = {name: "scheduler" for name, value in namespace.items() if kind_of(type(value)) is Kind.SCHEDULER}
    kinds |= {name: kind for name, value in namespace.items() if (kind := jittor.role_of(type(value))) is not None}
    return kinds | {path: "optimizer" for path, _ in optimizers}


def _of_objects(
    modules: Sequence[tuple[str, Any]],
    optimizers: Sequence[tuple[str, Any]],
    local: Sequence[tuple[str, Any, tuple[int, int]]],
    local_optimizers: Sequence[tuple[str, Any]],
) -> dict[str, Any]:
    """Return the fields of ``CodeFacts`` that the objects tell, and this process."""
    stepping = [*optimizers, *local_optimizers]
    own = [(model, scope) for path, module, scope in local for model in _models.models([(path, module)], stepping)]
    return {
        "models": _models.models(modules, stepping),
        "local_models": tuple(replace(model, scope=scope) for model, scope in own),
        "losses": _models.losses(modules),
        "optimizers": tuple((path, _models.kind_of_optimizer(optimizer)) for path, optimizer in optimizers),
        "steppers": _models.optimizers(optimizers),
        "local_steppers": _models.optimizers(local_optimizers),
        "classes": _models.classes([*modules, *((path, module) for path, module, _ in local)]),
        "sharing_strategy": _program_settings.sharing_strategy(),
        "native_bfloat16": native_bfloat16(),
        "float32_only": float32_only(model for _, model in modules),
        "world_size": world_size(),
        "replicas": replicas(modules),
    }


def _grows(cells: Cells) -> tuple[tuple[str, str], ...]:
    """Return the names of the failing cell that hold more with each round of a loop, and the line that makes them."""
    cell = cells.failing
    lines = cell.source.split("\n")
    found = growing(cell.source).items()
    return tuple((name, f"In[{cell.number}] line {at}: {lines[at - 1].strip()}") for name, at in found)


def _ahead(
    program: Program,
    source: str,
    namespace: Mapping[str, Any],
    line: int | None,
    running: Collection[tuple[int, int]],
    standing: Mapping[tuple[int, int], Standing],
) -> frozenset[int]:
    """Return the ids of the nodes of the failing cell's program that were not reached; see `unreached`."""
    at_top = bound_names(source).difference(namespace)
    own = {} if line is None else {name: own_names(value) for name, value in namespace.items()}
    return unreached(program, line, running, {**standing, (program.failing, line or 0): Standing(at_top, own)})


def _repetition(
    program: Program,
    source: str,
    namespace: Mapping[str, Any],
    under: Ground,
    ahead: Container[int],
    *,
    off: Container[str],
    is_kept: bool,
) -> Repetition:
    """Return what a second run of the failing cell would do a second time; see `not_repeatable`."""
    uses = first_uses(source)
    # An iterator that the failing cell makes itself is made again.
    live = {name: value for name, value in namespace.items() if uses.get(name) is not FirstUse.BINDS}
    iterators = {name for name, value in live.items() if kind_of(type(value)) is Kind.ITERATOR}
    return not_repeatable(
        program, lambda name: _home(live.get(name)), iterators, under, ahead, off=off, is_kept=is_kept
    )


def _reruns(cells: Cells) -> int:
    source = cells.failing.source.strip()
    return sum(cell.source.strip() == source for cell in cells.history[:-1]) if source else 0


def _off_within(namespace: Mapping[str, Any]) -> set[str]:
    """Return the attributes of the notebook's objects that are False, such as ``args.amp``."""
    return {
        f"{name}.{attribute}"
        for name, owner in namespace.items()
        for attribute, value in list((plain_dict(owner) or {}).items())
        if value is False
    }


def _timed(
    fix: str, sites: tuple[Site, ...], late: Container[tuple[int, int]], running: Iterable[tuple[int, int]]
) -> tuple[Site, ...]:
    """Return sites with whether what they make may take memory by now; ``late`` are ``(cell, line)`` not reached.

    A forward that nothing is differentiated of lets go of what it saved when it ends.
    """
    return tuple(
        replace(one, holds=False)
        if (one.cell, one.line) in late
        or (
            fix == _UNDIFFERENTIATED
            and running
            and not any(cell == one.cell and one.line <= at <= one.end_line for cell, at in running)
        )
        else one
        for one in sites
    )


def _batch_shape(loop: TrainingLoop, namespace: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the shape of the first plain tensor of the batch, of a loop that stands at the top level."""
    names = loop.batch if loop.function is None and loop.was_running else ()
    values = (namespace[name] for name in names if name in namespace)
    tensor = next((one for one in values if (type(one).__module__, type(one).__name__) == ("torch", "Tensor")), None)
    return tuple(tensor.shape) if tensor is not None else None


def _home(value: object) -> tuple[str, ...]:
    if type(value) is partial:
        return _home(value.func)
    if type(value) is ModuleType:
        name = vars(value).get("__name__")
        return (name,) if type(name) is str else ()
    if any(type(value) is kind for kind in (FunctionType, BuiltinFunctionType, type)):
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        return (f"{module}.{name}",) if type(module) is str else ()
    return ()


_UNDIFFERENTIATED: Final = "no_grad_eval"
_RECURRENT: Final = ("LSTM", "GRU", "RNN")
"""Layers that oneDNN has no kernel in bfloat16 for on some processors."""
_FAILED: Final = "it failed"
_TRIAL_S: Final = 10.0


def native_bfloat16() -> bool | None:
    """Whether the CUDA device computes in bfloat16 itself; None where CUDA is not in use in this process.

    Asked of the properties that torch has read, so that nothing is set up. Source: ``torch.cuda.is_bf16_supported``:
    compute capability 8.0, and every device of ROCm.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return torch.version.hip is not None or bool(torch.cuda.get_device_capability() >= (8, 0))


def float32_only(models: Iterable[Any]) -> tuple[str, ...]:
    """Return the classes of layers that this processor computes in float32 and has no kernel for in bfloat16.

    It depends on the processor's extensions and on the library, so it is tried: in a forked copy, a small layer of the
    kind runs on a few zeros. Limits: layers of torch in host memory.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or torch.cuda.is_initialized() or not hasattr(os, "fork"):
        return ()
    layers = [layer for model in models for _, layer in submodules(model)]
    weights = {name: parameters(one for one in layers if type(one) is getattr(torch.nn, name)) for name in _RECURRENT}
    return tuple(
        name
        for name, given in sorted(weights.items())
        if given and all(type(one) is torch.nn.Parameter and one.device.type == "cpu" for one in given)
        if _lacks_bfloat16(name)
    )


@cache  # the processor does not change
def _lacks_bfloat16(name: str) -> bool:
    return answered(partial(_end_in_bfloat16, name), limit_s=_TRIAL_S)[0] == _FAILED


def _end_in_bfloat16(name: str) -> str:
    """Return how a layer ends under autocast; for a forked copy, whose random numbers are its own."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    with torch.no_grad(), _disable_current_modes(), torch.autocast("cpu", dtype=torch.bfloat16):
        try:
            getattr(torch.nn, name)(2, 2, device="cpu")(torch.zeros(2, 2, 2, device="cpu"))
        except RuntimeError:
            return _FAILED
    return "it ran"


_WRAPPERS: Final = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel"),
    ("torch.nn.parallel.data_parallel", "DataParallel"),
)


def world_size() -> int | None:
    """Return how many processes the default process group of this process has, None where there is no group."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return int(distributed.get_world_size())


def replicas(modules: Iterable[tuple[str, Any]]) -> tuple[ReplicaFacts, ...]:
    """Return the facts of each root module that is such a wrapper."""
    return tuple(
        _replica(path, module, name_of(base))
        for path, module in modules
        for base in mro_of(type(module))
        if (module_of(base), name_of(base)) in _WRAPPERS
    )


def _replica(path: str, module: Any, name: str) -> ReplicaFacts:
    from torch import _C

    own, dtype_of = plain_dict(module) or {}, vars(_C.TensorBase)["dtype"].__get__
    dtypes = {str(dtype_of(one)).removeprefix("torch.") for one in parameters([module])}
    devices = own.get("device_ids")
    group: Any = own.get("process_group")
    ranks = len(devices) if name == "DataParallel" and type(devices) is list else None
    return ReplicaFacts(
        path=path,
        type_name=name,
        ranks=int(group.size()) if module_of(type(group)).startswith("torch.") else ranks,
        dtypes=tuple(sorted(dtypes)),
        bucket_views=own.get("gradient_as_bucket_view") is True,
    )

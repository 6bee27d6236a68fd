"""What the user's code and objects are like, read without running any of it.

The cells, and the modules of the user's own that they import, are read as text (their AST, with IPython's own lines
masked) and the objects through their dictionaries. What a name leads to is taken from the namespace as it stands.
Limits: installed packages are not read, and what a framework calls on the user's behalf is not followed.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from functools import partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from oomdoctor.evidence import _models, _precision, _replicas, _setup
from oomdoctor.evidence._loaders import batch_sizes, sharing_strategy
from oomdoctor.evidence._loaders import loaders as loader_facts
from oomdoctor.evidence._models import optimizers as optimizer_facts
from oomdoctor.evidence._trainers import Passed, trainers
from oomdoctor.model.code import CodeFacts, TrainingLoop
from oomdoctor.model.fix import Detect
from oomdoctor.model.session import Cells
from oomdoctor.objects.kinds import Kind, kind_of
from oomdoctor.objects.known import Objects
from oomdoctor.program import kept_tensors
from oomdoctor.program.definitions import read
from oomdoctor.program.gradients import runs_model
from oomdoctor.program.ground import ground, is_gradless_at, unreached
from oomdoctor.program.names import FirstUse, first_uses
from oomdoctor.program.repetition import not_repeatable
from oomdoctor.program.training_loops import training_loops


def facts(
    cells: Cells,
    namespace: Mapping[str, Any],
    modules: Iterable[tuple[str, Any]] = (),
    optimizers: Iterable[tuple[str, Any]] = (),
    loaders: Iterable[tuple[str, Any]] = (),
    *,
    local: Iterable[tuple[str, Any, tuple[int, int]]] = (),
    line: int | None = None,
    running: Iterable[tuple[int, int]] = (),
    passed: Passed | None = None,
    loaded: Container[str] = sys.modules,
    detectors: Mapping[str, Detect] | None = None,
    tries: bool = True,
    is_kept: bool = False,
) -> CodeFacts:
    """Return what the cells and the objects show.

    Args:
        cells: the cells that were run, the failing one last.
        namespace: the globals that they ran in; only types and dictionaries of its values are looked at.
        modules: ``(path, nn.Module)`` of each root module found there.
        optimizers: likewise; ``loaders``: likewise.
        local: ``(path, nn.Module, (cell, line))`` of each that only locals of a function lead to, with where it begins.
        line: line of the failing cell that was running, to tell whether autograd was off there.
        running: ``(cell, line)`` of all that was running, functions of earlier cells included.
        passed: the trainer of a library that the failure came out of.
        loaded: names of the modules that this process has imported.
        detectors: what finds the practice that a fix mends, by the id of the fix.
        tries: whether samples of loaders with workers are made in a copy of the process.
        is_kept: whether every tensor was copied when the failing cell began.
    """
    modules, optimizers, loaders, running = tuple(modules), tuple(optimizers), tuple(loaders), tuple(running)
    models, losses = _models.models(modules), _models.losses(modules)
    kinds = {name: "scheduler" for name, value in namespace.items() if kind_of(type(value)) is Kind.SCHEDULER}
    kinds |= {path: "optimizer" for path, _ in optimizers}
    kinds |= {model.path: "model" for model in models} | {loss.path: "loss" for loss in losses}
    program = read(cells)
    under = ground(program)
    live = _from_before(cells, namespace)
    once, ahead = not_repeatable(
        program,
        lambda name: _home(live.get(name)),
        {name for name, value in live.items() if kind_of(type(value)) is Kind.ITERATOR},
        under,
        unreached(program, line, running),
        is_kept=is_kept,
    )
    loops = training_loops(program, kinds, line, running)
    objects = Objects(
        namespace=namespace,
        modules=modules,
        optimizers=optimizers,
        loaders=loaders,
        models=models,
        losses=losses,
        kinds=kinds,
        loops=loops,
        line=line,
    )
    return CodeFacts(
        failing_cell=cells.failing.number,
        loops=tuple(replace(loop, batch_shape=_batch_shape(loop, namespace)) for loop in loops),
        models=models,
        local_models=tuple(_models.local(local)),
        losses=losses,
        optimizers=_models.typed(optimizers),
        steppers=optimizer_facts(optimizers),
        runs_model=runs_model(program, kinds),
        not_repeatable=once,
        not_reached=ahead,
        grad_disabled=is_gradless_at(program, {(program.failing, line), *running}),
        hooks=kept_tensors.hooks(program, under),
        classes=_models.classes(modules),
        batch_sizes=batch_sizes(loaders),
        loaders=loader_facts(program, loaders, tries=tries),
        sharing_strategy=sharing_strategy(),
        native_bfloat16=_precision.native_bfloat16(),
        float32_only=_precision.float32_only(model for _, model in modules),
        world_size=_replicas.world_size(),
        replicas=_replicas.replicas(modules),
        reruns=_reruns(cells),
        trainers=trainers(program, under, passed, modules, loaders, loops),
        **_setup.told(program, under, modules, loaders, loaded, line),
        sites={fix: found for fix, detect in (detectors or {}).items() if (found := detect(program, objects))},
    )


def _batch_shape(loop: TrainingLoop, namespace: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the shape of the first plain tensor of the batch, of a loop that stands at the top level."""
    names = loop.batch if loop.function is None and loop.was_running else ()
    values = (namespace[name] for name in names if name in namespace)
    tensor = next((one for one in values if (type(one).__module__, type(one).__name__) == ("torch", "Tensor")), None)
    return tuple(tensor.shape) if tensor is not None else None


def _reruns(cells: Cells) -> int:
    source = cells.failing.source.strip()
    return sum(cell.source.strip() == source for cell in cells.history[:-1]) if source else 0


def _from_before(cells: Cells, namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names that the failing cell may have found bound: an iterator that it makes itself is made again."""
    uses = first_uses(cells.failing.source)
    return {name: value for name, value in namespace.items() if uses.get(name) is not FirstUse.BINDS}


def _home(value: object) -> tuple[str, ...]:
    """Return the dotted name by which a module, function or class is defined."""
    if type(value) is partial:
        return _home(value.func)
    if type(value) is ModuleType:
        name = vars(value).get("__name__")
        return (name,) if type(name) is str else ()
    if any(type(value) is kind for kind in (FunctionType, BuiltinFunctionType, type)):
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        return (f"{module}.{name}",) if type(module) is str else ()
    return ()

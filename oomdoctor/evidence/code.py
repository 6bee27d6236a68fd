"""What the user's code and objects are like, read without running any of it.

The cells are read as text (their AST, with IPython's own lines masked) and the objects through their dictionaries.
What a name leads to is taken from the namespace as it stands. Limits: code in imported files is not read, and what a
framework calls on the user's behalf is not followed.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Container, Iterable, Mapping
from typing import Any

from oomdoctor.evidence import _feeding, _kept, _models, _precision, _setup
from oomdoctor.evidence._attention import eager_attention
from oomdoctor.evidence._ground import ground
from oomdoctor.evidence._hooks import hooks
from oomdoctor.evidence._keeping import history_appends
from oomdoctor.evidence._loops import training_loops
from oomdoctor.evidence._program import Program, is_gradless, read
from oomdoctor.evidence._repeating import not_repeatable
from oomdoctor.model.evidence import CodeFacts
from oomdoctor.model.kinds import Kind, kind_of
from oomdoctor.model.names import FirstUse, first_uses
from oomdoctor.model.session import Cells

__all__ = ["facts"]


def facts(
    cells: Cells,
    namespace: Mapping[str, Any],
    modules: Iterable[tuple[str, Any]] = (),
    optimizers: Iterable[tuple[str, Any]] = (),
    loaders: Iterable[tuple[str, Any]] = (),
    *,
    line: int | None = None,
    loaded: Container[str] = sys.modules,
) -> CodeFacts:
    """Return what the cells and the objects show.

    Args:
        cells: the cells that were run, the failing one last.
        namespace: the globals that they ran in; only types and dictionaries of its values are looked at.
        modules: ``(path, nn.Module)`` of each root module found there.
        optimizers: likewise; ``loaders``: likewise.
        line: line of the failing cell that was running, to tell whether autograd was off there.
        loaded: names of the modules that this process has imported.
    """
    modules, optimizers, loaders = tuple(modules), tuple(optimizers), tuple(loaders)
    models, losses = _models.models(modules), _models.losses(modules)
    kinds = {name: "scheduler" for name, value in namespace.items() if kind_of(type(value)) is Kind.SCHEDULER}
    kinds |= {path: "optimizer" for path, _ in optimizers}
    kinds |= {model.path: "model" for model in models} | {loss.path: "loss" for loss in losses}
    program = read(cells)
    under = ground(program)
    return CodeFacts(
        failing_cell=cells.failing.number,
        loops=training_loops(program, kinds),
        models=models,
        losses=losses,
        optimizers=_models.typed(optimizers),
        history_appends=history_appends(program, kinds),
        not_repeatable=not_repeatable(program, _from_before(cells, namespace)),
        grad_disabled=line is not None and _grad_disabled(program, line),
        retain_graph=_kept.retain_graph(under),
        gathers_predictions=_kept.gathers_predictions(program, kinds),
        carries_state=_kept.carries_state(program, under),
        keeps_gradients=_kept.keeps_gradients(under),
        hooks=hooks(program, under),
        eager_attention=eager_attention(under),
        generates=_setup.generates(program),
        loads_on_device=_feeding.loads_on_device(program, namespace),
        dataset_on_device=_feeding.dataset_on_device(under),
        numpy_call=_feeding.numpy_call(program, line),
        num_workers=_feeding.workers(under, loaders),
        prefetch=_feeding.prefetch(under, loaders),
        pin_memory=_feeding.pin_memory(under, loaders),
        sequence_varies=_feeding.sequence_varies(program, under, loaders),
        autocast=_precision.autocast(under),
        half_weights=_precision.half_weights(under, modules),
        apex=_precision.apex(under),
        data_parallel=_setup.data_parallel(under.basis),
        distributed=_setup.distributed(under.basis, modules),
        find_unused_parameters=_setup.find_unused_parameters(under.basis),
        compiles=_setup.compiles(under.basis, modules),
        cuda_graphs=_setup.cuda_graphs(under.basis),
        framework=_setup.framework(program, loaded),
        reruns=_reruns(cells),
    )


def _reruns(cells: Cells) -> int:
    source = cells.failing.source.strip()
    return sum(cell.source.strip() == source for cell in cells.history[:-1]) if source else 0


def _from_before(cells: Cells, namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names that the failing cell may have found bound: an iterator that it makes itself is made again."""
    uses = first_uses(cells.failing.source)
    return {name: value for name, value in namespace.items() if uses.get(name) is not FirstUse.BINDS}


def _grad_disabled(program: Program, line: int) -> bool:
    """Whether ``line`` of the failing cell stands under ``no_grad`` or ``inference_mode``."""
    for scope in program.running:
        if scope.cell != program.failing:
            continue
        for node in (inner for statement in scope.body for inner in ast.walk(statement)):
            if isinstance(node, ast.With | ast.AsyncWith) and _covers(node, line) and any(map(is_gradless, node.items)):
                return True
        if scope.disables_grad and scope.function is not None and _covers(scope.function.node, line):
            return True
    return False


def _covers(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)

"""Keeps what the backward pass needs in host memory and brings it back when its turn comes.

``torch.autograd.graph.save_on_cpu`` packs every tensor that an operation saves. Plain copies come back with the same
strides, so the same kernels run on the same numbers. Through page-locked memory the copies run beside the computation,
but tensors come back contiguous; a kernel for another layout may round differently, so that dose promises results equal
up to rounding. Parameters are saved by operations as well, and travel with the rest.

In the source, the ``with`` stands around the step from the first call of a model to ``backward``; live, around the
whole cell. Limits: what the operations themselves need at a moment stays on the device, and on machines whose device
memory is the host's nothing is gained.

Source: https://pytorch.org/docs/stable/autograd.html#torch.autograd.graph.save_on_cpu, and its ``pack_to_cpu``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

import libcst as cst

from oomdoctor.fixes import _host_room
from oomdoctor.model.absence import Refused
from oomdoctor.model.code import TrainingLoop
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.memory import Role
from oomdoctor.model.sizes import format_size
from oomdoctor.program import import_lines, rewriting
from oomdoctor.program.rewriting import text_of, within

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.session import Cells, Session

__all__ = ["FIX", "apply", "patch", "propose"]

_HOME: Final = "torch.autograd.graph"
_NAME: Final = "save_on_cpu"
_HOOKED: Final = re.compile(r"\bsave_on_cpu\b|\bsaved_tensors_hooks\b")

_SLOWDOWN: Final = {True: 1.5, False: 2.5}
"""Time of a step by whether the copies are page-locked, as a ratio. Round figures, not measured."""

_CONTIGUOUS: Final = "tensors come back contiguous, so that results are equal up to the rounding of other kernels"


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose page-locked copies where the device is CUDA's, and plain ones."""
    del incident
    code = evidence.code
    if code.grad_disabled:
        return Refused("gradients are off: nothing is kept for a backward pass")
    if code.cuda_graphs is not None:
        return Refused(f"{code.cuda_graphs} captures a graph, in which nothing can be copied to the host")
    activations = evidence.census.bytes_of(Role.ACTIVATION)
    if not activations:
        return Refused("the census found no activations that could wait in host memory")
    if (refused := _host_room.refuse(evidence, activations)) is not None:
        return refused
    doses = (True, False) if evidence.device.tensor_device.startswith("cuda") else (False,)
    return tuple(
        Proposal(
            dose=Dose.of(pin_memory=pinned),
            effect=Effect.EQUIVALENT if pinned else Effect.EXACT,
            saves=activations,
            slowdown=_SLOWDOWN[pinned],
            basis=f"the census found {format_size(activations)} of activations, which would wait in host memory",
            caveat=_CONTIGUOUS if pinned else None,
        )
        for pinned in doses
    )


@contextmanager
def apply(session: Session, dose: Dose) -> Iterator[None]:
    """Save in host memory whatever operations of this thread save for a backward pass."""
    from torch.autograd.graph import save_on_cpu

    del session
    with save_on_cpu(pin_memory=bool(dose["pin_memory"])):
        yield


def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the loops that the failing cell runs with ``save_on_cpu`` around forward and backward."""
    loops = [loop for loop in evidence.code.loops if loop.in_failing_run]
    if not loops:
        return Refused("no training loop was found in what the failing cell runs")
    numbers = dict.fromkeys(loop.cell for loop in loops)
    if any(_HOOKED.search(cells.get(number).source) for number in numbers):
        return Refused("the code says already where saved tensors are kept")
    return rewriting.at_sites(cells, loops, partial(_changed, cells=cells, dose=dose))


def _changed(parsed: rewriting.ParsedCell, loops: list[TrainingLoop], cells: Cells, dose: Dose) -> cst.Module | Refused:
    cell = cells.get(loops[0].cell)
    if import_lines.knows_torch(cells.beside(cell)):
        name = f"torch.autograd.graph.{_NAME}"
        imports: list[str] = []
    else:
        name = import_lines.name_for(_HOME, _NAME, cells.beside(cell), "keep_on_host")
        imports = [import_lines.source_of(_HOME, _NAME, name)]
    context = cst.parse_expression(f"{name}({'pin_memory=True' if dose['pin_memory'] else ''})")
    changes: dict[cst.CSTNode, tuple[rewriting.Statement, ...]] = {}
    for loop in loops:
        step = _step(parsed, loop)
        if isinstance(step, Refused):
            return step
        first, *rest = step
        changes |= {first: (_wrapped(step, context),), **dict.fromkeys(rest, ())}
    return import_lines.insert_at_top(parsed, rewriting.exchange(parsed.module, changes), imports)


def _step(parsed: rewriting.ParsedCell, loop: TrainingLoop) -> list[rewriting.Statement] | Refused:
    """Return the statements of the loop from the first call of a model to the last ``backward``."""
    node = next((one for one in rewriting.path_to(parsed, loop.line) if parsed.lines_of(one)[0] == loop.line), None)
    if not isinstance(node, cst.For | cst.While) or not isinstance(node.body, cst.IndentedBlock):
        return Refused(f"{loop.where} is not a loop that can be rewritten")
    body = list(node.body.body)
    forwards = [at for at, one in enumerate(body) if any(text in loop.models for text in _called(one))]
    backwards = [at for at, one in enumerate(body) if any(text.endswith("backward") for text in _called(one))]
    if not forwards or not backwards or backwards[-1] < forwards[0]:
        return Refused("the forward and the backward pass are not both in the loop itself")
    return body[forwards[0] : backwards[-1] + 1]  # type: ignore[return-value]


def _called(node: cst.CSTNode) -> list[str]:
    """Return the text of what is called within a statement, functions defined there left out."""
    calls = within(cst.IndentedBlock([node]), cst.Call, (cst.FunctionDef, cst.ClassDef, cst.Lambda))  # type: ignore[list-item]
    return [text_of(call.func) for call in calls]


def _wrapped(step: list[rewriting.Statement], context: cst.BaseExpression) -> cst.With:
    first, *rest = step
    return cst.With(
        items=[cst.WithItem(context)],
        body=cst.IndentedBlock(body=[first.with_changes(leading_lines=()), *rest]),
        leading_lines=first.leading_lines,
    )


FIX: Final = Fix(
    id="save_on_cpu",
    title="Keep in host memory what the backward pass needs",
    effect=Effect.EXACT,
    cost="a copy to the host and back of everything that is saved",
    propose=propose,
    apply=apply,
    patch=patch,
)

"""Evaluation and prediction without gradients: ``torch.no_grad()`` around what is never differentiated.

``model.eval()`` does not stop autograd from saving activations for a backward pass that never comes. Evidence names the
loops and statements of which the cells show that no gradient is taken of anything they make; they stand in a ``with``.
A function that gives something with a graph to whoever calls it stays as it is, because another cell may train by it.
``no_grad`` and not ``inference_mode``: what it makes may still be part of a later computation that is differentiated.

Values stay bit for bit what they were, with one exception: the attention layers of ``torch.nn`` have a fast path for
inference, which rounds otherwise and leaves zeros at padded positions. Where a model has one, the change is offered as
one that changes the result. So it is where something keeps what a model in training mode made beyond the cell: a later
cell may train on it, and would do so without a word and without that model. There is no live form: what to run without
gradients is a matter of the source.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import libcst as cst

from oomdoctor.fixes import _frees_source
from oomdoctor.fixes._activations import found_or_asked
from oomdoctor.model.absence import Refused
from oomdoctor.model.code import CodeFacts, TrainingLoop
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Edit, Effect, Fix, Patch, Proposal
from oomdoctor.model.memory import Role
from oomdoctor.model.sizes import format_size
from oomdoctor.program import import_lines, rewriting

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.session import Cells

__all__ = ["FIX", "patch", "propose"]

_NO_PLACE: Final = (
    "the failing cell runs no model with gradients on where it is certain that nothing is differentiated afterwards"
)

_NAMED: Final = 4
"""Names that a caveat gives; of more, their number."""

_OF_STEP: Final = re.compile(r"local `[^`]*` of (forward|backward) at ")
"""A tensor that a layer or a backward pass is at work on."""


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose it where activations are kept and the failing cell runs a model for which nobody needs them."""
    code = evidence.code
    if code.grad_disabled:
        return Refused("gradients are off already at the line that failed")
    if not code.undifferentiated:
        return Refused(_NO_PLACE)
    found = evidence.census.bytes_of(Role.ACTIVATION)
    kept = found or found_or_asked(incident, evidence)
    if not kept:
        return Refused("the census found no activations that are kept for a backward pass")
    if (loop := _only_trains(evidence)) is not None:
        return Refused(f"the activations that were found are those of a step of the training loop of line {loop.line}")
    fused, kept_on = _fused(code), _kept_on(code)
    is_trained_on = kept_on is not None and _may_be_trained(code)
    return (
        Proposal(
            dose=Dose(),
            effect=Effect.CHANGES_RESULT if fused or is_trained_on else Effect.EXACT,
            saves=kept,
            slowdown=1.0,
            basis=f"at most the {format_size(kept)} of activations that the census found kept for a backward pass"
            if found
            else f"at least the {format_size(kept)} that a layer asked for",
            caveat="; ".join(filter(None, (kept_on, fused))) or None,
        ),
    )


def _fused(code: CodeFacts) -> str | None:
    path = next(
        (f"{model.path}.{name}".rstrip(".") for model in code.models for name in model.fused_without_grad), None
    )
    return path and (
        f"`{path}` takes a fused kernel in evaluation without gradients, "
        "whose results differ by rounding and are zero at padded positions"
    )


def _kept_on(code: CodeFacts) -> str | None:
    """Return what holds results with their graph when the cell has ended, and would hold them without one."""
    if not code.idle_kept:
        return None
    named = [f"`{name}`" for name in code.idle_kept[:_NAMED]]
    more = len(code.idle_kept) - len(named)
    named += [f"{more} more"] if more else []
    return (
        f"{' and '.join(filter(None, (', '.join(named[:-1]), named[-1])))} would hold no graph any more: "
        "a later cell that calls backward through what is kept there would not train the model that made it"
    )


def _may_be_trained(code: CodeFacts) -> bool:
    """Whether a model that is run is in training mode, or may be as it is not among those that were found.

    So is an input that requires a gradient, whatever the mode.
    """
    found = {model.path: model for model in code.models}
    if code.inputs_with_grad:
        return True
    met = [found.get(path) for path in code.idle_models]
    models = met if met and all(met) else code.models
    return not models or any(one is not None and one.training for one in models)


def _only_trains(evidence: Evidence) -> TrainingLoop | None:
    """Return the training loop that was running where it holds all activations, None where evaluation may hold some.

    What an evaluation has bound to a name lives on with its graph while the next epoch trains.
    """
    places = evidence.code.undifferentiated
    loop = next((one for one in evidence.code.loops if one.in_failing_run and one.was_running and one.end_line), None)
    held = [one for one in evidence.census.holdings if one.role is Role.ACTIVATION]
    if loop is None or loop.end_line is None or not held:
        return None
    lines = range(loop.line, loop.end_line + 1)
    is_beside = all(cell == loop.cell and at not in lines for cell, at, _ in places)
    is_of_step = all(_OF_STEP.match(one.path) or one.expression == loop.loss for one in held)
    return loop if is_beside and is_of_step else None


def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Put every place under ``no_grad``."""
    places = evidence.code.undifferentiated
    if not places:
        return Refused(_NO_PLACE)
    numbers = dict.fromkeys(number for number, *_ in places)
    return rewriting.join(
        cells, [_cell(cells, number, [p[1:] for p in places if p[0] == number]) for number in numbers]
    )


def _cell(cells: Cells, number: int, places: Sequence[tuple[int, str]]) -> Edit | Refused:
    cell = cells.get(number)
    parsed, torch = rewriting.read(cell.source), _frees_source.torch_name(cells.beside(cell))
    if isinstance(parsed, Refused):
        return parsed
    if isinstance(torch, Refused):
        return torch
    name, imports = torch
    changes: dict[cst.CSTNode, Sequence[rewriting.Statement]] = {}
    wrapped: list[rewriting.Statement] = []
    for line, text in places:
        node = _frees_source.starting_at(parsed, line, text)
        if node is None or not _frees_source.block_around(parsed, node):
            return Refused(f"line {line} of {cell} is no statement of its own")
        if isinstance(node, cst.SimpleStatementLine) and len(node.body) > 1:
            return Refused(f"line {line} of {cell} has several statements")
        wrapped.append(node)
    if imports and any(parsed.code(node) in dict(parsed.masked.hidden) for node in wrapped):
        return Refused("torch would have to be imported before a line of IPython's own syntax")
    for group in _neighbours(parsed, wrapped):
        changes |= dict.fromkeys(group[1:], ())
        changes[group[0]] = [_under_no_grad(group, name)]
    module = import_lines.insert_at_top(parsed, rewriting.replace_all(parsed.module, changes), imports)
    return rewriting.edit(cells, cell, parsed, module)


def _neighbours(parsed: rewriting.ParsedCell, nodes: Sequence[rewriting.Statement]) -> list[list[rewriting.Statement]]:
    """Return the statements in groups that follow directly on one another."""
    groups: list[list[rewriting.Statement]] = []
    for node in nodes:
        block = list(_frees_source.block_around(parsed, node))
        before = block[block.index(node) - 1] if block.index(node) else None
        if groups and groups[-1][-1] is before:
            groups[-1].append(node)
        else:
            groups.append([node])
    return groups


def _under_no_grad(group: Sequence[rewriting.Statement], torch: str) -> cst.With:
    """Return the statements in a ``with``, which takes the comments and blank lines before the first."""
    first = group[0]
    body = [first.with_changes(leading_lines=()), *group[1:]]
    return cst.With(
        items=[cst.WithItem(cst.parse_expression(f"{torch}.no_grad()"))],
        body=cst.IndentedBlock(body),
        leading_lines=first.leading_lines,
    )


FIX: Final = Fix(
    id="no_grad_eval",
    title="Evaluate without keeping activations for a backward pass",
    effect=Effect.EXACT,
    cost="nothing: it is faster",
    propose=propose,
    apply=None,
    patch=patch,
)

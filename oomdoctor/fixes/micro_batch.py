"""Gradient accumulation within one batch: the same effective batch, the activations of a part of it at a time.

In the source, the step from the first use of the batch to ``backward`` becomes an inner loop over parts; everything
else (zeroing, clipping, the step, schedulers, accounting) stays once per batch. Random
numbers are drawn as for the whole batch (see ``batch_parts``). A loss that is a mean is weighted by
the part's share of the batch, or of the entries that count. Reading guesses which; that the gradients are those of the
whole batch up to rounding, and that the model treats its samples one by one, is shown by the trial of both programs,
which takes another weight where the guess was wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import libcst as cst

from oomdoctor.fixes import _trainer_source, _trainer_terms
from oomdoctor.fixes._activations import why_not_short, why_not_training
from oomdoctor.fixes._chunks import model_facts, why_not
from oomdoctor.fixes._micro_names import known_names
from oomdoctor.fixes._micro_writer import Writer
from oomdoctor.fixes._samples import CannotSplit
from oomdoctor.fixes._step import plan
from oomdoctor.model.absence import Refused
from oomdoctor.model.code import CodeFacts, TrainingLoop
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Edit, Effect, Fix, Patch, Proposal
from oomdoctor.model.memory import Role
from oomdoctor.model.sizes import format_size
from oomdoctor.program import import_lines, rewriting
from oomdoctor.program.book import Book
from oomdoctor.program.dataflow import loop_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oomdoctor.model.incident import Incident
    from oomdoctor.model.session import Cell, Cells

__all__ = ["FIX", "TOLERANCE", "patch", "propose"]

TOLERANCE: Final = 1e-5
"""Relative difference of losses and gradients in float32: sums over the batch are taken in another order."""

_PARTS: Final = (2, 4, 8, 16, 32)

_WAYS: Final = (Dose.of(draws=True), *(Dose.of(weigh=over) for over in ("counted", "sum", "rows")))
"""A forward may draw random numbers that no layer and no line of the loop shows. And what a part's loss may be: a mean
over the entries of its target that are not -100, a sum, a mean over its rows."""

_OVERHEAD: Final = 0.02
"""Time lost per part to launching the same kernels again, as a share of a step. A round figure, not measured."""


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose 2 to 32 parts, no more than the batch has samples where that is known."""
    if (through := _trainer_terms.proposed("micro_batch", incident, evidence)) is not None:
        return through
    code = evidence.code
    loops = [loop for loop in code.loops if loop.in_failing_run]
    if not loops:
        return Refused("no training loop was found in what the failing cell runs")
    if (why := why_not_training(evidence)) is not None:
        return Refused(why)
    for loop in loops:
        if (why := why_not(code, loop)) is not None:
            return Refused(why)
    if (why := why_not_short(incident, evidence)) is not None:
        return Refused(why)
    activations = evidence.census.bytes_of(Role.ACTIVATION) + evidence.census.bytes_of(Role.BATCH)
    splittable = activations + (incident.requested or 0)
    if not splittable:
        return Refused("no activations were found that splitting the batch could save")
    sizes = [held.shape[0] for held in evidence.census.holdings if held.role is Role.BATCH and held.shape]
    doses = [parts for parts in _PARTS if parts <= max(sizes, default=_PARTS[-1])]
    if not doses:
        return Refused("the batch has one sample: there is nothing to split")
    return tuple(
        Proposal(
            dose=Dose.of(parts=parts),
            effect=Effect.EQUIVALENT,
            saves=splittable * (parts - 1) // parts,
            slowdown=1 + _OVERHEAD * parts,
            basis=f"analytic estimate: 1/{parts} of {format_size(splittable)} of activations, batch and request",
        )
        for parts in doses
    )


def _draws(code: CodeFacts, loop: TrainingLoop) -> bool:
    """Tell whether the loop may draw random numbers, as a model that is not known may."""
    models = [model_facts(code, loop, text) for text in loop.models]
    return bool(loop.draws) or any(model is None or (model.training and model.dropout) for model in models)


def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the loops that the failing cell runs with an inner loop over ``dose["parts"]`` parts of each batch."""
    if "through" in dict(dose.values):
        through = _trainer_source.patched("micro_batch", cells, evidence, dose)
        return through if through is not None else Refused("no trainer was found in what the failing cell runs")
    code = evidence.code
    loops = [loop for loop in code.loops if loop.in_failing_run]
    if not loops:
        return Refused("no training loop was found in what the failing cell runs")
    numbers = dict.fromkeys(loop.cell for loop in loops)
    return rewriting.join(
        cells,
        [_cell(cells, cells.get(n), code, [loop for loop in loops if loop.cell == n], dose) for n in numbers],
    )


def _cell(cells: Cells, cell: Cell, code: CodeFacts, loops: Sequence[TrainingLoop], dose: Dose) -> Edit | Refused:
    parsed = rewriting.read(cell.source)
    if isinstance(parsed, Refused):
        return parsed
    book, given = Book.read(cells), dict(dose.values)
    tree = book.page(cell.number).tree
    changes: dict[cst.CSTNode, Sequence[rewriting.Statement]] = {}
    imports, beside = dict[str, None](), cells.beside(cell)
    for facts in loops:
        try:
            if why := why_not(code, facts):
                raise CannotSplit(why)
            old, loop = rewriting.loop_at(parsed, facts.line), loop_at(tree, facts.line)
            if old is None or loop is None:
                raise CannotSplit("the loop is not where it was found before")
            step = plan(tree, loop, known_names(book, code, facts, tree, loop), str(given.get("weigh", "")))
            cuts = step.kind != "tensors" or given.get("draws", False) or _draws(code, facts)
            by = import_lines.name_for("oomdoctor", "batch_parts", beside, "parts_of") if cuts else ""
            imports |= {import_lines.source_of("oomdoctor", "batch_parts", by): None} if by else {}
            changes[old] = [Writer(beside, parsed, step, dose.number("parts"), by).loop(old)]
        except CannotSplit as why:
            return Refused(str(why))
    module = import_lines.insert_at_top(parsed, rewriting.exchange(parsed.module, changes), [*imports])
    return rewriting.edit(cells, cell, parsed, module)


FIX: Final = Fix(
    id="micro_batch",
    title="Take each batch in parts and accumulate their gradients",
    effect=Effect.EQUIVALENT,
    draws=True,
    ways=_WAYS,
    tolerance=TOLERANCE,
    cost="the same arithmetic in smaller pieces",
    propose=propose,
    apply=None,
    patch=patch,
)

"""Writes a training step with an inner loop over parts of the batch, in the words of the user's own source."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from oomdoctor.fixes._chunks import layer, takes_note
from oomdoctor.fixes._loss_forms import CannotSplit
from oomdoctor.fixes._micro_names import known_names, model_facts
from oomdoctor.fixes._micro_writer import Writer
from oomdoctor.fixes._step import plan
from oomdoctor.model.absence import Refused
from oomdoctor.model.code import CodeFacts, TrainingLoop
from oomdoctor.model.fix import Edit, Patch
from oomdoctor.model.session import Cell, Cells
from oomdoctor.program import rewriting
from oomdoctor.program.book import Book
from oomdoctor.program.dataflow import loop_at

__all__ = ["rewrite", "why_not"]


def why_not(code: CodeFacts, loop: TrainingLoop) -> str | None:
    """Return why this loop's batch cannot be taken apart, as far as facts tell."""
    if not loop.optimizers:
        return "no optimizer is stepped in the loop, so what else changes the weights would run for each part"
    if not loop.models:
        return "no call of a model was found in the loop"
    for text in loop.models:
        model = model_facts(code, loop, text)
        if model is None:
            continue
        if model.training and model.batch_norm:
            return f"{layer(model, model.batch_norm[0])} normalises over the batch in training mode"
        if model.sequence_first:
            return f"{layer(model, model.sequence_first[0])} takes the batch in dimension 1, not 0"
        if (why := takes_note(model, own=True)) is not None:
            return why
    return None


def rewrite(cells: Cells, code: CodeFacts, parts: int, weigh: str = "") -> Patch | Refused:
    """Return the patch that takes each batch of every loop of the failing run in ``parts`` parts.

    Args:
        weigh: what a part's loss is a mean or a sum over: ``counted``, ``sum`` or ``rows``; empty to read it.
    """
    loops = [loop for loop in code.loops if loop.in_failing_run]
    if not loops:
        return Refused("no training loop was found in what the failing cell runs")
    numbers = dict.fromkeys(loop.cell for loop in loops)
    return rewriting.join(
        cells,
        [_cell(cells, cells.get(n), code, [loop for loop in loops if loop.cell == n], parts, weigh) for n in numbers],
    )


def _cell(
    cells: Cells, cell: Cell, code: CodeFacts, loops: Sequence[TrainingLoop], parts: int, weigh: str
) -> Edit | Refused:
    parsed = rewriting.read(cell.source)
    if isinstance(parsed, Refused):
        return parsed
    book = Book.read(cells)
    tree = book.page(cell.number).tree
    changes: dict[cst.CSTNode, Sequence[rewriting.Statement]] = {}
    for facts in loops:
        try:
            if why := why_not(code, facts):
                raise CannotSplit(why)
            old, loop = rewriting.loop_at(parsed, facts.line), loop_at(tree, facts.line)
            if old is None or loop is None:
                raise CannotSplit("the loop is not where it was found before")
            step = plan(tree, loop, known_names(book, code, facts, tree, loop), weigh)
            changes[old] = [Writer(cells.beside(cell), parsed, step, parts).loop(old)]
        except CannotSplit as why:
            return Refused(str(why))
    return rewriting.edit(cells, cell, parsed, rewriting.exchange(parsed.module, changes))

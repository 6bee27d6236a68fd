"""A statement put into a training loop, before the one that runs the model on the batch."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

import libcst as cst

from oomdoctor.model.absence import Refused
from oomdoctor.model.code import TrainingLoop
from oomdoctor.model.fix import Edit, Patch
from oomdoctor.model.session import Cell, Cells
from oomdoctor.program import rewriting
from oomdoctor.program.dataflow import bound, loop_at, own, reads

__all__ = ["before_model"]


def before_model(
    cells: Cells, loops: Sequence[TrainingLoop], line_of: Callable[[TrainingLoop, set[str]], str | Refused]
) -> Patch | Refused:
    """Return the cells with a line in each loop, before the first statement that runs a model.

    Args:
        line_of: makes the line from the loop and the names that are bound by then, or says why it cannot.
    """
    numbers = dict.fromkeys(loop.cell for loop in loops)
    edits = [
        _cell(cells, cells.get(number), [loop for loop in loops if loop.cell == number], line_of) for number in numbers
    ]
    return rewriting.join(cells, edits)


def _cell(
    cells: Cells,
    cell: Cell,
    loops: Sequence[TrainingLoop],
    line_of: Callable[[TrainingLoop, set[str]], str | Refused],
) -> Edit | Refused:
    parsed = rewriting.read(cell.source)
    if isinstance(parsed, Refused):
        return parsed
    tree = parsed.tree
    changes: dict[cst.CSTNode, Sequence[rewriting.Statement]] = {}
    for facts in loops:
        loop = loop_at(tree, facts.line)
        at = next((i for i, node in enumerate(loop.body) if _runs(node, facts)), None) if loop is not None else None
        if loop is None or at is None:
            return Refused("the model is not called by a statement of the loop itself")
        known = {name for node in loop.body[:at] for name in bound(node)} | set(facts.batch)
        line = line_of(facts, known & reads(loop.body[at]))
        if isinstance(line, Refused):
            return line
        old = rewriting.statement_at(parsed, loop.body[at].lineno)
        path = rewriting.path_to(parsed, loop.body[at].lineno)
        # The statement of the loop's own level, where the model is called in a block of it.
        old = next((node for node in path if parsed.lines_of(node).start == loop.body[at].lineno), old)
        if old is None or (isinstance(old, cst.SimpleStatementLine) and len(old.body) != 1):
            return Refused("several statements of the loop share a line")
        (new,) = rewriting.statements(line + "\n", parsed)
        changes[old] = [new.with_changes(leading_lines=old.leading_lines), old.with_changes(leading_lines=())]
    return rewriting.edit(cells, cell, parsed, rewriting.exchange(parsed.module, changes))


def _runs(node: ast.AST, facts: TrainingLoop) -> bool:
    return any(
        ast.unparse(part.func) in facts.models or any(ast.unparse(arg) in facts.models for arg in part.args)
        for part in own(node)
        if isinstance(part, ast.Call)
    )

"""A statement put into a training loop, before the one that runs the model on the batch."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from functools import partial

import libcst as cst

from oomdoctor.model.absence import Refused
from oomdoctor.model.code import TrainingLoop
from oomdoctor.model.fix import Patch
from oomdoctor.model.session import Cells
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
    return rewriting.at_sites(cells, loops, partial(_changes, line_of=line_of))


def _changes(
    parsed: rewriting.ParsedCell, loops: list[TrainingLoop], line_of: Callable[[TrainingLoop, set[str]], str | Refused]
) -> dict[cst.CSTNode, rewriting.New] | Refused:
    tree = parsed.tree
    changes: dict[cst.CSTNode, rewriting.New] = {}
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
    return changes


def _runs(node: ast.AST, facts: TrainingLoop) -> bool:
    return any(
        ast.unparse(part.func) in facts.models or any(ast.unparse(arg) in facts.models for arg in part.args)
        for part in own(node)
        if isinstance(part, ast.Call)
    )

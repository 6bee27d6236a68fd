"""Where a cell binds a name outside of functions and classes, and to what."""

from __future__ import annotations

import ast
from itertools import pairwise
from typing import NamedTuple

import libcst as cst

from oomdoctor.program import rewriting
from oomdoctor.program.assignments import assigned
from oomdoctor.program.dataflow import ancestors
from oomdoctor.program.names import own_nodes, target_names
from oomdoctor.program.replay import node_of


class Binding(NamedTuple):
    """An assignment to a name.

    Attributes:
        statement: the assignment, or the statement on whose line it stands.
        value: what it is from, the whole where that is not taken apart as it stands; None where it shares a line.
        whole: the statement after which the name is bound in any case: the assignment, or the branches that it stands
            in where the name is bound outside of its own branch as well.
    """

    statement: rewriting.Statement
    value: cst.BaseExpression | None
    whole: rewriting.Statement


def last_binding(parsed: rewriting.ParsedCell, name: str, *, bound_before: bool = False) -> Binding | None:
    """Return the last assignment to ``name`` in the text of the cell.

    Args:
        parsed: the cell.
        name: what is assigned to.
        bound_before: an earlier cell binds the name.
    """
    nodes = (node for node in own_nodes(parsed.tree.body) if isinstance(node, ast.Assign | ast.AnnAssign))
    every = [(node, value) for node in nodes for target, value in assigned(node) if name in target_names(target)]
    if not every:
        return None
    node, value = every[-1]
    path = rewriting.path_to(parsed, node.lineno)
    is_line = isinstance(path[-1], cst.SimpleStatementLine)
    above = ancestors(parsed.tree, node)
    whole = path[-1]
    for outer, below in reversed(list(pairwise(above))):
        if isinstance(outer, ast.If | ast.Try):
            # What the branch of the assignment does not bind is bound elsewhere.
            blocks = (outer.body, outer.orelse, getattr(outer, "finalbody", ()))
            branch = next((block for block in blocks if below in block), (below,))
            inside = {id(inner) for one in branch for inner in ast.walk(one)}
            if bound_before or any(id(other) not in inside for other, _ in every):
                whole = next(one for one in path if parsed.lines_of(one).start == outer.lineno)
    found = node_of(parsed, value) if is_line else None
    return Binding(path[-1], found if isinstance(found, cst.BaseExpression) else None, whole)

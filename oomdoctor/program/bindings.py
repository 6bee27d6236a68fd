"""Where a cell binds a name outside of functions and classes, and to what."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import libcst as cst

from oomdoctor.program import rewriting

__all__ = ["Binding", "last_binding"]


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
    every = _assignments(parsed.module, name)
    if not every:
        return None
    statement, value = every[-1]
    path = rewriting.path_to(parsed, parsed.lines_of(statement).start)
    for node in path:
        if isinstance(node, cst.If | cst.Try):
            # What the branch of the assignment does not bind is bound elsewhere.
            inside = [[at for at, _ in _assignments(one, name, node)] for one in _branches(node)]
            here = next(found for found in inside if statement in found)
            if bound_before or len(here) < len(every):
                return Binding(statement, value, node)
    return Binding(statement, value, statement)


def _branches(node: cst.If | cst.Try) -> Iterator[cst.CSTNode]:
    others = [node.orelse] if isinstance(node, cst.If) else [*node.handlers, node.orelse, node.finalbody]
    yield from (one for one in [node.body, *others] if one is not None)


def _assignments(
    node: cst.CSTNode, name: str, owner: rewriting.Statement | None = None
) -> list[tuple[rewriting.Statement, cst.BaseExpression | None]]:
    """Return the assignments within ``node``, which stands in ``owner``, in their order."""
    found = _Assignments(name, owner)
    node.visit(found)
    return found.all


class _Assignments(cst.CSTVisitor):
    """Finds the assignments to a name."""

    def __init__(self, name: str, owner: rewriting.Statement | None) -> None:
        super().__init__()
        self._name = name
        self._within = [owner] if owner is not None else []
        self.all: list[tuple[rewriting.Statement, cst.BaseExpression | None]] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.BaseCompoundStatement):
            self._within.append(node)
        return super().on_visit(node)

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if isinstance(original_node, cst.BaseCompoundStatement):
            self._within.pop()
        super().on_leave(original_node)

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:  # noqa: N802
        return False

    def visit_ClassDef(self, node: cst.ClassDef) -> bool:  # noqa: N802
        return False

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> bool:  # noqa: N802
        self.all += [(node, value) for value in self._values(node)]
        return False

    def visit_SimpleStatementSuite(self, node: cst.SimpleStatementSuite) -> bool:  # noqa: N802
        if self._values(node):
            self.all.append((self._within[-1], None))
        return False

    def _values(self, node: cst.SimpleStatementLine | cst.SimpleStatementSuite) -> list[cst.BaseExpression]:
        """Return what a line assigns to the name."""
        pairs = [pair for small in node.body for pair in _assigned(small)]
        return [value for target, value in pairs if isinstance(target, cst.Name) and target.value == self._name]


def _assigned(small: cst.BaseSmallStatement) -> Iterator[tuple[cst.BaseExpression, cst.BaseExpression]]:
    if isinstance(small, cst.AnnAssign) and small.value is not None:
        yield small.target, small.value
    if isinstance(small, cst.Assign):
        for target in small.targets:
            yield from _taken_apart(target.target, small.value)


def _taken_apart(
    target: cst.BaseExpression, value: cst.BaseExpression
) -> Iterator[tuple[cst.BaseExpression, cst.BaseExpression]]:
    """Yield each part of a target with what it is bound to."""
    if not isinstance(target, cst.Tuple | cst.List):
        yield target, value
        return
    parts = [element.value for element in target.elements]
    fits = isinstance(value, cst.Tuple) and len(value.elements) == len(parts)
    values = [element.value for element in value.elements] if fits else [value] * len(parts)  # type: ignore[attr-defined]
    for part, one in zip(parts, values, strict=True):
        yield from _taken_apart(part, one)

"""Where a cell binds a name outside of functions and classes, and to what."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import libcst as cst

from oomdoctor.fixes import _cst

__all__ = ["Binding", "last_binding"]


class Binding(NamedTuple):
    """An assignment to a name, and what it is from: the whole value where that is not taken apart as it stands."""

    statement: cst.SimpleStatementLine
    value: cst.BaseExpression


def last_binding(parsed: _cst.ParsedCell, name: str) -> Binding | None:
    """Return the last assignment to ``name`` in the text of the cell."""
    found = _Assignments(name)
    parsed.module.visit(found)
    return found.last


class _Assignments(cst.CSTVisitor):
    """Finds the last assignment to a name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self.last: Binding | None = None

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:  # noqa: N802
        return False

    def visit_ClassDef(self, node: cst.ClassDef) -> bool:  # noqa: N802
        return False

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> bool:  # noqa: N802
        for small in node.body:
            for target, value in _assigned(small):
                if isinstance(target, cst.Name) and target.value == self._name:
                    self.last = Binding(node, value)
        return False


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

"""Sites: pieces of code as the values that fixes and rules go by, and the places in the cells that they name."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oomdoctor.model.absence import Refused
from oomdoctor.model.site import Site
from oomdoctor.program.definitions import Scope, short

if TYPE_CHECKING:
    import libcst as cst

    from oomdoctor.model.session import Cell, Cells
    from oomdoctor.program.rewriting import ParsedCell

__all__ = ["Place", "place_at", "site"]


def site(kind: str, scope: Scope, node: ast.stmt | ast.expr, names: Iterable[str] = ()) -> Site:
    """Return where ``node`` of ``scope`` stands."""
    return Site(
        kind=kind,
        cell=scope.cell,
        line=node.lineno,
        end_line=node.end_lineno or node.lineno,
        text=short(ast.unparse(node)),
        names=tuple(names),
        file=scope.file,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Place:
    """A line of a cell that can be changed.

    Attributes:
        around: the function at the top level of the cell that it stands in, None outside of functions.
    """

    cell: Cell
    parsed: ParsedCell
    line: int
    around: cst.FunctionDef | None

    @property
    def scope(self) -> cst.CSTNode:
        """The function, or the whole cell."""
        return self.around or self.parsed.module


def place_at(cells: Cells, number: int, line: int) -> Place | Refused:
    """Return a line of a cell as a place, or why it cannot be changed."""
    import libcst as cst

    from oomdoctor.program import rewriting

    cell = next((one for one in cells.history if one.number == number), None)
    if cell is None:
        return Refused(f"cell {number} is no longer there")
    parsed = rewriting.read(cell.source)
    if isinstance(parsed, Refused):
        return parsed
    around = rewriting.enclosing(parsed, line)
    if isinstance(around, cst.ClassDef) and cell.number != cells.failing.number:
        return Refused(f"the change is in a class of {cell}, which the live objects would not follow")
    return Place(cell=cell, parsed=parsed, line=line, around=around if isinstance(around, cst.FunctionDef) else None)

"""Where evidence says that something stands: ``In[3] line 7: loss.backward()`` as a place in the cells again."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import libcst as cst

from oomdoctor.model.absence import Refused
from oomdoctor.model.session import Cell, Cells
from oomdoctor.program import rewriting

__all__ = ["Place", "at", "found", "numbers", "said"]

_PLACE: Final = re.compile(r"(?:In\[(?P<cell>\d+)\] )?line (?P<line>\d+)(?:: (?P<text>.*)|$)")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Place:
    """A line of a cell.

    Attributes:
        around: the function at the top level of the cell that it stands in, None outside of functions.
    """

    cell: Cell
    parsed: rewriting.ParsedCell
    line: int
    around: cst.FunctionDef | None

    @property
    def scope(self) -> cst.CSTNode:
        """The function, or the whole cell."""
        return self.around or self.parsed.module


def numbers(told: str) -> tuple[int | None, int] | None:
    """Return the number of the cell (None: the failing one) and the line that ``told`` names."""
    match = _PLACE.match(told)
    return None if match is None else (int(match["cell"]) if match["cell"] else None, int(match["line"]))


def said(told: str) -> str:
    """Return the source text that ``told`` quotes."""
    match = _PLACE.match(told)
    return match["text"] or "" if match is not None else ""


def found(cells: Cells, told: str) -> Place | Refused:
    """Return the place that ``told`` names."""
    where = numbers(told)
    if where is None:
        return Refused("where it stands in the cells is not known")
    number, line = where
    return at(cells, cells.failing.number if number is None else number, line)


def at(cells: Cells, number: int, line: int) -> Place | Refused:
    """Return a line of a cell as a place."""
    try:
        cell = cells.get(number)
    except KeyError:
        return Refused(f"cell {number} is no longer there")
    parsed = rewriting.read(cell.source)
    if isinstance(parsed, Refused):
        return parsed
    around = rewriting.enclosing(parsed, line)
    if isinstance(around, cst.ClassDef) and cell.number != cells.failing.number and cell.file is None:
        return Refused(f"the change is in a class of {cell}, which the live objects would not follow")
    return Place(cell=cell, parsed=parsed, line=line, around=around if isinstance(around, cst.FunctionDef) else None)

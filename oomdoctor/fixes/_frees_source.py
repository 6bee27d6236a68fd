"""What the fixes that free memory share in rewriting source: places, blocks of statements, and the name of torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

import libcst as cst

from oomdoctor.model.absence import Refused
from oomdoctor.model.session import Cell, Cells
from oomdoctor.program import rewriting
from oomdoctor.program.names import imports_in

__all__ = ["block_around", "blocks", "starting_at", "torch_at_top", "torch_name"]

_BOUND: Final = re.compile(r"^[ \t]*torch[ \t]*=(?!=)|\bas torch\b", re.MULTILINE)


def torch_name(cells: Cells) -> tuple[str, tuple[str, ...]] | Refused:
    """Return the name that the cells know torch by, and the import that is needed for it, if any."""
    if any(_BOUND.search(cell.source) for cell in cells.history):
        return Refused("`torch` stands for something else in these cells")
    names = [name for cell in cells.history for name, home in sorted(imports_in(cell.source)) if home == "torch"]
    if "torch" in names or not names:
        return "torch", () if names else ("import torch",)
    return names[-1], ()


def torch_at_top(cells: Cells, parsed: rewriting.ParsedCell) -> tuple[str, tuple[str, ...]] | Refused:
    """Return the same for the start of the failing cell, right behind the imports that it begins with."""
    leading = []
    for node in parsed.module.body:
        if not isinstance(node, cst.SimpleStatementLine) or not isinstance(node.body[0], cst.Import | cst.ImportFrom):
            break
        leading.append(parsed.code(node))
    here = Cell(number=cells.failing.number, source="\n".join(leading))
    known, anywhere = torch_name(Cells(history=(*cells.history[:-1], here))), torch_name(cells)
    if isinstance(known, Refused) or known == anywhere:
        return known
    return Refused("torch is imported in the middle of the cell")


def starting_at(parsed: rewriting.ParsedCell, line: int, text: str) -> rewriting.Statement | None:
    """Return the outermost statement that begins on ``line``, None if it is not the one that ``text`` begins like."""
    path = rewriting.path_to(parsed, line)
    found = next((node for node in path if parsed.positions[node].start.line == line), None)
    is_block = re.match(r"(?:async |for |while |if |with |try:|def )", text) is not None
    return found if is_block == isinstance(found, cst.BaseCompoundStatement) else None


def blocks(parsed: rewriting.ParsedCell) -> Iterator[Sequence[cst.BaseStatement]]:
    """Yield every block of statements of the cell, its top level first."""
    yield parsed.module.body
    yield from (node.body for node in parsed.positions if isinstance(node, cst.IndentedBlock))


def block_around(parsed: rewriting.ParsedCell, node: cst.CSTNode) -> Sequence[cst.BaseStatement]:
    """Return the block that ``node`` is a statement of; empty if it stands on the line of what it belongs to."""
    return next((block for block in blocks(parsed) if any(one is node for one in block)), ())

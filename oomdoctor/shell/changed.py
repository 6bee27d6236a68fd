"""Cells that a retry has changed: their code stands where their own stood, and later failures are read from it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from oomdoctor.model.session import Attempt, Cell
from oomdoctor.program.magics import mask
from oomdoctor.shell import ATTRIBUTE

__all__ = ["as_cell", "changed_cells", "placed", "texts_of"]

_DEFINES: Final = re.compile(r"^\s*(async\s+def|def|class)\b", re.MULTILINE)


def changed_cells(shell: Any) -> dict[int, str]:
    """Return the text by the number of each cell that a retry has changed since it was run."""
    extension = getattr(shell, ATTRIBUTE, None)
    return getattr(extension, "changed", {})


def texts_of(attempt: Attempt, failing: Cell) -> dict[int, str]:
    """Return the text by the number of each cell that an attempt changes, and whose functions a later cell may call."""
    texts = {cell.number: cell.source for cell in attempt.cells}
    changes_own = attempt.source != failing.source and _DEFINES.search(attempt.source) is not None
    return {**texts, failing.number: attempt.source} if changes_own else texts


@contextmanager
def as_cell(shell: Any, number: int | None) -> Iterator[None]:
    """Have what runs in the body be compiled, and shown, as the cell of this number; of none, as the next one."""
    before = shell.execution_count
    shell.execution_count = before if number is None else number
    try:
        yield
    finally:
        shell.execution_count = before


def placed(replay: str, source: str) -> str:
    """Return the statements of ``replay`` on the lines that they have in a cell.

    As they are where it has others, or where another statement of the cell shares a line with one of them.
    """
    try:
        wanted = [ast.dump(node) for node in ast.parse(replay).body]
        nodes = [(ast.dump(node), node) for node in ast.parse(mask(source).text).body]
    except (SyntaxError, ValueError, RecursionError):
        return replay
    lines = source.split("\n")
    kept = {line for text, node in nodes if text in wanted for line in _lines(node)}
    others = {line for text, node in nodes if text not in wanted for line in _lines(node)}
    if not wanted or [text for text, _ in nodes if text in wanted] != wanted or kept & others:
        return replay
    text = [line if at in kept else "" for at, line in enumerate(lines, start=1)]
    return "\n".join([text[0] or "#", *text[1:]])  # the shell takes empty lines at the beginning away


def _lines(node: ast.stmt) -> range:
    first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
    return range(first, (node.end_lineno or node.lineno) + 1)

"""Cells that a retry has changed: their code stands where their own stood, and later failures are read from it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from oomdoctor.model.session import Attempt, Cell
from oomdoctor.shell import ATTRIBUTE

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

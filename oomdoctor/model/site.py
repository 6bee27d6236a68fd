"""Where something stands in the program: what a fix detects, what rules see, and what a change is written at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A piece of code at which something was detected.

    Attributes:
        kind: what was detected there, in a word of the fix that detects it.
        cell: number of the cell, 0 in a script.
        line, end_line: its first and its last line within the cell or file.
        text: source text on one line, cut where it is long.
        names: what else its fix has to know of it: names and expressions.
        file: the file that it stands in, None in a cell.
        holds: whether what it makes may take memory: not before it is reached, nor beside it while nothing keeps it.
    """

    kind: str
    cell: int
    line: int
    end_line: int
    text: str
    names: tuple[str, ...] = ()
    file: str | None = None
    holds: bool = True

    @property
    def where(self) -> str:
        """The place alone: ``In[3] line 7``, ``train.py line 7``."""
        home = self.file or (f"In[{self.cell}]" if self.cell else "")
        return f"{home} line {self.line}".lstrip()

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"

"""The cells that were run, from IPython's history, and the files that their code says it comes from."""

from __future__ import annotations

import ast
import re
from typing import Any, Final

from oomdoctor.model.session import Cell, Cells

__all__ = ["cells_until", "filenames", "is_own", "only_looks"]

_LOOKING: Final = frozenset(
    {"print", "len", "type", "str", "repr", "sum", "min", "max", "sorted", "list", "dict", "dir"}
)

_PLAIN_NAME: Final = re.compile(r"<ipython-input-(\d+)-")
_OWN: Final = re.compile(r"\s*%(oomdoctor|memreport|(re|un)?load_ext|load_ext|config|time\s*$|matplotlib)\b")


def cells_until(shell: Any, number: int, source: str) -> Cells:
    """Return the history up to the cell of this number, which is the one that failed."""
    manager = getattr(shell, "history_manager", None)
    raw = list(getattr(manager, "input_hist_raw", ()))
    earlier = [Cell(number=at, source=text) for at, text in enumerate(raw) if text and at < number]
    return Cells(history=(*earlier, Cell(number=number, source=source)))


def filenames(shell: Any) -> dict[str, int]:
    """Return the number of the cell by the file name of its code."""
    known = getattr(shell.compile, "_filename_map", None)
    if isinstance(known, dict):
        return dict(known)
    import linecache

    return {name: int(match[1]) for name in list(linecache.cache) if (match := _PLAIN_NAME.match(name))}


def is_own(source: str) -> bool:
    """Return whether a cell is nothing but line magics of ours and of loading, which change no state of the user's."""
    lines = [line for line in source.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return bool(lines) and all(_OWN.match(line) for line in lines)


def only_looks(source: str) -> bool:
    """Return whether a cell does nothing but show values, so that the state after it is that before it."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return all(isinstance(statement, ast.Expr) for statement in tree.body) and all(
        isinstance(called, ast.Name) and called.id in _LOOKING for called in calls
    )

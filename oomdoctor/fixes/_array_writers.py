"""Which cells write arrays to files, judged by the calls in them: what a string says, another process may do."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Final

from oomdoctor.program.magics import mask, parsed
from oomdoctor.program.names import call_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from oomdoctor.model.session import Cell, Cells

__all__ = ["writer"]

_FUNCTIONS: Final = ("save", "savez", "savez_compressed", "savetxt", "memmap")
_ANYWHERE: Final = frozenset({"tofile", "open_memmap"})
"""Names that only what writes arrays has."""
_TEXT: Final = re.compile(r"\b(save\w*|memmap|open_memmap|tofile)\(")
_OTHER_LANGUAGES: Final = re.compile(r"\s*%%(bash|sh|script|system|writefile|html|javascript|js|markdown|latex|svg)\b")


def writer(cells: Cells) -> Cell | None:
    """Return the first cell that writes arrays to files, None where none does."""
    trees = {cell.number: parsed(cell.source) for cell in cells.history}
    names = {name for tree in trees.values() if tree is not None for name in _names(tree)}
    names |= {f"{module}.{name}" for module in ("np", "numpy") for name in _FUNCTIONS}
    return next((cell for cell in cells.history if _writes(cell.source, trees[cell.number], names)), None)


def _names(tree: ast.Module) -> Iterator[str]:
    """Yield what the imports of a cell let it call the functions of NumPy that write arrays."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = (one.asname for one in node.names if one.name == "numpy" and one.asname is not None)
            yield from (f"{module}.{name}" for module in modules for name in _FUNCTIONS)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "numpy":
            for one in node.names:
                if one.name == "*":
                    yield from _FUNCTIONS
                elif one.name in {*_FUNCTIONS, *_ANYWHERE}:
                    yield one.asname or one.name


def _writes(source: str, tree: ast.Module | None, names: set[str]) -> bool:
    lines = [line for _, line in mask(source).hidden if not line.startswith("!")]
    if not _OTHER_LANGUAGES.match(source) and any(map(_TEXT.search, lines)):
        return True
    if tree is None:
        return _TEXT.search(source) is not None
    return any(
        (isinstance(node, ast.Attribute) and node.attr in _ANYWHERE)
        or (isinstance(node, ast.Attribute | ast.Name) and _is_named(node, names))
        or (isinstance(node, ast.Call) and call_name(node) in names)
        for node in ast.walk(tree)
    )


def _is_named(node: ast.Attribute | ast.Name, names: set[str]) -> bool:
    """Whether a function that writes is called here or handed over; ``np.memmap`` alone may be there as a type."""
    name = call_name(node)
    return isinstance(node.ctx, ast.Load) and name in names and not name.endswith("memmap")

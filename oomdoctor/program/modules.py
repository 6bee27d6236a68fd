"""The user's own modules as parts of the program: those loaded that the cells import, with the text that they run.

A module counts where its file is the user's (in no folder of Python's or of installed packages), and where its text is
what its loaded functions were compiled from: one that was edited since is left out. Limits: what is imported by
``importlib`` or by a path in a string is not seen, and of a large code base only the nearest modules are taken.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Final

from oomdoctor.model.session import Cell, Cells
from oomdoctor.program.compiled import compile_python, source_of, with_inner
from oomdoctor.program.magics import parsed

_MOST_MODULES: Final = 16
_MOST_CHARACTERS: Final = 120_000
"""Of all modules together: LibCST reads some 50,000 in a second."""

_numbers: Final[dict[str, int]] = {}
"""The number of each module by its file, the same for as long as the process lives."""
_texts: Final[dict[str, str]] = {}
"""Texts that a retry has put in the place of files."""


def note_text(file: str, text: str | None) -> None:
    """Note that functions of another text have taken the place of a file's; None where its own are back."""
    if text is None:
        _texts.pop(file, None)
    else:
        _texts[file] = text


def noted_text(file: str) -> str | None:
    """Return the text whose functions have taken the place of a file's, None where they are its own."""
    return _texts.get(file)


def with_modules(cells: Cells, own: Iterable[ModuleType]) -> Cells:
    """Return the cells with the modules before them that they reach by imports.

    Args:
        own: the modules that are loaded from files of the user's.
    """
    if cells.modules:
        return cells
    loaded = {module.__name__: module for module in own if type(getattr(module, "__file__", None)) is str}
    if not loaded:
        return cells
    texts = {cell.source for cell in cells.history}
    waiting = [name for cell in cells.history for name in _imported(parsed(cell.source), "")]
    found: dict[str, Cell] = {}
    seen, room = set[str](), _MOST_CHARACTERS
    for name in waiting:  # it grows on the way: the nearest modules come first
        module = loaded.get(name)
        if module is None or name in seen or len(found) == _MOST_MODULES:
            continue
        seen.add(name)
        file = str(module.__file__)
        text = _running_text(module, file)
        if text is None or text in texts or file in found or len(text) > room:
            continue
        room -= len(text)
        found[file] = Cell(number=_numbers.setdefault(file, -1 - len(_numbers)), source=text, file=file)
        waiting += _imported(parsed(text), _package_of(module))
    return Cells(history=(*reversed(found.values()), *cells.history))


def _package_of(module: ModuleType) -> str:
    return module.__name__ if hasattr(module, "__path__") else module.__name__.rpartition(".")[0]


def _imported(tree: ast.Module | None, package: str) -> Iterator[str]:
    """Yield the names of all that may be a module among what a text imports."""
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            home = ".".join(filter(None, (above, node.module)))
            names = [home, *(f"{home}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[:end]) for end in range(len(parts), 0, -1))


def _running_text(module: ModuleType, file: str) -> str | None:
    """Return the text that the functions of a module were compiled from, None where it cannot be had."""
    if file in _texts and _is_compiled_from(module, file, _texts[file]):
        return _texts[file]
    try:
        text = source_of(Path(file))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None
    return text if Path(file).suffix == ".py" and _is_compiled_from(module, file, text) else None


def _is_compiled_from(module: ModuleType, file: str, text: str) -> bool:
    try:
        codes = list(with_inner(compile_python(text, file)))
    except (SyntaxError, ValueError, RecursionError):
        return False
    known: dict[tuple[str, int], list[CodeType]] = {}
    for code in codes:
        known.setdefault((code.co_qualname, code.co_firstlineno), []).append(code)
    values = list(vars(module).values())
    values += [one for cls in values if isinstance(cls, type) for one in vars(cls).values()]
    own = (one.__code__ for one in values if type(one) is FunctionType and one.__globals__ is vars(module))
    return all(
        code in known.get((code.co_qualname, code.co_firstlineno), ()) for code in own if code.co_filename == file
    )

"""Imports that a patch needs: under which name, and where in the cell they go."""

from __future__ import annotations

import builtins
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import libcst as cst

from oomdoctor.model.unavailable import Refused
from oomdoctor.program import rewriting
from oomdoctor.program.names import all_imports_in, bound_otherwise, imports_in

if TYPE_CHECKING:
    from oomdoctor.model.session import Cells

_FOR_TOOLS: Final = re.compile(r"#!|# ?(@|\||%%|(export|hide)\b)")
"""Comments that have to stand first in a cell: forms of Colab, options of Quarto and nbdev, marks of a cell."""


def name_for(module: str, attribute: str, cells: Cells, otherwise: str) -> str:
    """Return the name to import ``module.attribute`` by: its own, or ``otherwise`` where the cells use that."""
    if qualified_name(cells, attribute) == f"{module}.{attribute}":
        return attribute
    used = re.compile(rf"\b{attribute}\b")
    is_used = any(used.search(cell.source) for cell in cells.history)
    return rewriting.fresh_name(otherwise, cells) if is_used else attribute


def knows_torch(cells: Cells) -> bool:
    """Whether a cell imports torch under its own name."""
    return any(("torch", "torch") in imports_in(cell.source) for cell in cells.history)


def library_name(cells: Cells, library: str = "torch") -> tuple[str, tuple[str, ...]] | Refused:
    """Return the name that the cells know a library by, and the import that is needed for it, if any."""
    if qualified_name(cells, library).rpartition(".")[2] != library:
        return Refused(f"`{library}` stands for something else in these cells")
    names = [name for cell in cells.history for name, home in sorted(imports_in(cell.source)) if home == library]
    if library in names or not names:
        return library, () if names else (f"import {library}",)
    return names[-1], ()


def framework_of(cells: Cells) -> str:
    """Return which library the cells compute with, by what they import: Jittor, or else torch."""
    homes = {home.partition(".")[0] for cell in cells.history for _, home in all_imports_in(cell.source)}
    return "jittor" if "jittor" in homes and "torch" not in homes else "torch"


def qualified_name(cells: Cells, text: str) -> str:
    """Return what a dotted name stands for by the imports of the cells: ``F.relu`` is ``torch.nn.functional.relu``.

    It is the name itself where nothing is known of it, and empty where the cells bind it to something else as well.
    """
    root, dot, rest = text.partition(".")
    if any(root in bound_otherwise(cell.source) for cell in cells.history):
        return ""
    every = {pair for cell in cells.history for pair in all_imports_in(cell.source)}
    homes = {home for name, home in every if name == root}
    if not homes and not dot and not hasattr(builtins, root):
        homes = {home.removesuffix("*") + root for name, home in every if name == "*"}
    if len(homes) > 1:
        return ""
    return f"{homes.pop() if homes else root}{dot}{rest}"


def spelled(cells: Cells, name: str) -> str | None:
    """Return the shortest way to write a qualified name by imports at the top level of the cells, None without one."""
    found = [
        known + name.removeprefix(home)
        for cell in cells.history
        for known, home in imports_in(cell.source)
        if name == home or name.startswith(f"{home}.")
    ]
    sure = [text for text in found if qualified_name(cells, text) == name]
    return min(sure, key=lambda text: (text.count("."), text), default=None)


def source_of(module: str, attribute: str, name: str) -> str:
    """Return the import statement."""
    return f"from {module} import {attribute}" + ("" if name == attribute else f" as {name}")


def insert_at_top(parsed: rewriting.ParsedCell, module: cst.Module, imports: Sequence[str]) -> cst.Module:
    """Return ``module``, a changed form of ``parsed.module``, with those of ``imports`` that it lacks.

    They follow the imports that the cell begins with, else its magics; blank lines set them off from other code, whose
    comments stay with it.
    """
    present = {module.code_for_node(node).strip() for node in module.body}
    missing = [text for text in imports if text not in present]
    if not missing:
        return module
    at = _after_imports(parsed)
    homes: dict[tuple[str, str], list[str]] = {}  # one line for all that comes from one module
    for head, word, names in (text.partition(" import ") for text in missing):
        homes.setdefault((head, word), []).append(names)
    lines = "".join(f"{head}{word}{', '.join(names)}\n" for (head, word), names in homes.items())
    new = list(rewriting.statements(lines, parsed))
    header, body = list(module.header), list(module.body)
    if at == 0 and body:
        header, above = _parted(header)
        body[0] = body[0].with_changes(leading_lines=[*above, *body[0].leading_lines])
    leading = list(getattr(body[at], "leading_lines", ())) if at < len(body) else []
    if at < len(body) and not rewriting.is_import(body[at]) and (not leading or leading[0].comment is not None):
        beside = any(isinstance(one, cst.FunctionDef | cst.ClassDef) for one in (new[-1], body[at]))
        blank = [cst.EmptyLine(indent=False)] * (2 if beside else 1)
        body[at] = body[at].with_changes(leading_lines=[*blank, *body[at].leading_lines])
    return module.with_changes(header=header, body=[*body[:at], *new, *body[at:]])


def _parted(header: Sequence[cst.EmptyLine]) -> tuple[list[cst.EmptyLine], list[cst.EmptyLine]]:
    """Return what stands above the first statement: what is apart from it, and the comments right above it.

    LibCST keeps both with the module. Lines for tools stay first.
    """
    at = len(header)
    while at and (comment := header[at - 1].comment) is not None and not _FOR_TOOLS.match(comment.value):
        at -= 1
    return list(header[:at]), list(header[at:])


def _after_imports(parsed: rewriting.ParsedCell) -> int:
    """Return where in the body the docstring, imports and magics end that the cell, or the script, begins with."""
    masked = {text for text, _ in parsed.masked.hidden}
    at = 0
    for index, node in enumerate(parsed.module.body):
        is_docstring = index == 0 and parsed.module.get_docstring(clean=False) is not None
        if is_docstring or rewriting.is_import(node) or parsed.code(node) in masked:
            at = index + 1
        else:
            break
    return at

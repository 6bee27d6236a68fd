"""Cells as Python sees them: IPython's own syntax masked by statements of the same line, put back, and parsed once.

Both who read cells with ``ast`` and who rewrite them with LibCST need this, so it stands below both. Lines and
indentation stay what they were, so that a line number of the masked text is one of the cell. Limits: automagic (``ls``
without its ``%``) cannot be told from Python and stays, and a cell magic whose body is not known to be Python hides
the whole cell.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeAlias

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Definition: TypeAlias = Function | ast.ClassDef
Loop: TypeAlias = ast.For | ast.AsyncFor | ast.While

_PYTHON_BODIES: Final = frozenset(
    {"time", "timeit", "capture", "prun", "memit", "mprun", "memplan", "mempeak", "memlimit"}
)
"""Cell magics whose body is Python, run in the user's namespace."""

_PYTHON_LINES: Final = frozenset({"time", "prun", "memit", "mempeak"})
"""Line magics whose argument is one Python statement, run in the user's namespace."""

_ASSIGNED: Final = re.compile(r"(?P<target>[^\W\d][\w.,\[\]\"' ]*?)\s*=\s*[%!](?!=)")
_LINE_MAGIC: Final = re.compile(r"%(?P<name>\w+)\s+(?P<code>[^-\s].*)$")


_OPENS: Final = re.compile(r"[\"'(\[{]")
"""What goes on behind the line, were it Python."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedCell:
    """A cell as plain Python, line for line.

    ``hidden`` are ``(masked, original)`` of each line that was masked, both without their indentation.
    """

    text: str
    hidden: tuple[tuple[str, str], ...] = ()

    def unmask(self, text: str) -> str | None:
        """Return ``text`` with the original lines back in place; None if one of the masks was changed or lost.

        ``text`` may be a part of the cell: only masks that it holds in part count as lost.
        """
        if not self.hidden:
            return text
        originals, lines = dict(self.hidden), []
        for line in text.split("\n"):
            body = line.lstrip(" \t")
            original = originals.get(body)
            if original is None and _MARK in body:
                return None
            lines.append(line if original is None else line[: len(line) - len(body)] + original)
        return "\n".join(lines)


_MARK: Final = "# oomdoctor: IPython line "


def parsed(source: str) -> ast.Module | None:
    """Return the tree of a text, made once and shared, so that nobody may write into it; None where there is none."""
    return _tree(mask(source).text)


def tree_of(source: str) -> ast.Module:
    """Return the tree of a cell or a file, an empty one where it is not Python."""
    return parsed(source) or ast.Module(body=[], type_ignores=[])


@lru_cache(maxsize=256)
def mask(source: str) -> MaskedCell:
    """Return ``source`` with IPython's syntax replaced, each line by a statement on the same line."""
    if _tree(source) is not None:
        return MaskedCell(text=source)
    lines = source.split("\n")
    first = next((index for index, line in enumerate(lines) if line.strip()), 0)
    if lines[first].startswith("%%"):
        name = re.match(r"%%(\w*)", lines[first])
        until = first + 1 if name and name[1] in _PYTHON_BODIES else len(lines)
        return _masked(lines, range(first, until))
    return _masked(lines, ())


def _masked(lines: Sequence[str], whole: Iterable[int]) -> MaskedCell:
    """Return a cell of which ``whole`` lines are hidden, and those that IPython takes as its own syntax."""
    from IPython.core import inputtransformer2 as syntax  # for cells alone that are not Python

    out, hidden = [f"{line}\n" for line in lines], list[tuple[str, str]]()

    def hide(at: int, stand_in: str) -> None:
        body = lines[at].lstrip(" \t")
        hidden.append((f"{stand_in}{_MARK}{at + 1}", body))
        out[at] = f"{lines[at][: len(lines[at]) - len(body)]}{hidden[-1][0]}\n"

    for at in whole:
        hide(at, "pass  ")
    kinds: tuple[Any, ...] = syntax.HelpEnd, syntax.EscapedCommand, syntax.MagicAssign, syntax.SystemAssign
    again = True
    while again:
        again = False
        try:
            statements = syntax.make_tokens_by_line(out)
        except IndentationError:  # which no line of IPython's would mend
            break
        for tokens in statements:
            if (found := next(filter(None, (kind.find([tokens]) for kind in kinds)), None)) is not None:
                first = found.start_line
                end = min(syntax.find_end_of_continued_line(out, first), len(lines) - 1)
                hide(first, f"{_stand_in(lines[first].lstrip())}  ")
                for at in range(first + 1, end + 1):
                    hide(at, "")
                again = True
                if end > first or _OPENS.search(lines[first]):
                    break  # the lines that follow are told only when this one is hidden
    return MaskedCell(text="".join(out)[:-1], hidden=tuple(hidden))


def _stand_in(body: str) -> str:
    """Return Python that binds and calls what the line does, as far as that can be seen."""
    if (assigned := _ASSIGNED.match(body)) and _is_python(stand_in := f"{assigned['target']} = None"):
        return stand_in
    magic = _LINE_MAGIC.match(body)
    if magic and magic["name"] in _PYTHON_LINES and _is_python(magic["code"]) and "#" not in magic["code"]:
        return magic["code"].rstrip()
    return "pass"


@lru_cache(maxsize=256)
def _tree(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _is_python(source: str) -> bool:
    return _tree.__wrapped__(source) is not None

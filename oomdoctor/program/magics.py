"""Cells as Python sees them: IPython's own syntax masked by statements of the same line, put back, and parsed once.

Both who read cells with ``ast`` and who rewrite them with LibCST need this, so it stands below both. Lines and
indentation stay what they were, so that a line number of the masked text is one of the cell. Limits: automagic (``ls``
without its ``%``) cannot be told from Python and stays, and a cell magic whose body is not known to be Python hides
the whole cell.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

_PYTHON_BODIES: Final = frozenset({"time", "timeit", "capture", "prun", "memit", "mprun", "memplan"})
"""Cell magics whose body is Python, run in the user's namespace."""

_PYTHON_LINES: Final = frozenset({"time", "prun", "memit"})
"""Line magics whose argument is one Python statement, run in the user's namespace."""

_ESCAPE: Final = re.compile(r"[%!?,;/]")
_ASSIGNED: Final = re.compile(r"(?P<target>[^\W\d][\w.,\[\]\"' ]*?)\s*=\s*[%!](?!=)")
_HELP: Final = re.compile(r"%{0,2}[\w.*\[\]]+\?{1,2}\s*$")
_LINE_MAGIC: Final = re.compile(r"%(?P<name>\w+)\s+(?P<code>[^-\s].*)$")
_TOKEN: Final = re.compile(
    r"[rbfuRBFU]{0,2}(?P<quote>\"\"\"|'''|\"|')|(?P<open>[(\[{])|(?P<close>[)\]}])|(?P<comment>#)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedCell:
    """A cell as plain Python.

    Attributes:
        text: the masked source, line for line.
        hidden: ``(masked, original)`` of each line that was masked, both without their indentation.
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
    """Return the tree of a cell or a file, None where it is not Python.

    It is made once for a text and shared by all who read it: nobody may write into its nodes.
    """
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
        return _masked(lines, set(range(first, until)))
    return _masked(lines, set())


def _masked(lines: list[str], hide: set[int]) -> MaskedCell:
    out: list[str] = []
    hidden: list[tuple[str, str]] = []
    scan, continued = _Scan(), False
    for index, line in enumerate(lines):
        body = line.lstrip(" \t")
        is_start = not continued and scan.at_start
        continued = continued or (is_start and body != "" and _is_escaped(body))
        if index in hide or continued:
            masked = f"{_stand_in(body)}  {_MARK}{index + 1}" if is_start or index in hide else f"{_MARK}{index + 1}"
            hidden.append((masked, body))
            out.append(line[: len(line) - len(body)] + masked)
            continued = continued and body.endswith("\\")
        else:
            scan.feed(line)
            out.append(line)
    return MaskedCell(text="\n".join(out), hidden=tuple(hidden))


def _is_escaped(body: str) -> bool:
    return bool(_ESCAPE.match(body) or _HELP.match(body) or _ASSIGNED.match(body))


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


class _Scan:
    """Where strings, brackets and backslashes leave the next line: at the start of a statement or inside one."""

    __slots__ = ("_backslash", "_depth", "_quote")

    def __init__(self) -> None:
        self._depth, self._quote, self._backslash = 0, "", False

    @property
    def at_start(self) -> bool:
        return not (self._depth or self._quote or self._backslash)

    def feed(self, line: str) -> None:
        at, comment = 0, False
        while at < len(line) and not comment:
            if self._quote:
                at = self._end_of_string(line, at)
            elif (token := _TOKEN.search(line, at)) is None:
                at = len(line)
            else:
                self._quote = token["quote"] or ""
                self._depth = max(0, self._depth + bool(token["open"]) - bool(token["close"]))
                at, comment = token.end(), bool(token["comment"])
        self._backslash = not comment and line.endswith("\\")
        if len(self._quote) == 1 and not self._backslash:
            self._quote = ""

    def _end_of_string(self, line: str, at: int) -> int:
        while at < len(line):
            if line[at] == "\\":
                at += 2
            elif line.startswith(self._quote, at):
                at += len(self._quote)
                self._quote = ""
                return at
            else:
                at += 1
        return at

"""The text of a script as cells: what its code comes from, and which of its statements is running."""

from __future__ import annotations
import __future__

import ast
import linecache
import symtable
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

from oomdoctor.model.absence import Refused

__all__ = ["Body", "begun", "body_of", "future_flags", "global_names", "has_changed", "indented", "text_of"]

_FUTURES: Final[int] = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """The body of a ``with`` at the top level of a script, as a cell.

    Attributes:
        source: the body, not indented, its lines numbered as in the script.
        before: the script without the ``with``, up to the end of the statement that it stands in.
        line: where the ``with`` stands.
        indent: what its lines begin with in the script, nothing where it stands on the line of the ``with`` itself.
    """

    source: str
    before: str
    line: int
    indent: str


def text_of(code: CodeType, namespace: dict[str, Any]) -> str:
    """Return the text of the file or the cell that ``code`` comes from, nothing where it cannot be had."""
    return "".join(linecache.getlines(code.co_filename, namespace))


def begun(text: str, filename: str) -> str:
    """Return ``text`` up to the end of the statement that its top level is running, all of it where that has ended."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename != filename or frame.f_code.co_flags & CO_OPTIMIZED):
        frame = frame.f_back
    if frame is None or frame.f_code.co_name != "<module>":
        return text
    line = frame.f_lineno
    try:
        ends = [one.end_lineno or one.lineno for one in ast.parse(text).body]
    except (SyntaxError, ValueError):
        return text
    return "".join(f"{one}\n" for one in text.split("\n")[: next((end for end in ends if end >= line), line)])


def future_flags(code: CodeType) -> int:
    """Return the compiler's flags for the ``from __future__ import`` lines that ``code`` was compiled with."""
    return code.co_flags & _FUTURES


def has_changed(text: str, code: CodeType) -> bool:
    """Return whether ``code`` is not what ``text`` compiles to: the file was edited after it was loaded."""
    if not Path(code.co_filename).exists():  # a cell of a notebook, whose text is kept as it was run
        return False
    try:
        # Who runs a script by ``exec`` hands on its own futures.
        waiting = [compile(text, code.co_filename, "exec", flags=future_flags(code), dont_inherit=True)]
    except (SyntaxError, ValueError):
        return True
    while waiting:
        found = waiting.pop()
        if found == code:
            return False
        waiting += [constant for constant in found.co_consts if type(constant) is CodeType]
    return True


@lru_cache(maxsize=16)
def global_names(text: str) -> frozenset[str]:
    """Return the names that functions of a script take from its globals."""
    try:
        waiting = [symtable.symtable(text, "<script>", "exec")]
    except (SyntaxError, ValueError):
        return frozenset()
    names: set[str] = set()
    while waiting:
        table = waiting.pop()
        names.update(symbol.get_name() for symbol in table.get_symbols() if symbol.is_global())
        waiting += table.get_children()
    return frozenset(names)


def body_of(frame: FrameType, text: str) -> Body | Refused:
    """Return the body of the ``with`` that ``frame``, which runs the top level of ``text``, is about to enter."""
    if has_changed(text, frame.f_code):
        return Refused("the file was changed after it was loaded, or its text cannot be read")
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return Refused("its text cannot be read as Python")
    found = [node for node in ast.walk(tree) if isinstance(node, ast.With) and _enters(node, frame)]
    if len(found) != 1:
        return Refused(f"its `with` was not found on line {frame.f_lineno} of the text: write it on a line of its own")
    if len(found[0].items) > 1:
        return Refused("there are other managers in the same `with`: give it a `with` of its own")
    return _body(found[0], tree, text, frame.f_code)


def _enters(node: ast.With, frame: FrameType) -> bool:
    """Return whether the frame's instruction stands for a ``with``; by its line where columns are not known.

    It has the place of the whole statement, or of the item. Source: ``compiler_with`` in CPython's compile.c.
    """
    place = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    if None in place:
        return any(one.context_expr.lineno == frame.f_lineno for one in node.items)
    places = [(one.lineno, one.end_lineno, one.col_offset, one.end_col_offset) for one in _places(node)]
    return place in places


def _places(node: ast.With) -> Iterator[ast.stmt | ast.expr]:
    yield node
    yield from (item.context_expr for item in node.items)


def _body(node: ast.With, tree: ast.Module, text: str, code: CodeType) -> Body | Refused:
    lines = text.split("\n")
    first = min([node.body[0].lineno, *(one.lineno for one in getattr(node.body[0], "decorator_list", ()))])
    last = node.end_lineno or first
    source = "\n" * (first - 1) + "\n".join(_dedented(node, lines, first, last)) + "\n"
    try:
        same = ast.parse(source)
        compile(source, code.co_filename, "exec", flags=future_flags(code), dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        return Refused(f"its body cannot be run on its own ({reason})")
    if ast.dump(same) != ast.dump(ast.Module(body=node.body, type_ignores=[])):
        return Refused("its body cannot be told from the lines around it")
    top = next(one for one in tree.body if one.lineno <= node.lineno <= (one.end_lineno or one.lineno))
    before = lines[: top.end_lineno]
    before[node.lineno - 1] = before[node.lineno - 1][: node.col_offset] + "pass"
    before[node.lineno : last] = [""] * (last - node.lineno)
    return Body(source=source, before="\n".join(before) + "\n", line=node.lineno, indent=_indent(node, lines, first))


def indented(source: str, indent: str) -> str:
    """Return the body of a ``with``, or what it was changed to, as it stands in the script."""
    if not indent:
        return source
    try:
        inside = _within_strings(ast.parse(source))
    except (SyntaxError, ValueError):
        return source
    lines = source.split("\n")
    return "\n".join(
        indent + line if line.strip() and number not in inside else line for number, line in enumerate(lines, 1)
    )


def _indent(node: ast.With, lines: list[str], first: int) -> str:
    """Return what the lines of a body begin with, nothing where it begins on the line of the ``with`` itself."""
    header = max(item.context_expr.end_lineno or 0 for item in node.items)
    start = lines[first - 1].encode()[: node.body[0].col_offset].decode()
    return "" if first <= header or start.strip() else start


def _within_strings(tree: ast.AST) -> set[int]:
    """Return the numbers of the lines that begin within a string."""
    strings = (part for part in ast.walk(tree) if isinstance(part, ast.JoinedStr | ast.Constant))
    return {number for part in strings for number in range(part.lineno + 1, (part.end_lineno or part.lineno) + 1)}


def _dedented(node: ast.With, lines: list[str], first: int, last: int) -> Iterator[str]:
    """Yield the lines of a body without their indentation; what lies within a string stays as it is."""
    start = _indent(node, lines, first)
    if not start:  # on the line of the ``with`` itself
        yield lines[first - 1].encode()[node.body[0].col_offset :].decode()
        yield from lines[first:last]
        return
    inside = _within_strings(node)
    for number in range(first, last + 1):
        line = lines[number - 1]
        yield line if number in inside else line.removeprefix(start) if line.startswith(start) else line.lstrip()

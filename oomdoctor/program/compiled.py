"""Texts and the code that they compile to: compiling under a file name, and what of a text stands at a line.

The lines of a code object, of a frame or of a traceback are all that is known of what runs; here they are brought
together with the statements and functions of the text. What is not Python defines nothing and has no statements.
"""

from __future__ import annotations
import __future__

import ast
import symtable
import tokenize
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import Final, NamedTuple

from oomdoctor.program.magics import mask, tree_of

_FUTURES: Final[int] = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
_Defining = ast.FunctionDef | ast.AsyncFunctionDef


class Fault(NamedTuple):
    """Why a text is not Python, in Python's words."""

    message: str
    line: int | None


def source_of(path: Path) -> str:
    """Return the text of a Python file, in the encoding that it declares.

    Raises:
        OSError: it cannot be read.
        SyntaxError: it declares an encoding that there is not.
        ValueError: it is in another encoding than that.
    """
    with tokenize.open(path) as file:
        return file.read()


def compile_python(text: str, filename: str, flags: int = 0, *, awaits: bool = False) -> CodeType:
    """Return the code of a text, with no flags but those that are given.

    Args:
        awaits: whether it may await at its top level.

    Raises:
        SyntaxError: it is not Python.
        ValueError: likewise.
    """
    flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if awaits else 0
    code: CodeType = compile(text, filename, "exec", flags=flags, dont_inherit=True)
    return code


def fault_in(cell: str) -> Fault | None:
    """Return why a cell cannot be compiled, magics aside; None where it can."""
    try:
        compile_python(mask(cell).text, "<cell>", awaits=True)
    except (SyntaxError, ValueError) as error:
        return Fault(error.msg, error.lineno) if isinstance(error, SyntaxError) else Fault(str(error), None)
    return None


def future_flags(code: CodeType) -> int:
    """Return the compiler's flags for the ``from __future__ import`` lines that ``code`` was compiled with."""
    return code.co_flags & _FUTURES


def with_inner(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object, and those of the functions, classes and comprehensions in it."""
    codes = [code]
    for each in codes:  # it grows on the way
        yield each
        codes += [constant for constant in each.co_consts if type(constant) is CodeType]


def is_compiled_from(code: CodeType, text: str) -> bool:
    """Return whether ``text`` compiles to ``code``, or has it in it: else the file was edited after it was loaded."""
    try:
        # Who runs a script by ``exec`` hands on its own futures.
        whole = compile_python(text, code.co_filename, future_flags(code))
    except (SyntaxError, ValueError):
        return False
    return any(each == code for each in with_inner(whole))


@lru_cache(maxsize=16)
def global_names(text: str) -> frozenset[str]:
    """Return the names that the functions of a text take from its globals."""
    try:
        waiting = [symtable.symtable(text, "<script>", "exec")]
    except (SyntaxError, ValueError):
        return frozenset()
    names: set[str] = set()
    for table in waiting:  # it grows on the way
        names.update(symbol.get_name() for symbol in table.get_symbols() if symbol.is_global())
        waiting += table.get_children()
    return frozenset(names)


def defines(text: str, name: str, line: int) -> bool:
    """Return whether a function of this name begins on ``line``, that of its first decorator included."""
    functions = (node for node in ast.walk(tree_of(text)) if isinstance(node, _Defining) and node.name == name)
    return any(line in (node.lineno, *(each.lineno for each in node.decorator_list)) for node in functions)


def is_in_definition(cell: str, line: int) -> bool:
    """Return whether a line of a cell stands in a function or a class."""
    return any(
        isinstance(node, ast.ClassDef | _Defining) and node.lineno <= line <= (node.end_lineno or node.lineno)
        for node in ast.walk(tree_of(cell))
    )


def statement_end(text: str, line: int) -> int | None:
    """Return the last line of the statement of the top level that ``line`` stands in; None where it is not Python."""
    ends = [node.end_lineno or node.lineno for node in tree_of(text).body]
    return next((end for end in ends if end >= line), line) if ends else None


def statement_lines(cell: str) -> list[int]:
    """Return the lines on which the statements of a cell begin, in order."""
    return sorted({node.lineno for node in ast.walk(tree_of(cell)) if isinstance(node, ast.stmt)})


def does_nothing(cell: str) -> bool:
    """Return whether a cell has nothing but ``pass`` in it."""
    return all(isinstance(node, ast.Pass) for node in tree_of(cell).body)


def on_their_lines(statements: str, cell: str) -> str:
    """Return statements of a cell on the lines that they have in it.

    As they are where it has others, or where another statement of the cell shares a line with one of them.
    """
    wanted = [ast.dump(node) for node in tree_of(statements).body]
    nodes = [(ast.dump(node), node) for node in tree_of(cell).body]
    kept = {line for text, node in nodes if text in wanted for line in lines_of(node)}
    others = {line for text, node in nodes if text not in wanted for line in lines_of(node)}
    if not wanted or [text for text, _ in nodes if text in wanted] != wanted or kept & others:
        return statements
    lines = [line if at in kept else "" for at, line in enumerate(cell.split("\n"), start=1)]
    return "\n".join([lines[0] or "#", *lines[1:]])  # the shell takes empty lines at the beginning away


def lines_of(node: ast.stmt) -> range:
    """Return the lines of a text that a statement stands on, those of its decorators included."""
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
    return range(first, (node.end_lineno or node.lineno) + 1)

"""The shell that a script runs in: IPython's way of running a cell, with the looks of plain Python."""

from __future__ import annotations

import codeop
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from IPython.core.compilerop import CachingCompiler
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets import Type


class _Compiler(CachingCompiler):
    """Compiles code under the name of the script, so that tracebacks and ``inspect`` find the script's lines."""

    def __init__(self, script: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._script = script
        # A cell that ends too early may be going on; of a script that does, Python says what it never closed.
        self.flags &= ~(codeop.PyCF_ALLOW_INCOMPLETE_INPUT | codeop.PyCF_DONT_IMPLY_DEDENT)  # type: ignore[attr-defined]

    def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
        """Return the path of the script."""
        return self._script


class _Publisher(DisplayPublisher):
    """Prints to the standard error what is displayed: the standard output is the script's own."""

    def publish(self, data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Print the plain text of what is displayed."""
        if "text/plain" in data:
            print(data["text/plain"], file=sys.stderr)


class ScriptShell(InteractiveShell):
    """Runs the top level of one script as a cell.

    Attributes:
        script: its path.
        anyway: whether it is run again although something of the failed run cannot be taken back.
    """

    display_pub_class = Type(_Publisher)

    def __init__(self, script: Path, **kwargs: Any) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self.script, self.anyway = script, False
        self.compile = _Compiler(str(script))

    def transform_cell(self, raw_cell: str) -> str:
        """Return the script as it is: it has no magics, and its lines keep their numbers."""
        return raw_cell

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        """Print a traceback as Python does; nothing for ``SystemExit``, which ends a script in silence."""
        kind, value, frames = exc_tuple or sys.exc_info()
        if kind is not None and not issubclass(kind, SystemExit):
            own = self._of_script(frames)
            if own is None and not issubclass(kind, SyntaxError):  # which is all that its compiler had to say
                own = frames
            self._showtraceback(kind, value, traceback.format_exception(kind, value, own))

    def showsyntaxerror(self, *args: Any, **kwargs: Any) -> None:
        """Print what is wrong with the script's syntax as Python does."""
        kind, value, _ = sys.exc_info()
        self._showtraceback(kind, value, traceback.format_exception_only(kind, value))

    def _showtraceback(self, etype: Any, evalue: Any, stb: list[str]) -> None:
        print("".join(stb), end="", file=sys.stderr)

    def _of_script(self, frames: TracebackType | None) -> TracebackType | None:
        """Return the traceback from the script's first line on, without what ran the script; None if it has none."""
        first = frames
        while first is not None and first.tb_frame.f_code.co_filename != str(self.script):
            first = first.tb_next
        return first

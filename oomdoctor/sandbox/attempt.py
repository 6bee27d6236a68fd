"""An attempt as a copy of the process runs it: cells whose loops ask, with modules and live objects as it changes them.

The cells are compiled so that each loop calls the hooks of ``program.compiled``, and so are the functions that the user
has written, where their source can be had; lines stay what they are, and can be found. Nothing is ever put back.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import linecache
import re
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any, Final

from oomdoctor.errors import ForecastError
from oomdoctor.model.session import Attempt, Session
from oomdoctor.objects.named import is_users_file
from oomdoctor.program.compiled import compile_hooked, does_nothing, function_key, hooked_functions
from oomdoctor.program.magics import mask
from oomdoctor.program.modules import importing, put_in_place
from oomdoctor.sandbox.copies import one_sentence

_RUNS_CODE: Final = re.compile(r"%%?(\w*run|timeit|memit)\b")
"""Magics that run code of their own: ``%run``, ``%timeit``, ``%prun``, ``%memit``."""

asking: Final = set[str]()
"""File names of the code whose loops ask."""


def compile_asking(text: str, filename: str, flags: int = 0, *, last: str | None = None) -> CodeType:
    """Return the code of a text whose loops ask; a ``SyntaxError`` or ``ValueError`` where it is not Python."""
    asking.add(filename)
    return compile_hooked(text, filename, flags, last=last)


def compile_cell(source: str, filename: str, shell: Any, *, last: str | None = None) -> CodeType:
    """Return the code of a cell without its magics.

    Args:
        last: the name that the value of an expression is bound to with which the cell ends.

    Raises:
        ForecastError: it is not Python, or has a magic that runs code.
    """
    masked = mask(source)
    for _, line in masked.hidden:
        if _RUNS_CODE.match(line):
            raise ForecastError(f"`{line}` runs code that is not followed")
    try:
        code = compile_asking(masked.text, filename, getattr(getattr(shell, "compile", None), "flags", 0), last=last)
    except (SyntaxError, ValueError) as error:
        raise ForecastError(f"the cell is not Python: {one_sentence(error)}") from error
    if source.lstrip().startswith("%%") and does_nothing(source):
        raise ForecastError(f"the cell is not Python: it begins with {source.split(maxsplit=1)[0]}")
    linecache.cache[filename] = (len(masked.text), None, masked.text.splitlines(keepends=True), filename)
    return code


def hook_functions(functions: Iterable[FunctionType]) -> set[str]:
    """Have the loops of the user's among some functions ask; return the names of their files.

    A function of ours may have the user's globals, by which torch takes it for theirs.
    """
    theirs: dict[str, list[FunctionType]] = {}
    for function in functions:
        if is_users_file(function.__code__.co_filename):
            theirs.setdefault(function.__code__.co_filename, []).append(function)
    for filename, in_file in theirs.items():
        codes = hooked_functions("".join(linecache.getlines(filename)), filename)
        if codes:
            asking.add(filename)
        for function in in_file:
            code = codes.get(function_key(function.__code__))
            if code is not None and code.co_freevars == function.__code__.co_freevars:
                function.__code__ = code
    return set(theirs)


@contextlib.contextmanager
def in_place(session: Session, attempt: Attempt) -> Iterator[None]:
    """Have the user's modules and live objects be as an attempt changes them."""
    texts = {str(module.file): module.source for module in session.cells.modules}
    texts |= {str(edit.file): edit.after for edit in attempt.modules}
    with contextlib.ExitStack() as changes:
        changes.enter_context(importing(texts, compile_asking))
        for edit in attempt.modules:
            put_in_place(edit, compile_asking)
        for change in attempt.live:
            changes.enter_context(change())
        yield


def execute(code: CodeType, namespace: dict[str, Any], *, in_loop: bool = False) -> None:
    """Run a cell, within an event loop as a kernel does or outside; what it has a loop do later is not done."""
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.new_event_loop().run_until_complete(eval(code, namespace))
        return
    asyncio._set_running_loop(asyncio.new_event_loop() if in_loop else None)
    try:
        exec(code, namespace)
    finally:
        asyncio._set_running_loop(None)

"""The lines of a cell's code as they stand in the cell.

IPython drops the blank lines that a cell begins with, and counts the body of a cell magic from its own first line; that
of ``%%time`` and of ``%%prun`` it compiles under a name that is no cell's. While a failure is looked at, its traceback
says what the cell's own lines are.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, TracebackType
from typing import Final

from oomdoctor.model.session import Cell
from oomdoctor.objects.frames import chained, set_traceback, steps_of, traceback_of
from oomdoctor.program.compiled import defines

_COMPILED_AS: Final = {"time": ("<timed exec>", "<timed eval>"), "prun": ("<string>",)}
"""Cell magics that compile their body under a name of their own. Source: ``ExecutionMagics`` of IPython 7.34 to 9."""
_RUN_AS_A_CELL: Final = frozenset({"capture"})
_CELL_MAGIC: Final = re.compile(r"%%(\w+)")


@contextmanager
def as_in_the_cell(failure: BaseException, cell: Cell, names: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Have the traceback of a failure of ``cell`` tell the cell's lines; yield the numbers of cells by file name.

    Args:
        names: the number of the cell by the file name of its code.
    """
    magics, before = _head(cell.source)
    files = {name for name, number in names.items() if number == cell.number}
    bodies = next((_COMPILED_AS[one] for one in magics if one in _COMPILED_AS), ())
    kept = [(link, list(steps_of(traceback_of(link)))) for link in chained(failure)]
    of_bodies = [step.tb_frame.f_code for _, steps in kept for step in steps if _file(step) in bodies]
    if (
        not before
        or not all(one in _COMPILED_AS or one in _RUN_AS_A_CELL for one in magics)
        or not all(code.co_name == "<module>" or _is_defined(code, cell.source, before) for code in of_bodies)
    ):  # nothing to tell, or what the body's name stands for is not known: an earlier cell's has the same
        yield dict(names)
        return
    read = {name: linecache.cache.get(name) for name in (*files, *bodies)}
    lines = [f"{line}\n" for line in cell.source.split("\n")]
    try:
        for link, steps in kept:
            set_traceback(link, _moved(steps, before, bodies, files))
        linecache.cache.update({name: (len(cell.source), None, lines, name) for name in read})
        yield {**names, **dict.fromkeys(bodies, cell.number)}
    finally:
        for link, steps in kept:
            set_traceback(link, steps[0] if steps else None)
        for name, entry in read.items():
            if entry is None:
                linecache.cache.pop(name, None)
            else:
                linecache.cache[name] = entry


def _head(source: str) -> tuple[list[str], int]:
    """Return the cell magics that a cell begins with, and how many lines stand before what they run."""
    magics, before = [], 0
    for at, line in enumerate(source.split("\n")):
        if magic := _CELL_MAGIC.match(line):
            magics.append(magic[1])
        elif line.strip():
            before = at
            break
    return magics, before


def _file(step: TracebackType) -> str:
    return step.tb_frame.f_code.co_filename


def _moved(steps: list[TracebackType], before: int, bodies: tuple[str, ...], files: set[str]) -> TracebackType | None:
    """Return a traceback with the cell's own lines, without the step that only handed the body to a magic."""
    first = next((at for at, step in enumerate(steps) if _file(step) in bodies), 0)
    moved: TracebackType | None = None
    for at, step in reversed(list(enumerate(steps))):
        is_own = _file(step) in bodies or _file(step) in files
        if not is_own:
            moved = TracebackType(moved, step.tb_frame, step.tb_lasti, step.tb_lineno)
        elif at >= first:
            moved = TracebackType(moved, step.tb_frame, step.tb_lasti, step.tb_lineno + before)
    return moved


def _is_defined(code: CodeType, source: str, before: int) -> bool:
    """Return whether a function is one that the body of the cell defines where ``code`` says."""
    return defines("\n".join(source.split("\n")[before:]), code.co_name, code.co_firstlineno)

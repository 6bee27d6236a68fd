"""The cells that were run, from IPython's history, as a retry has changed them, and the files that their code is of.

IPython counts the body of a cell magic from the body's first line, and compiles that of ``%%time`` and ``%%prun`` under
a name that is no cell's. While a failure is looked at, its traceback has the cell's own lines.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final

from oomdoctor.model.session import Attempt, Cell, Cells
from oomdoctor.objects.frames import chained, set_traceback, steps_of, traceback_of
from oomdoctor.program.compiled import defines
from oomdoctor.shell import ATTRIBUTE

_PLAIN_NAME: Final = re.compile(r"<ipython-input-(\d+)-")
_VERB: Final = re.compile(r"^\s*%oomdoctor\s+(\w+)", re.MULTILINE)
_RUN: Final = re.compile(r"\s*%run\b")
_SHARES: Final = re.compile(r"-[a-zA-Z]*i")
_OWN: Final = re.compile(r"\s*%(oomdoctor|memreport|(re|un)?load_ext|load_ext|config|time\s*$|matplotlib)\b")


def cells_until(shell: Any, number: int, source: str) -> Cells:
    """Return the history up to the cell of this number, which is the one that failed; changed ones as they ran last."""
    manager, changed = getattr(shell, "history_manager", None), getattr(getattr(shell, ATTRIBUTE, None), "changed", {})
    raw = list(getattr(manager, "input_hist_raw", ()))
    run = ((at, text) for at, text in enumerate(raw) if text and at < number and planned(text) is None)
    newest = {text: at for at, text in enumerate(raw)}  # what was run again as it was is as it was
    earlier = [Cell(number=at, source=changed.get(at, text) if newest[text] == at else text) for at, text in run]
    return Cells(history=(*earlier, Cell(number=number, source=source)))


def filenames(shell: Any, number: int | None = None) -> dict[str, int]:
    """Return the number of the cell by the file name of its code.

    Cells that the one of ``number`` runs in their turn, as `%%capture` does its body, are compiled as the next one, and
    count as it.
    """
    known = getattr(shell.compile, "_filename_map", None)
    if not isinstance(known, dict):
        known = _filenames_by_text(shell)
    return {name: at if number is None else min(at, number) for name, at in known.items()}


def _filenames_by_text(shell: Any) -> dict[str, int]:
    """Return the same from what IPython before 8 keeps: the text by the file name, and the texts by their numbers."""
    parsed = getattr(getattr(shell, "history_manager", None), "input_hist_parsed", ())
    numbers = {text.rstrip("\n"): at for at, text in enumerate(parsed)}
    found, number = {}, None
    entries = getattr(linecache, "_ipython_cache", {}).items()
    # In the order in which they were compiled: the second of an entry is when. What a cell runs in its turn is compiled
    # after it, and has no place in the history.
    for name, (_, _, lines, _) in sorted(entries, key=lambda entry: entry[1][1]):
        plain = _PLAIN_NAME.match(name)
        number = int(plain[1]) if plain else numbers.get("".join(lines).rstrip("\n"), number)
        if number is not None:
            found[name] = number
    return found


def is_own(source: str) -> bool:
    """Return whether a cell is nothing but magics of ours and of loading, which change no state of the user's."""
    lines = [line for line in source.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return bool(lines) and (planned(source) is not None or all(_OWN.match(line) for line in lines))


def planned(source: str) -> str | None:
    """Return what a cell forecasts and does not run, None where it is another cell; `--run` makes a cell of its own."""
    text = source.lstrip("\n")
    return text.partition("\n")[2] if re.match(r"%%memplan\b", text) else None


def has_verb(source: str, *verbs: str) -> bool:
    """Return whether a cell of ours asks for one of these verbs of ``%oomdoctor``."""
    return is_own(source) and any(verb in verbs for verb in _VERB.findall(source))


def run_lines(source: str) -> list[str]:
    """Return the lines of a cell that run a script."""
    return [line.strip() for line in source.splitlines() if _RUN.match(line)]


def runs_apart(source: str) -> str | None:
    """Return the line of a cell that runs a script in a namespace of its own, None where there is none."""
    return next((line for line in run_lines(source) if not any(map(_SHARES.match, line.split()))), None)


_DEFINES: Final = re.compile(r"^\s*(async\s+def|def|class)\b", re.MULTILINE)


def texts_of(attempt: Attempt, failing: Cell) -> dict[int, str]:
    """Return the text by the number of each cell that an attempt changes, and whose functions a later cell may call."""
    texts = {cell.number: cell.source for cell in attempt.cells}
    changes_own = attempt.source != failing.source and _DEFINES.search(attempt.source) is not None
    return {**texts, failing.number: attempt.source} if changes_own else texts


@contextmanager
def as_cell(shell: Any, number: int | None) -> Iterator[None]:
    """Have what runs in the body be compiled, and shown, as the cell of this number; of none, as the next one.

    IPython 9 counts a cell before its code runs, and shows results by the number before the one it has come to.
    """
    before, run = shell.execution_count, shell.run_ast_nodes
    ahead = before - shell.displayhook.prompt_count

    async def counted(*args: Any, **kwargs: Any) -> Any:
        shell.execution_count += ahead
        return await run(*args, **kwargs)

    shell.execution_count = before if number is None else number
    own = vars(shell).get("run_ast_nodes")
    shell.run_ast_nodes = counted
    try:
        yield
    finally:
        shell.execution_count = before
        if own is None:
            del shell.run_ast_nodes
        else:
            shell.run_ast_nodes = own


def forget_results(shell: Any, number: int) -> None:
    """Have IPython be without what the cell of this number has shown: in ``Out``, ``_1`` and ``_``."""
    hook, names = shell.displayhook, shell.user_ns
    results = names.get("_oh", {})
    if number not in results:
        return
    shown = results.pop(number)
    if names.get(f"_{number}") is shown:
        del names[f"_{number}"]
    if hook._ is shown:
        last = {"_": hook.__, "__": hook.___, "___": ""}
        is_own = names.get("_") is shown
        vars(hook).update(last)
        if is_own:
            names.update(last)


_COMPILED_AS: Final = {"time": ("<timed exec>", "<timed eval>"), "prun": ("<string>",)}
"""Cell magics that compile their body under a name of their own. Source: ``ExecutionMagics`` of IPython 7.34 to 9."""
_AT_ONCE: Final = frozenset({"<module>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})
"""Names of code that is run where it stands."""
_RUN_AS_A_CELL: Final = frozenset({"capture"})
_CELL_MAGIC: Final = re.compile(r"%%(\w+)")


@contextmanager
def as_in_the_cell(failure: BaseException, cell: Cell, names: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Have the traceback of a failure of ``cell`` tell the cell's lines; yield the numbers of cells by file name."""
    magics, before = _head(cell.source)
    files = {name for name, number in names.items() if number == cell.number}
    bodies = next((_COMPILED_AS[one] for one in magics if one in _COMPILED_AS), ())
    kept = [(link, list(steps_of(traceback_of(link)))) for link in chained(failure)]
    body = "\n".join(cell.source.split("\n")[before:])
    of_bodies = [step.tb_frame.f_code for _, steps in kept for step in steps if _file(step) in bodies]
    if (
        not before
        or not all(one in _COMPILED_AS or one in _RUN_AS_A_CELL for one in magics)
        or not all(code.co_name in _AT_ONCE or defines(body, code.co_name, code.co_firstlineno) for code in of_bodies)
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

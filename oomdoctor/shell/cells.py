"""The cells that were run, from IPython's history, and the files that their code says it comes from."""

from __future__ import annotations

import re
from typing import Any, Final

from oomdoctor.model.session import Cell, Cells
from oomdoctor.shell.changed import changed_cells

_PLAIN_NAME: Final = re.compile(r"<ipython-input-(\d+)-")
_RETRY: Final = re.compile(r"\s*%oomdoctor\s+(fix|retry)\b")
_LOOKS_AT_PLAN: Final = re.compile(r"\s*%oomdoctor\s+(fix|retry|diff|undo|cases)\b")
_RUN: Final = re.compile(r"\s*%run\b")
_SHARES: Final = re.compile(r"-[a-zA-Z]*i")
_OWN: Final = re.compile(r"\s*%(oomdoctor|memreport|(re|un)?load_ext|load_ext|config|time\s*$|matplotlib)\b")


def cells_until(shell: Any, number: int, source: str) -> Cells:
    """Return the history up to the cell of this number, which is the one that failed; changed ones as they ran last."""
    manager, changed = getattr(shell, "history_manager", None), changed_cells(shell)
    raw = list(getattr(manager, "input_hist_raw", ()))
    run = ((at, text) for at, text in enumerate(raw) if text and at < number and planned(text) is None)
    newest = {text: at for at, text in enumerate(raw)}  # what was run again as it was is as it was
    earlier = [Cell(number=at, source=changed.get(at, text) if newest[text] == at else text) for at, text in run]
    return Cells(history=(*earlier, Cell(number=number, source=source)))


def filenames(shell: Any, number: int | None = None) -> dict[str, int]:
    """Return the number of the cell by the file name of its code.

    Args:
        number: of the cell that is running. Cells that it runs in their turn, as `%%capture` does its body, are
            compiled as the next one, and count as it.
    """
    known = getattr(shell.compile, "_filename_map", None)
    if not isinstance(known, dict):
        known = _filenames_by_text(shell)
    return {name: at if number is None else min(at, number) for name, at in known.items()}


def _filenames_by_text(shell: Any) -> dict[str, int]:
    """Return the same from what IPython before 8 keeps: the text by the file name, and the texts by their numbers."""
    import linecache

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


def asks_for_retry(source: str) -> bool:
    """Return whether a cell of ours is one that has the failed cell run again."""
    return is_own(source) and any(map(_RETRY.match, source.splitlines()))


def looks_at_plan(source: str) -> bool:
    """Return whether a cell of ours looks at the plan of the last failure, or acts on it."""
    return is_own(source) and any(map(_LOOKS_AT_PLAN.match, source.splitlines()))


def run_lines(source: str) -> list[str]:
    """Return the lines of a cell that run a script."""
    return [line.strip() for line in source.splitlines() if _RUN.match(line)]


def runs_apart(source: str) -> str | None:
    """Return the line of a cell that runs a script in a namespace of its own, None where there is none."""
    for line in run_lines(source):
        if not any(_SHARES.match(word) for word in line.split()):
            return line
    return None

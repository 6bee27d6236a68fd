"""Where a failure happened, by the lines above its message: the class, the cell and the frame that they name."""

from __future__ import annotations

import re
from typing import Final

from oomdoctor.model.incident import CellLine

__all__ = ["cell_line", "exception_class", "innermost_frame", "line_end_of", "line_start_of"]

_TRACEBACK: Final = 20_000
_NEAR: Final = 600
"""Characters between a class and what is matched of its message."""
_CLASS: Final = re.compile(
    r"(?<![\w.\[])(?:[A-Za-z_]\w{0,60}\.){0,8}"
    r"(?:[A-Za-z_]\w{0,60}(?:Error|Exception|Exhausted|Interrupt|Killed\w{0,20})|\w{0,60}OutOf(?:Resources|Memory)"
    r"|KilledWorker)\b"
)
_OPENING: Final = re.compile(
    r"(?P<name>(?:[A-Za-z_]\w{0,60}\.){1,8}[A-Za-z_]\w{0,60}(?<!\.py)(?<!\.cc)(?<!\.cu)(?<!\.cpp)(?<!\.rs)"
    r"|[A-Z]\w{0,60}(?:Error|Exception|Exhausted|OutOfMemory|OutOfResources|KilledWorker))"
    r"(?::(?=\s|$)|\s{1,60}Traceback \(most recent|$)"
)
"""A line that begins with a class: its message follows after a colon, or its traceback below it."""
_CELL: Final = re.compile(
    r"(?:Cell\sIn\s?\[(?P<new>\d{1,6})\]|Input\sIn\s\[(?P<input>\d{1,6})\]|<ipython-input-(?P<old>\d{1,6})-)"
    r"[^\n]{0,80}?(?:,\sline\s(?P<line>\d{1,6}))?(?:[,\s]{1,2}in\s(?P<function>[\w.<>]{1,80}))?[^\n]{0,200}$",
    re.MULTILINE,
)
_ARROW: Final = re.compile(r"^-{1,8}>\s?(?P<line>\d{1,6})\s?(?P<source>[^\n]{0,500})$", re.MULTILINE)
_FRAME: Final = re.compile(
    r"^File\s(?:\"(?P<path>[^\"\n]{1,300})\",\sline\s(?P<line>\d{1,7})|(?P<ipath>[^\s:]{1,300}):(?P<iline>\d{1,7}))"
    r",\sin\s(?P<function>[\w.<>]{1,120})",
    re.MULTILINE,
)


def line_start_of(lines: str, at: int, most: int) -> int:
    """Return where the line of ``at`` begins, no further back than ``most``: a text may be one line of megabytes."""
    low = max(0, at - most)
    found = lines.rfind("\n", low, max(0, at))
    return low if found < 0 else found + 1


def line_end_of(lines: str, at: int, most: int) -> int:
    """Return where the line of ``at`` ends, no further than ``most``."""
    high = min(len(lines), at + most)
    found = lines.find("\n", at, high)
    return high if found < 0 else found


def exception_class(lines: str, line_start: int, start: int, end: int) -> str | None:
    """Return the class of the message at ``start``: the one that its line opens with, or the nearest printed before.

    Args:
        line_start: where the line of the message begins.
    """
    opening, bounds = line_start, []
    for _ in range(5):
        bounds.append(opening)
        if opening == 0 or start - opening > _NEAR:
            break
        opening = line_start_of(lines, opening - 1, _NEAR)
    for bound in bounds:
        found = _OPENING.match(lines, bound, min(len(lines), bound + 700)) if start - bound <= _NEAR else None
        if found is not None and found.start() <= start:
            return found["name"]
    names = [
        name
        for name in _CLASS.finditer(lines, max(bounds[-1], start - _NEAR), min(len(lines), end + 40))
        if name.start() < end
    ]
    return names[-1][0] if names else None


def cell_line(lines: str, end: int) -> CellLine | None:
    """Return the last cell of an IPython traceback above the message."""
    places = list(_CELL.finditer(lines, max(0, end - _TRACEBACK), end))
    if not places:
        return None
    place = places[-1]
    arrow = _ARROW.search(lines, place.end(), end)
    number = place["new"] or place["input"] or place["old"]
    line = place["line"] or (arrow["line"] if arrow else None)
    if line is None:
        return None
    return CellLine(
        number=int(number),
        line=int(line),
        source_line=arrow["source"].strip() if arrow and arrow["line"] == line else "",
        function=place["function"] or "<module>",
    )


def innermost_frame(lines: str, end: int) -> str | None:
    """Return the last frame of a traceback above the message."""
    frames = list(_FRAME.finditer(lines, max(0, end - _TRACEBACK), end))
    if not frames:
        return None
    last = frames[-1]
    return f"{last['path'] or last['ipath']}:{last['line'] or last['iline']} {last['function']}"

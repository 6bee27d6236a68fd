"""Which class a message belongs to, by its own line and those above it."""

from __future__ import annotations

import re
from typing import Final

_NEAR: Final = 600
"""Characters between a class and what is matched of its message."""
_CLASS: Final = re.compile(
    r"(?<![\w.\[])(?<!::)(?:[A-Za-z_]\w{0,60}\.){0,8}"
    r"(?:[A-Za-z_]\w{0,60}(?:Error|Exception|Exhausted|Interrupt)|\w{0,60}OutOfResources|KilledWorker)\b"
)
_OPENING: Final = re.compile(
    r"(?P<name>(?:[A-Za-z_]\w{0,60}\.){1,8}(?:_?[A-Z]\w{0,60}|timeout|error)"
    r"|[A-Z]\w{0,60}(?:Error|Exception|Exhausted|OutOfMemory|OutOfResources|KilledWorker)|Exception)"
    r"(?::(?=\s|$)|\s{1,60}Traceback \(most recent|$)"
)
"""A line that begins with a class: its message follows after a colon, or its traceback below it."""


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


def opens(lines: str, line_start: int) -> bool:
    """Whether the line opens with a class, so that a message of its own begins there."""
    return _OPENING.match(lines, line_start, min(len(lines), line_start + _NEAR)) is not None


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

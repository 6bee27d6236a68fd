"""Where a message stands: its class, and by the traceback above it the line that was running.

Tracebacks are those of Python, of IPython old and new, and of rich.

Limits: nothing in a text tells whose a file is. What lies in neither PyTorch nor Python itself counts as the user's
where it is reached, so that of a library's model the line of the model is told; the outermost line is one outside of
installed packages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from oomdoctor.model.incident import CellLine

TRACEBACK: Final = 20_000
"""Characters above a message, or between its class and it, in which a traceback may stand."""
HEAD: Final = "Traceback (most recent call last)"
_SOURCE: Final = 500
_PATH: Final = r"[^\s:\"<>()]{1,300}"
_FRAME: Final = re.compile(
    r"^(?:File\s\"(?P<path>[^\"\n]{1,300})\",\sline\s(?P<line>\d{1,7})(?:,\sin\s(?P<function>[\w.<>]{1,120}))?"
    rf"|File\s(?P<path2>{_PATH}):(?P<line2>\d{{1,7}}),\sin\s(?P<function2>[\w.<>]{{1,120}})"
    rf"|(?P<path3>{_PATH}\.pyc?)(?::(?P<line3>\d{{1,7}}))?\sin\s(?P<function3>[\w.<>]{{1,120}})"
    r"|(?:Cell\sIn\s?\[|Input\sIn\s\[|(?:File\s)?<ipython-input-)(?P<number>\d{1,6})[\]-]"
    r"(?:[^\n,]{0,80},\sline\s(?P<line4>\d{1,6}))?(?:[^\n]{0,80}?\sin\s(?P<function4>[\w.<>]{1,80}))?)(?=[^\w.]|$)",
    re.MULTILINE,
)
_ARROW: Final = re.compile(r"^(?:-{1,8}>|❱)\s?(?P<line>\d{1,7})\s?(?P<source>[^\n]{0,500})$", re.MULTILINE)
_MARKS: Final = re.compile(r"[\s^~]{1,500}$")
TORCH: Final = re.compile(
    r"(?:site|dist)-packages[/\\](?:torch|functorch)[/\\]|^<frozen|/lib/python\d\.\d{1,2}/(?!(?:site|dist)-)"
)
INSTALLED: Final = re.compile(r"(?:site|dist)-packages[/\\]")
_STATEMENT: Final = re.compile(
    r"(?:return|await|yield|assert|del)\s|[A-Za-z_][\w.\[\]'\", ]{0,120}\s[-+*/@]?=\s(?!=)|[A-Za-z_][\w.\[\]]{0,120}\("
    r"|(?:with|for|if|elif|while)\s[^\n]{1,400}:$"
)
_WORK: Final = re.compile(r"[\w\])](?:\(|\[|\s?[@*+/-]\s?\w)")
"""What a line of code does that needs memory: it calls, indexes or computes."""


@dataclass(frozen=True, slots=True)
class _Frame:
    path: str
    line: int | None
    function: str
    source: str
    number: int | None


def place_of(lines: str, at: int) -> dict[str, Any]:
    """Return the fields of an incident that tell its place, by the traceback above the message at ``at``.

    The cell line is that of the cell or the script that failed, the inner line the innermost that was reached where it
    is another; where only one is known it is the first. Without a traceback it is the code right above the message.
    """
    frames = _frames(lines, at)
    if not frames:
        source = _source_above(lines, at)
        return {"cell": CellLine(number=None, line=None, source_line=source) if source else None}
    cells = [frame for frame in frames if frame.number is not None]
    shown = [frame for frame in frames if frame.source and not TORCH.search(frame.path)]
    own = cells or [frame for frame in shown if not INSTALLED.search(frame.path)]
    reached = [frame for frame in shown if not frame.source.startswith("raise ")]
    outer = _told(own[0]) if own else None
    inner = _told(reached[-1]) if reached else None
    named = [frame for frame in frames if frame.number is None and frame.line is not None]
    return {
        "cell": outer or inner,
        "inner": inner if outer and inner != outer else None,
        "framework_frame": f"{named[-1].path}:{named[-1].line} {named[-1].function}" if named else None,
    }


def _told(frame: _Frame) -> CellLine | None:
    if frame.line is None:
        return None
    return CellLine(number=frame.number, line=frame.line, source_line=frame.source, function=frame.function)


def _frames(lines: str, at: int) -> list[_Frame]:
    """Return the frames of the last traceback above ``at``, the outermost first."""
    low = max(0, at - TRACEBACK)
    head = lines.rfind(HEAD, low, at)
    found = list(_FRAME.finditer(lines, low if head < 0 else head, at))
    ends = [one.start() for one in found[1:]]
    return [_frame(lines, one, end) for one, end in zip(found, [*ends, at], strict=False)]


def _frame(lines: str, found: re.Match[str], end: int) -> _Frame:
    groups = {name.rstrip("234"): text for name, text in found.groupdict().items() if text is not None}
    arrow = _ARROW.search(lines, found.end(), end)
    line = int(groups["line"]) if "line" in groups else int(arrow["line"]) if arrow else None
    if arrow:
        source = arrow["source"] if int(arrow["line"]) == line else ""
    else:
        source = _next_line(lines, found.end(), end) if "path" in groups else ""
    return _Frame(
        path=groups.get("path", ""),
        line=line,
        function=groups.get("function", "<module>"),
        source=source.strip(),
        number=int(groups["number"]) if "number" in groups else None,
    )


def _next_line(lines: str, at: int, end: int) -> str:
    """Return the line below the one of ``at``, unless the message or the next frame begins there."""
    start = line_end_of(lines, at, _SOURCE) + 1
    stop = line_end_of(lines, start, _SOURCE)
    if start >= end or stop >= end or opens(lines, start):
        return ""
    return lines[start:stop]


def _source_above(lines: str, at: int) -> str:
    """Return the line of code above the message that opens with its class, nothing where there is no such line."""
    start = line_start_of(lines, at, _SOURCE)
    if not opens(lines, start):
        return ""
    for _ in range(2):
        end = start - 1
        start = line_start_of(lines, end, _SOURCE)
        above = lines[start : max(start, end)].strip()
        if above and not _MARKS.fullmatch(above):
            is_code = _STATEMENT.match(above) and _WORK.search(above) and not above.endswith((".", ";"))
            return above if is_code and not opens(lines, start) else ""
    return ""


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

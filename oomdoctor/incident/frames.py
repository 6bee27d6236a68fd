"""Which line was running, by the traceback above a message: those of Python, of IPython old and new, and of rich.

Limits: nothing in a text tells whose a file is. What lies in neither PyTorch nor Python itself counts as the user's
where it is reached, so that of a library's model the line of the model is told; the outermost line is one outside of
installed packages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from oomdoctor.incident.place import line_end_of, line_start_of, opens
from oomdoctor.model.incident import CellLine

_TRACEBACK: Final = 20_000
"""Characters above a message in which its traceback is looked for."""
_HEAD: Final = "Traceback (most recent call last)"
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
_TORCH: Final = re.compile(
    r"(?:site|dist)-packages[/\\](?:torch|functorch)[/\\]|^<frozen|/lib/python\d\.\d{1,2}/(?!(?:site|dist)-)"
)
_INSTALLED: Final = re.compile(r"(?:site|dist)-packages[/\\]")
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


def running_lines(lines: str, at: int) -> tuple[CellLine | None, CellLine | None]:
    """Return the line of the cell or the script that failed, and the innermost that was reached where it is another.

    Where only one is known it is the first. Without a traceback it is the line of code right above the message.

    Args:
        at: where the message is.
    """
    frames = _frames(lines, at)
    if not frames:
        source = _source_above(lines, at)
        return CellLine(number=None, line=None, source_line=source) if source else None, None
    cells = [frame for frame in frames if frame.number is not None]
    shown = [frame for frame in frames if frame.source and not _TORCH.search(frame.path)]
    own = cells or [frame for frame in shown if not _INSTALLED.search(frame.path)]
    reached = [frame for frame in shown if not frame.source.startswith("raise ")]
    outer = _told(own[0]) if own else None
    inner = _told(reached[-1]) if reached else None
    return (outer, inner) if outer and inner != outer else (outer or inner, None)


def innermost_frame(lines: str, at: int) -> str | None:
    """Return the last frame of a traceback above the message, ``file:line function``."""
    named = [frame for frame in _frames(lines, at) if frame.number is None and frame.line is not None]
    return f"{named[-1].path}:{named[-1].line} {named[-1].function}" if named else None


def _told(frame: _Frame) -> CellLine | None:
    if frame.line is None:
        return None
    return CellLine(number=frame.number, line=frame.line, source_line=frame.source, function=frame.function)


def _frames(lines: str, at: int) -> list[_Frame]:
    """Return the frames of the last traceback above ``at``, the outermost first."""
    low = max(0, at - _TRACEBACK)
    head = lines.rfind(_HEAD, low, at)
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
            return above if _is_code(above) and not opens(lines, start) else ""
    return ""


def _is_code(line: str) -> bool:
    return _STATEMENT.match(line) is not None and _WORK.search(line) is not None and not line.endswith((".", ";"))

"""Finds where a row of the message table matches: its needle, its pattern, its neighbourhood, and who refused.

A line that gives advice, sets a condition or is source code denies what it says; such a match is told as well, because
the joined lines must not bring it back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from oomdoctor.incident.formats import ANYWHERE, SOURCE, SOURCE_AFTER, Format, compiled, unspaced
from oomdoctor.incident.frames import line_end_of, line_start_of
from oomdoctor.model.incident import Family

AROUND: Final = 400
LINE: Final = 200
"""Characters of its own line that a message has to itself before and after the match."""
_LONG_LINE: Final = 2_000
_HEAD: Final = compiled(r"\b(?:CUDA|HIP|XPU|NPU|MPS backend) out of memory")
"""Where a message of PyTorch begins: the numbers after it are its own."""
_LEADS_ON: Final = re.compile(
    r"(?:,|\b(?:can|could|may|might|will|would|should|to|the|an?|of|and|or|if|when|that|is|not|your?|it|this|with|by))$"
)
"""What no sentence ends with."""
_PROSE: Final = 20
"""Characters of a line of prose at least."""
_HITS: Final = 25
"""Hits of one literal that are looked at from either end of the text."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A match of a row; ``family`` is None where its line says that nothing happened."""

    match: re.Match[str]
    end: int
    family: Family | None


def hits(row: Format, lines: str, lowered: str) -> Iterator[Hit]:
    """Yield the confirmed matches of a row, each with the end of what may belong to its message."""
    for needle in row.needles:
        places = _places(lowered, needle)
        for at, following in zip(places, [*places, -1][1:], strict=True):
            match = _confirmed(row, lines, lowered, at)
            if match is None:
                continue
            if _is_denied(row, lines, match):
                yield Hit(match, match.end(), None)
                continue
            end = min(len(lines), match.end() + row.reach)
            if following >= match.end():
                end = min(end, following)
            head = _HEAD.search(lines, match.end(), end)
            if head is not None:
                end = head.start()
            family = _family(row, lines, match) if _in_place(row, lines, match, end) else None
            if family is not None:
                yield Hit(match, end, family)


def _places(lowered: str, needle: str) -> list[int]:
    """Return where ``needle`` stands, from either end of the text, in order."""
    first: list[int] = []
    at = lowered.find(needle)
    while at >= 0 and len(first) < _HITS:
        first.append(at)
        at = lowered.find(needle, at + len(needle))
    if at < 0:
        return first
    last: list[int] = []
    low, high = at, len(lowered)
    while len(last) < _HITS and (at := lowered.rfind(needle, low, high)) >= 0:
        last.append(at)
        high = at
    return first + last[::-1]


def _confirmed(row: Format, lines: str, lowered: str, at: int) -> re.Match[str] | None:
    low, high = max(0, at - row.window[0]), min(len(lines), at + row.window[1])
    if row.beside and all(lowered.find(word, low, high) < 0 for word in row.beside):
        return None
    for match in row.pattern.finditer(lines, low, high):
        if match.start() <= at < match.end():
            return match
        if match.start() > at:
            break
    return None


def _in_place(row: Format, lines: str, match: re.Match[str], end: int) -> bool:
    before = max(0, match.start() - ANYWHERE)
    if row.requires and not _is_there(row.requires, lines[match.start() : end], flows=row.flows):
        return False
    if row.context and not row.context.search(lines, before, end):
        return False
    if row.unless and row.unless.search(lines, before, end):
        return False
    if row.on_line:
        low, high = _line_of(lines, match)
        above = line_start_of(lines, low - 1, max(0, AROUND - match.start() + low))
        return row.on_line.search(lines, above, min(high, match.end() + LINE)) is not None
    return True


def _is_there(words: re.Pattern[str], stretch: str, *, flows: bool) -> bool:
    return bool(words.search(stretch) or (flows and unspaced(words).search("".join(stretch.split()))))


def _is_denied(row: Format, lines: str, match: re.Match[str]) -> bool:
    """Whether the line of the match says that nothing happened, or is a line of source code."""
    low, high = _line_of(lines, match)
    before = lines[max(low, match.start() - AROUND) : match.start()]
    return (
        SOURCE.search(before) is not None
        or SOURCE_AFTER.match(lines, match.end(), high) is not None
        or (row.denied is not None and row.denied.search(_line_above(lines, low) + before) is not None)
    )


def _line_above(lines: str, low: int) -> str:
    """Return the line above the one that begins at ``low`` if its sentence goes on there, as wrapped prose does."""
    if low == 0:
        return ""
    above = lines[line_start_of(lines, low - 1, AROUND) : low - 1]
    leads_on = _LEADS_ON.search(above) or (lines[low : low + 1].islower() and above[-1:].islower())
    return f"{above} " if leads_on and len(above) >= _PROSE else ""


def _line_of(lines: str, match: re.Match[str]) -> tuple[int, int]:
    """Return where the lines of the match begin and end, of a very long line its part around the match."""
    return line_start_of(lines, match.start(), _LONG_LINE), line_end_of(lines, match.end(), _LONG_LINE)


def _family(row: Format, lines: str, match: re.Match[str]) -> Family | None:
    """Return who refused: by the words on the line of the match, by those around it, or else the row's default."""
    if not row.families:
        return row.family
    low, high = _line_of(lines, match)
    line = max(low, match.start() - AROUND), min(high, match.end() + LINE)
    for start, end in (line, (max(0, line[0] - AROUND), min(len(lines), line[1] + LINE))):
        for words, family in row.families:
            if words.pattern and words.search(lines, start, end):
                return family
    return next((family for words, family in row.families if not words.pattern), None)

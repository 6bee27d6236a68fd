"""Reads failures out of text: a log, a notebook's output, a pasted traceback.

Lines may have been wrapped in the middle of words: the text is scanned as it is and once more with its lines joined.
Where the two tell different things of one place, the one that says more is believed, by the order of the table.

Limits: only the message table decides; a text in none of its wordings is reported as not recognised, with its last
line. A long text is not joined. Where a wrap swallowed the space between two words, a pattern that is also cut within a
word is not found.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Final

from oomdoctor.incident.clean import clean_lines
from oomdoctor.incident.formats import FORMATS
from oomdoctor.incident.frames import line_start_of, opens
from oomdoctor.incident.scan import Found, find, numbers, ranked, without_doubtful
from oomdoctor.model.incident import Family, Incident

_LAST_ERROR: Final = re.compile(
    r"^(?P<name>(?:[A-Za-z_]\w{0,60}\.){0,8}[A-Z]\w{0,60}(?:Error|Exception|Interrupt|Warning|Exit))(?::|$)",
    re.MULTILINE,
)
_QUOTE: Final = 500
_TAIL: Final = 100_000


def from_text(text: str) -> tuple[Incident, ...]:
    """Return the failures that ``text`` tells of, the root first; never empty.

    Failures for want of memory come before others. One that was printed twice is returned once. Where nothing is
    recognised there is one incident that is no OOM, whose ``format`` is None and whose message is the last error
    line of the text. Of more than 16 MiB the beginning and the end are read.
    """
    lines = clean_lines(str.__str__(text))  # and not what a subclass makes of it
    return _scanned(lines) or (_unrecognised(lines),)


def describe(incident: Incident) -> str:
    """Return what an incident is, in one sentence."""
    unknown = "Memory ran out." if incident.is_oom else "No out-of-memory error recognised in this text."
    return next((row.title for row in FORMATS if row.name == incident.format), unknown)


def _unrecognised(lines: list[str]) -> Incident:
    tail = "\n".join(lines[-_TAIL:])[-_TAIL:]
    errors = list(_LAST_ERROR.finditer(tail))
    start = errors[-1].start() if errors else max(0, tail.rstrip().rfind("\n"))
    return Incident(
        is_oom=False,
        family=Family.NOT_OOM,
        exc_type=errors[-1]["name"] if errors else None,
        message=tail[start:].strip()[:_QUOTE],
    )


_LONG: Final = 1 << 18
_NEAR: Final = 120
"""Characters between a match and the words that speak against it."""
_BESIDE: Final = 400
"""Characters beside a failure in which the joined lines say nothing vague of their own."""


def _scanned(lines: Sequence[str]) -> tuple[Incident, ...]:
    """Return the failures in ``lines``: those for want of memory first, each in the order of the text, none twice.

    Args:
        lines: clean lines, each with the single space that it began or ended with.
    """
    text = "\n".join(line.strip() for line in lines)
    denials: list[tuple[int, int, int]] = []
    found = find(text, denials)
    if len(lines) > 1 and len(text) <= _LONG:
        found = _merged(found, [one for one in _joined(lines) if not _is_denied(one, denials)], text)
    return ranked(found, text)


def _joined(lines: Sequence[str]) -> list[Found]:
    """Return what the joined lines tell, at the places that it has in the lines."""
    ends = list(accumulate(map(len, lines)))
    starts = list(accumulate((len(line.strip()) + 1 for line in lines), initial=0))

    def place(at: int) -> int:
        line = min(bisect_left(ends, at), len(lines) - 1)
        return starts[line] + max(0, at - (ends[line - 1] if line else 0) - (lines[line][:1] == " "))

    return [
        replace(one, start=place(one.start), end=place(one.end), low=place(one.low), high=place(one.high))
        for one in find("".join(lines))
    ]


def _merged(found: list[Found], joined: list[Found], text: str) -> list[Found]:
    own = [other for other in joined if not _begins_below(other, found, text)]
    kept = [_fuller(one, joined) for one in found if not any(_refutes(other, one, joined) for other in own)]
    certain = any(one.incident.is_oom and not one.vague for one in (*kept, *joined))
    kept += [
        one
        for one in joined
        if not any(_overlap(one, other, _BESIDE if one.vague else 0) for other in kept) and not (one.vague and certain)
    ]
    return without_doubtful(kept)


def _is_denied(one: Found, denials: Sequence[tuple[int, int, int]]) -> bool:
    return any((one.vague or one.row == row) and one.low < high and low < one.high for low, high, row in denials)


def _fuller(one: Found, joined: list[Found]) -> Found:
    """Return whichever of the two readings of one failure has more numbers; only a sentence has them across lines."""
    if not FORMATS[one.row].flows:
        return one
    twins = (other for other in joined if other.row == one.row and _overlap(other, one))
    return max((one, *twins), key=lambda other: len(numbers(other.incident)))


def _refutes(other: Found, one: Found, joined: list[Found]) -> bool:
    """Whether ``other`` of the joined lines says more of the place of ``one``, which they do not confirm."""
    if (other.vague and not one.vague) or any(_overlap(same, one) and same.row == one.row for same in joined):
        return False
    if other.incident.is_oom or not one.incident.is_oom:
        return _overlap(other, one) and (other.row < one.row or (one.vague and not other.vague))
    return not other.vague and (one.vague or FORMATS[one.row].unless is not None) and _overlap(other, one, _NEAR)


def _begins_below(other: Found, found: list[Found], text: str) -> bool:
    """Whether ``other`` is a failure of its own below: it is whole in the lines, on one that opens with a class."""
    whole = any(one.row == other.row and _overlap(one, other) for one in found)
    return whole and not other.incident.is_oom and opens(text, line_start_of(text, other.low, _NEAR))


def _overlap(one: Found, other: Found, near: int = 0) -> bool:
    return one.low < other.high + near and other.low < one.high + near

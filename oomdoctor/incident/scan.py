"""Finds the rows of the message table in plain lines; the engine that reading text and reading exceptions share.

Time is linear in the text: literals are found by ``str.find``, and patterns look at a bounded stretch around each.
Limits: of one literal only the first and the last hits are looked at, so in a text that fails hundreds of times in
different ways those in the middle are not read.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from oomdoctor.incident import (
    rows_class,
    rows_framework,
    rows_host,
    rows_killed,
    rows_lookalike,
    rows_runtime,
    rows_serving,
    rows_structure,
    rows_torch,
)
from oomdoctor.incident.formats import ANYWHERE, Format
from oomdoctor.incident.numbers import settle, size
from oomdoctor.incident.place import cell_line, exception_class, innermost_frame, line_end_of, line_start_of
from oomdoctor.model.incident import Family, Incident

__all__ = ["FORMATS", "Found", "find", "numbers", "ranked", "same", "scan", "without_doubtful"]

FORMATS: Final[tuple[Format, ...]] = (
    *rows_torch.ROWS,
    *rows_runtime.ROWS,
    *rows_serving.ROWS,
    *rows_framework.ROWS,
    *rows_host.ROWS,
    *rows_killed.ROWS,
    *rows_class.ROWS,
    *rows_lookalike.ROWS,
    *rows_structure.ROWS,
)
"""Every row, in the order of priority."""

_HITS: Final = 25
"""Hits of one literal that are looked at from either end of the text."""
_MESSAGE: Final = 4_000
_TRACEBACK: Final = 20_000
"""Characters from a class to its message, where another process' traceback stands between the two."""
_AROUND: Final = 400
_LINE: Final = 200  # characters of its own line that a message has to itself before and after the match
_LONG_LINE: Final = 2_000
_MOST: Final = 400
"""Failures that are told apart; of more, the first and the last half of this."""
_BUCKET: Final = 9
_PROCESS: Final = re.compile(r"Process\s\d{1,9}\shas\s(\d{1,9}(?:\.\d{0,6})?\s[KMGT]i?B)\smemory\sin\suse")


@dataclass(frozen=True, slots=True)
class Found:
    """One failure.

    Attributes:
        low: where what was matched begins, ``high``: where what was read ends.
        start: where the stretch begins that its message has to itself, ``end``: where that ends.
        row: the place of its row in the table.
    """

    low: int
    high: int
    start: int
    end: int
    row: int
    incident: Incident
    vague: bool


@dataclass(frozen=True, slots=True)
class _Hit:
    match: re.Match[str]
    end: int
    family: Family


def scan(lines: str) -> tuple[Incident, ...]:
    """Return the failures in ``lines``: those for want of memory first, each in the order of the text, none twice."""
    return ranked(find(lines), lines)


def find(lines: str) -> list[Found]:
    """Return each failure in ``lines`` with the stretch that its message takes."""
    lowered = _lowered(lines)
    found: list[Found] = []
    taken: defaultdict[int, list[Found]] = defaultdict(list)
    for place, row in enumerate(FORMATS):
        for hit in _hits(row, lines, lowered):
            low, high = hit.match.span()
            near = (one for bucket in range(low >> _BUCKET, (high >> _BUCKET) + 1) for one in taken[bucket])
            if any(one.start < high and low < one.end for one in near):
                continue
            one = _read(row, place, lines, hit)
            found.append(one)
            for bucket in range(one.start >> _BUCKET, (one.end >> _BUCKET) + 1):
                taken[bucket].append(one)
    if len(found) > _MOST:
        found.sort(key=lambda one: one.low)
        found = found[: _MOST // 2] + found[-_MOST // 2 :]
    return without_doubtful(found)


def ranked(found: list[Found], lines: str) -> tuple[Incident, ...]:
    """Return the failures for want of memory, then the others, each in the order of the text and none twice."""
    ordered = sorted(found, key=lambda one: (not one.incident.is_oom, one.low))
    return tuple(
        replace(one.incident, cell=cell_line(lines, one.low), framework_frame=innermost_frame(lines, one.low))
        for one in _distinct(ordered)
    )


def without_doubtful(found: list[Found]) -> list[Found]:
    """Leave out what is vague where something definite stands beside it."""
    return [one for one in found if not (one.vague and _said_better(one, found))]


def _said_better(vague: Found, found: list[Found]) -> bool:
    return any(
        one.incident.is_oom
        and not one.vague
        and (
            vague.start - _AROUND <= one.start <= vague.end + _AROUND
            or (one.incident.family is vague.incident.family and vague.end <= one.start <= vague.end + _TRACEBACK)
        )
        for one in found
    )


def _lowered(lines: str) -> str:
    """Return ``lines`` in lower case on one line, with every character where it was."""
    lowered = lines.lower()
    if len(lowered) != len(lines):  # a few letters become two when lowered
        lowered = "".join(letter.lower() if letter.isascii() else letter for letter in lines)
    return lowered.replace("\n", " ")


def _hits(row: Format, lines: str, lowered: str) -> Iterator[_Hit]:
    """Yield the confirmed matches of a row, each with the end of what may belong to its message."""
    for needle in row.needles:
        places = _places(lowered, needle)
        for at, following in zip(places, [*places, -1][1:], strict=True):
            match = _confirmed(row, lines, at)
            if match is None:
                continue
            end = min(len(lines), match.end() + row.reach)
            if following >= match.end():
                end = min(end, following)
            family = _family(row, lines, match) if _in_place(row, lines, match, end) else None
            if family is not None:
                yield _Hit(match, end, family)


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


def _confirmed(row: Format, lines: str, at: int) -> re.Match[str] | None:
    for match in row.pattern.finditer(lines, max(0, at - _AROUND), min(len(lines), at + _AROUND + 200)):
        if match.start() <= at < match.end():
            return match
        if match.start() > at:
            break
    return None


def _in_place(row: Format, lines: str, match: re.Match[str], end: int) -> bool:
    before = max(0, match.start() - ANYWHERE)
    if row.requires and not row.requires.search(lines, match.start(), end):
        return False
    if row.context and not row.context.search(lines, before, end):
        return False
    if row.unless and row.unless.search(lines, before, end):
        return False
    low, high = _line_of(lines, match)
    if row.denied and row.denied.search(lines[low : match.start()]):
        return False
    if row.on_line:
        above = line_start_of(lines, low - 1, max(0, _AROUND - match.start() + low))
        return row.on_line.search(lines, above, min(high, match.end() + _LINE)) is not None
    return True


def _line_of(lines: str, match: re.Match[str]) -> tuple[int, int]:
    """Return where the lines of the match begin and end, of a very long line its part around the match."""
    return line_start_of(lines, match.start(), _LONG_LINE), line_end_of(lines, match.end(), _LONG_LINE)


def _family(row: Format, lines: str, match: re.Match[str]) -> Family | None:
    """Return who refused: by the words on the line of the match, or else by those around it."""
    if not row.families:
        return row.family
    low, high = _line_of(lines, match)
    line = max(low, match.start() - _AROUND), min(high, match.end() + _LINE)
    for start, end in (line, (max(0, line[0] - _AROUND), min(len(lines), line[1] + _LINE))):
        for words, family in row.families:
            if words.search(lines, start, end):
                return family
    return None


def _read(row: Format, place: int, lines: str, hit: _Hit) -> Found:
    """Read the numbers, the class and the place of one match."""
    match, end = hit.match, hit.end
    groups = {name: text for name, text in match.groupdict().items() if text}
    last = match.end()
    stretch = lines[match.start() : end]
    for clause in row.clauses:
        if clause.groupindex.keys() <= groups.keys():
            continue
        read = clause.search(stretch)
        if read is not None:
            last = max(last, match.start() + read.end())
        else:  # a hard wrap may have cut a word
            read = clause.search(stretch.replace("\n", ""))
        if read is not None:
            groups |= {name: text for name, text in read.groupdict().items() if text and name not in groups}
    processes = tuple(size(held) for held in _PROCESS.findall(stretch))
    line_start = line_start_of(lines, match.start(), _AROUND)
    message_end = min(line_end_of(lines, last, _MESSAGE), match.start() + _MESSAGE)
    incident = Incident(
        is_oom=row.is_oom,
        family=hit.family,
        format=row.name,
        device=_device(row, hit.family, groups),
        exc_type=exception_class(lines, line_start, match.start(), match.end()),
        message=lines[line_start:message_end].strip(),
        cell=None,
        inner=None,
        framework_frame=None,
        **settle(groups, processes),
    )
    return Found(
        low=match.start(),
        high=last,
        start=max(line_start, match.start() - _LINE),
        end=min(message_end, last + _LINE),
        row=place,
        incident=incident,
        vague=row.vague,
    )


def _device(row: Format, family: Family, groups: dict[str, str]) -> str | None:
    if groups.get("place", "").lower() == "cpu":
        return "cpu"
    device = _DEVICES.get(family) if row.families else row.device
    if device is None:
        return None
    index = groups.get("device")
    return device.format(index) if index else device.removesuffix(":{}")


_DEVICES: Final = dict.fromkeys(Family, "cuda:{}") | {
    Family.MPS: "mps",
    Family.XPU: "xpu:{}",
    Family.NPU: "npu:{}",
    Family.HOST: "cpu",
    Family.SHM: "cpu",
    Family.PINNED: "cpu",
}
"""Where memory of a family lies, for the rows that tell the family by words."""


def _distinct(found: list[Found]) -> list[Found]:
    """Leave out what an earlier one says already: the same numbers, or no numbers and the same family."""
    kept: list[Found] = []
    for one in found:
        twin = next((n for n, other in enumerate(kept) if same(other.incident, one.incident)), None)
        if twin is None:
            kept.append(one)
        elif kept[twin].incident.exc_type is None and one.incident.exc_type is not None:
            kept[twin] = replace(kept[twin], incident=replace(kept[twin].incident, exc_type=one.incident.exc_type))
    return kept


def same(earlier: Incident, later: Incident) -> bool:
    """Whether ``later`` tells nothing that ``earlier`` does not."""
    if (earlier.is_oom, earlier.family) != (later.is_oom, later.family):
        return False
    if not earlier.is_oom:
        return earlier.format == later.format
    told = numbers(later)
    return told == numbers(earlier) or not any(number is not None for number in told)


def numbers(incident: Incident) -> tuple[int | None, ...]:
    """Return the sizes that tell one failure from another."""
    return (incident.requested, incident.total, incident.free, incident.allocated, incident.reserved)

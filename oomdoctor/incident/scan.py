"""Finds the rows of the message table in plain lines; the engine that reading text and reading exceptions share.

Time is linear in the text: literals are found by ``str.find``, and patterns look at a bounded stretch around each.
Limits: of one literal only the first and the last hits are looked at, so in a text that fails hundreds of times in
different ways those in the middle are not read.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Final

from oomdoctor.incident.formats import Format, unspaced
from oomdoctor.incident.frames import innermost_frame, running_lines
from oomdoctor.incident.hits import AROUND, LINE, candidates, hits, lowered_of
from oomdoctor.incident.numbers import settle, size
from oomdoctor.incident.place import exception_class, line_end_of, line_start_of
from oomdoctor.incident.table import FORMATS
from oomdoctor.model.incident import Family, Incident

_MESSAGE: Final = 4_000
_TRACEBACK: Final = 20_000
"""Characters from a class to its message, where another process' traceback stands between the two."""
_MOST: Final = 400
"""Failures that are told apart; of more, the first and the last half of this."""
_BUCKET: Final = 9
_HEAD: Final = "Traceback (most recent call last)"
_HANDLES: Final = (Family.CUBLAS, Family.CUDNN)
_FAULTS: Final = ("device_assert", "illegal_access", "misaligned", "device_fault")
_PROCESS: Final = re.compile(r"Process\s\d{1,9}\shas\s(\d{1,9}(?:\.\d{0,6})?\s[KMGT]i?B)\smemory\sin\suse")

_CUT: Final = re.compile(r"(?<![\w.])(\d{1,6}\.?\d{0,2})\n(?=(?:\d{1,6}\.\d\d|\.?\d{1,2}) ?[KMGT]i?B\b)")
"""A number that a hard wrap cut in two: in no message does a number follow another one. As long when put together."""


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


def scan(lines: str) -> tuple[Incident, ...]:
    """Return the failures in ``lines``: those for want of memory first, each in the order of the text, none twice."""
    return ranked(find(lines), lines)


def find(lines: str, denials: list[tuple[int, int, int]] | None = None) -> list[Found]:
    """Return each failure in ``lines`` with the stretch that its message takes.

    Args:
        denials: takes up where words of a message stand that tell of no failure (advice, a condition, source code),
            and the place of their row in the table.
    """
    lowered = lowered_of(lines)
    denied: list[tuple[int, int, int]] = [] if denials is None else denials
    found: list[Found] = []
    taken: defaultdict[int, list[Found]] = defaultdict(list)
    for place in candidates(lowered):
        row = FORMATS[place]
        for hit in hits(row, lines, lowered):
            if hit.family is None:
                denied.append((*hit.match.span(), place))
                continue
            low, high = hit.match.span()
            near = (one for bucket in range(low >> _BUCKET, (high >> _BUCKET) + 1) for one in taken[bucket])
            if any(one.start < high and low < one.end for one in near):
                continue
            one = _read(row, place, lines, hit.match, hit.end, hit.family)
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
    return tuple(_placed(one.incident, lines, one.low) for one in _distinct(ordered))


def _placed(incident: Incident, lines: str, at: int) -> Incident:
    cell, inner = running_lines(lines, at)
    return replace(incident, cell=cell, inner=inner, framework_frame=innermost_frame(lines, at))


def without_doubtful(found: list[Found]) -> list[Found]:
    """Leave out what is vague beside something definite, and what follows from a fault of the device."""
    sure = [one for one in found if not (one.vague and _said_better(one, found))]
    return [one for one in sure if not _follows_a_fault(one, sure)]


def _follows_a_fault(handle: Found, found: list[Found]) -> bool:
    """Whether a library could not set itself up because a kernel had failed before: then each call fails."""
    return handle.incident.family in _HANDLES and any(
        one.incident.format in _FAULTS and one.low <= handle.low <= one.end + _TRACEBACK for one in found
    )


def _said_better(vague: Found, found: list[Found]) -> bool:
    return any(
        one.incident.is_oom
        and not one.vague
        and (
            vague.start - AROUND <= one.start <= vague.end + AROUND
            or (one.incident.family is vague.incident.family and vague.end <= one.start <= vague.end + _TRACEBACK)
        )
        for one in found
    ) or (_HEAD in vague.incident.message and any(_ends(vague, one) for one in found))


def _ends(head: Found, one: Found) -> bool:
    """Whether ``one`` is the message of the class that a notebook shows above the traceback."""
    follows = head.end <= one.start <= head.end + _TRACEBACK
    return follows and one.incident.is_oom and _bare(one.incident.exc_type) == _bare(head.incident.exc_type)


def _bare(exc_type: str | None) -> str | None:
    return exc_type and exc_type.rpartition(".")[2]


def _read(row: Format, place: int, lines: str, match: re.Match[str], end: int, family: Family) -> Found:
    """Read the numbers, the class and the place of one match."""
    groups = {name: text for name, text in match.groupdict().items() if text}
    last = match.end()
    stretch = lines[match.start() : end]
    if row.flows:
        stretch = _CUT.sub(r"\n\1", stretch)
    dense = "".join(stretch.split()) if row.flows else ""
    for clause in row.clauses:
        if clause.groupindex.keys() <= groups.keys():
            continue
        read = _within_rows(clause, stretch, flows=row.flows)
        if read is not None:
            last = max(last, match.start() + read.end())
        elif row.flows:
            read = unspaced(clause).search(dense)
        if read is not None:
            groups |= {name: text for name, text in read.groupdict().items() if text and name not in groups}
    held = max(_PROCESS.findall(stretch), unspaced(_PROCESS).findall(dense), key=len)
    processes = tuple(map(size, held))
    line_start = line_start_of(lines, match.start(), AROUND)
    message_end = min(line_end_of(lines, last, _MESSAGE), match.start() + _MESSAGE)
    incident = Incident(
        is_oom=row.is_oom,
        family=family,
        format=row.name,
        device=_device(row, family, groups),
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
        start=max(line_start, match.start() - LINE),
        end=min(message_end, last + LINE),
        row=place,
        incident=incident,
        vague=row.vague,
    )


def _within_rows(clause: re.Pattern[str], stretch: str, *, flows: bool) -> re.Match[str] | None:
    """Return where ``clause`` matches: in one line, unless the message is a sentence that flows over several."""
    return next((read for read in clause.finditer(stretch) if flows or "\n" not in read[0]), None)


def _device(row: Format, family: Family, groups: dict[str, str]) -> str | None:
    place = _PLACES.get(groups.get("place", "").lower())
    if place is not None:
        return place
    device = _DEVICES.get(family) if row.families else row.device
    if device is None:
        return None
    index = groups.get("device")
    return device.format(index) if index else device.removesuffix(":{}")


_PLACES: Final = {"cpu": "cpu", "tpu": "tpu", "hbm": "tpu"}
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
    """Leave out what an earlier one says already; what only the later one knows of the same failure is kept."""
    kept: list[Found] = []
    for one in found:
        twin = next((n for n, other in enumerate(kept) if same(other.incident, one.incident)), None)
        if twin is None:
            kept.append(one)
        else:
            kept[twin] = replace(kept[twin], incident=_filled(kept[twin].incident, one.incident))
    return kept


def same(earlier: Incident, later: Incident) -> bool:
    """Whether both tell of one failure: on one device, with the same numbers, some of them and no others, or none."""
    if (earlier.is_oom, earlier.family) != (later.is_oom, later.family):
        return False
    if not earlier.is_oom:
        return earlier.format == later.format
    if ":" in (earlier.device or "") and ":" in (later.device or "") and earlier.device != later.device:
        return False
    told, again = _told(earlier), _told(later)
    return again <= told or bool(told and told <= again)


def _told(incident: Incident) -> set[tuple[int, int]]:
    return {(place, number) for place, number in enumerate(numbers(incident)) if number is not None}


def _filled(earlier: Incident, later: Incident) -> Incident:
    """Return ``earlier`` with what it does not know and ``later`` does."""
    names = [name for name in _FILLED if getattr(earlier, name) is None]
    return replace(earlier, **{name: getattr(later, name) for name in names})


_FILLED: Final = ("exc_type", "requested", "total", "free", "allocated", "reserved", "process_used")


def numbers(incident: Incident) -> tuple[int | None, ...]:
    """Return the sizes that tell one failure from another."""
    return (incident.requested, incident.total, incident.free, incident.allocated, incident.reserved)

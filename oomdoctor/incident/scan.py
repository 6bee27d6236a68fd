"""Finds the rows of the message table in plain lines; the engine that reading text and reading exceptions share.

Time is linear in the text: literals are found by ``str.find``, and patterns look at a bounded stretch around each.
Limits: of one literal only the first and the last hits are looked at, so in a text that fails hundreds of times in
different ways those in the middle are not read. Messages of PyTorch round to two decimals, so a size is right to half
a hundredth of its unit; ``GB`` in them is binary as ``GiB`` is.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from oomdoctor.incident.formats import AROUND, FORMATS, LINE, Format, hits, lowered_of, unspaced
from oomdoctor.incident.frames import HEAD, TRACEBACK, exception_class, line_end_of, line_start_of, place_of
from oomdoctor.model.incident import Family, Incident

_MESSAGE: Final = 4_000
_MOST: Final = 400
"""Failures that are told apart; of more, the first and the last half of this."""
_BUCKET: Final = 9
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


def find(lines: str, denials: list[tuple[int, int, int]] | None = None) -> list[Found]:
    """Return each failure in ``lines`` with the stretch that its message takes.

    Args:
        denials: takes up where words of a message stand that tell of no failure (advice, a condition, source code),
            and the place of their row in the table.
    """
    lowered = lowered_of(lines).replace("\n", " ")
    denied: list[tuple[int, int, int]] = [] if denials is None else denials
    found: list[Found] = []
    taken: defaultdict[int, list[Found]] = defaultdict(list)
    for place, row in enumerate(FORMATS):
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
    return tuple(replace(one.incident, **place_of(lines, one.low)) for one in _distinct(found))


def without_doubtful(found: list[Found]) -> list[Found]:
    """Leave out what is vague beside something definite, and what follows from a fault of the device."""
    sure = [one for one in found if not (one.vague and _said_better(one, found))]
    return [one for one in sure if not _follows_a_fault(one, sure)]


def _follows_a_fault(handle: Found, found: list[Found]) -> bool:
    """Whether a library could not set itself up because a kernel had failed before: then each call fails."""
    return handle.incident.family in _HANDLES and any(
        one.incident.format in _FAULTS and one.low <= handle.low <= one.end + TRACEBACK for one in found
    )


def _said_better(vague: Found, found: list[Found]) -> bool:
    return any(
        one.incident.is_oom
        and not one.vague
        and (
            vague.start - AROUND <= one.start <= vague.end + AROUND
            or (one.incident.family is vague.incident.family and vague.end <= one.start <= vague.end + TRACEBACK)
        )
        for one in found
    ) or (HEAD in vague.incident.message and any(_ends(vague, one) for one in found))


def _ends(head: Found, one: Found) -> bool:
    """Whether ``one`` is the message of the class that a notebook shows above the traceback."""
    follows = head.end <= one.start <= head.end + TRACEBACK
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
        # In one line, unless the message is a sentence that flows over several.
        read = next((one for one in clause.finditer(stretch) if row.flows or "\n" not in one[0]), None)
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
    Family.MUSA: "musa:{}",
    Family.MLU: "mlu:{}",
    Family.HPU: "hpu:{}",
    Family.NEURON: "neuron:{}",
    Family.HOST: "cpu",
    Family.SHM: "cpu",
    Family.PINNED: "cpu",
}
"""Where memory of a family lies, for the rows that tell the family by words."""


def _distinct(found: list[Found]) -> list[Found]:
    """Leave out what an earlier one says already; what only the later one knows of the same failure is kept."""
    kept: list[Found] = []
    for one in sorted(found, key=lambda one: (not one.incident.is_oom, one.low)):
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
    told, again = numbers(earlier), numbers(later)
    return again <= told or bool(told and told <= again)


def _filled(earlier: Incident, later: Incident) -> Incident:
    """Return ``earlier`` with what it does not know and ``later`` does."""
    names = [name for name in _FILLED if getattr(earlier, name) is None]
    return replace(earlier, **{name: getattr(later, name) for name in names})


_NUMBERS: Final = ("requested", "total", "free", "allocated", "reserved")
_FILLED: Final = (*_NUMBERS, "exc_type", "process_used")


def numbers(incident: Incident) -> set[tuple[str, int]]:
    """Return the sizes that tell one failure from another, as far as they are known."""
    return {(name, size) for name in _NUMBERS if (size := getattr(incident, name)) is not None}


_GROUP: Final = 3
"""Digits that a comma keeps apart in a large number; printed fractions have two."""
_UNITS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5, "e": 6}
_SIZE: Final = re.compile(r"([\d.,]{1,40})\s?([a-z]?)", re.IGNORECASE)
_BITS: Final = re.compile(r"(\d{1,4})$")
_TYPES: Final = {
    "half": 2, "float": 4, "double": 8, "bfloat16": 2, "bool": 1, "bool_": 1, "object": 8, "int": 4, "complex": 8,
    "string": 16, "long": 8,
}  # fmt: skip
_CONTEXT_LIMIT: Final = 1 << 30
"""What a CUDA context with its libraries takes at most beside the pool of the allocator.

Source: differences of 0.3 to 0.9 GiB between the pool and the process' use in the messages of many reports.
"""

_ROUNDING: Final = 1.01
"""What two sizes of two decimals that are equal may differ by as printed."""


def size(text: str) -> int:
    """Return the bytes that a printed size such as ``1.5 GiB``, ``117. GiB`` or ``1900,00 MiB`` names."""
    match = _SIZE.match(text)
    if match is None:
        return 0
    digits, prefix = match.groups()
    number = _plain(digits.rstrip(".,"))
    if number.isdigit():
        return int(number) << 10 * _UNITS.get(prefix.lower(), 0)
    return round(float(number or 0) * float(1 << 10 * _UNITS.get(prefix.lower(), 0)))


def _plain(digits: str) -> str:
    """Return a number with a point before its fraction, whichever sign groups its digits."""
    point = max(".,", key=digits.rfind)
    whole, _, last = digits.rpartition(point)
    if not whole:
        return digits
    grouped = whole.replace(".", "").replace(",", "")
    is_group = point in whole or (point == "," and "." not in whole and whole != "0")
    return grouped + last if is_group and len(last) == _GROUP else f"{grouped}.{last}"


def _array_bytes(shape: str, dtype: str) -> int | None:
    """Return the bytes of an array from its printed shape and type, None where the type is not known."""
    item = _item_bytes(dtype)
    axes = [int(axis) for axis in re.findall(r"\d{1,18}", shape)]
    return math.prod(axes) * item if item and axes else None


def _item_bytes(dtype: str) -> int | None:
    name = dtype.lstrip("<>|=")
    if name.lower() in _TYPES:
        return _TYPES[name.lower()]
    bits = _BITS.search(name)
    if bits is None:
        return None
    if name[0] in "US":  # numpy's text: a number of characters, four bytes each in U
        return int(bits[1]) * (4 if name[0] == "U" else 1)
    return int(bits[1]) if len(name) == 2 else int(bits[1]) // 8 or None


def settle(groups: Mapping[str, str], processes: tuple[int, ...] = ()) -> dict[str, Any]:
    """Return the fields of an incident from captured groups.

    Args:
        groups: what was captured, by name.
        processes: what the message says that single processes hold. In a container this process may be among them
            under a number that it does not know itself by; it is the one that holds little more than the pool does.
    """
    sizes = {name: size(text) for name, text in groups.items() if name in _SIZES}
    total = sizes.get("total")
    for name, text in groups.items():
        if name.endswith("_as_total"):
            unit = groups.get("total", "").lstrip("0123456789., ")
            sizes[name.removesuffix("_as_total")] = size(f"{text} {unit}")
    requested = _requested(sizes.get("requested"), groups)
    allocated = sizes.get("allocated")
    if "free" not in sizes and total is not None and sizes.get("used", total + 1) <= total:
        sizes["free"] = total - sizes["used"]
    reserved = _reserved(sizes)
    if reserved is not None and allocated is not None and allocated > reserved * _ROUNDING:
        reserved = allocated = None  # one of them was cut, and nothing tells which
    process = sizes.get("process")
    if process is None and reserved:
        own = [held for held in processes if 0 <= held - reserved < _CONTEXT_LIMIT]
        process = own[0] if own else None
    return {
        "requested": requested or None,  # "0GB" was cut off, and nobody asks for nothing
        "total": total,
        "free": sizes.get("free"),
        "allocated": allocated,
        "reserved": reserved,
        "process_used": process,
    }


_SIZES: Final = frozenset(
    {"requested", "total", "free", "allocated", "reserved", "cached", "unallocated", "process", "used"},
)


def _reserved(sizes: Mapping[str, int]) -> int | None:
    """Return the pool, allocated bytes included, out of whichever of the three wordings was used."""
    if "reserved" in sizes:
        return sizes["reserved"]
    unused = sizes.get("cached", sizes.get("unallocated"))
    return None if unused is None or "allocated" not in sizes else sizes["allocated"] + unused


def _requested(printed: int | None, groups: Mapping[str, str]) -> int | None:
    """Return the request; shape and type are exact where a printed size has three digits."""
    exact = _array_bytes(groups["shape"], groups["dtype"]) if "shape" in groups and "dtype" in groups else None
    return printed if exact is None or (printed and abs(exact - printed) > 0.02 * printed) else exact

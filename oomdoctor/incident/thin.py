"""Leaves out of a long log what repeats, so that megabytes of progress cost little to read.

The shape of a line is what is left of it without digits and bars. Of each shape the first and the last lines are kept,
and so is everything beside a line of a rare shape: a traceback stays whole. In what is left, stretches that contain
none of the words of any message are left out.

Limits: a failure that prints the same shape more often than is kept is read from its first and its last lines. Where
megabytes remain after all this, their middle is left out, apart from what says in so many words that memory ran out.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import compress
from typing import Final

__all__ = ["ANCHORS", "STRONG", "thin"]

_LONG: Final = 1 << 19
"""Characters from which on a text is thinned."""
_KEPT: Final = 12
"""Lines of one shape that are kept at either end."""
_BESIDE: Final = 40
"""Lines that are kept before and after a line of a rare shape."""
_ABOVE, _BELOW = 24_000, 6_000
"""Characters that are kept around an anchor: the traceback above a message, and the message."""
_MOST: Final = 1 << 20
"""Characters around anchors that are kept."""
_ENDS: Final = 60
"""Hits of an anchor that are looked at from either end of the text, before any others."""

STRONG: Final = (
    "out of mem", "outofmem", "out_of_mem", "not enough mem", "insufficient mem", "oom-kill", "oomkill", "oom_kill",
    "alloc_failed", "allocate memory", "to allocate", "bad_alloc", "exhausted", "memoryerror", "killed", "is killed by",
)  # fmt: skip
"""What is said where memory ran out, looked for before all else."""
ANCHORS: Final = (
    "emor", "lloc", "kill", "rror", "ernel", "signal", "fail", "rash", "exhaust", "137", "shm", "torch", "segm",
    "sigseg", "keyboardint", "driver", "timeo", "timed o", "peer",
)  # fmt: skip
"""Pieces of words that the other messages of the table have."""

_DROPPED: Final = bytes({*b"0123456789.:,%#=>|-+ \t\r", *range(128, 256)})
_BLANK: Final = re.compile(r"\n{3,}")


def thin(text: str) -> str:
    """Return ``text`` as it is where it is short, and otherwise without what repeats or cannot matter."""
    if len(text) <= _LONG:
        return text
    kept = _without_repeats(text)
    return kept if len(kept) <= _LONG else _around_anchors(kept)


def _without_repeats(text: str) -> str:
    text = _BLANK.sub("\n\n", text)
    lines = text.split("\n")
    shapes = text.encode("utf-8", "replace").translate(None, _DROPPED).split(b"\n")
    counts = Counter(shapes)
    if 2 * sum(count for count in counts.values() if count > 2 * _KEPT) < len(lines):
        return text
    seen: defaultdict[bytes, int] = defaultdict(int)
    wanted = bytearray(len(lines))
    beside = -1  # the line up to which all is kept
    for at, shape in enumerate(shapes):
        count = counts[shape]
        if count <= 2 * _KEPT:
            low = max(beside, at - _BESIDE, 0)
            beside = min(len(lines), at + _BESIDE + 1)
            wanted[low:beside] = b"\1" * (beside - low)
        else:
            seen[shape] += 1
            if not _KEPT < seen[shape] <= count - _KEPT:
                wanted[at] = 1
    return "\n".join(compress(lines, wanted))


def _around_anchors(text: str) -> str:
    lowered = text.lower()
    if len(lowered) != len(text):  # a few letters become two when lowered
        lowered = "".join(letter.lower() if letter.isascii() else letter for letter in text)
    spans: list[tuple[int, int]] = [(0, _BELOW), (max(0, len(text) - _ABOVE), len(text))]
    room = _MOST
    for anchors, most in ((STRONG, _ENDS), (ANCHORS, len(text))):
        for anchor in anchors:
            places = list(_hits(lowered, anchor, most))
            if len(places) == most:
                places += _last_hits(lowered, anchor, most)
            spans += [(max(0, at - _ABOVE), min(len(text), at + _BELOW)) for at in places]
        spans = _merged(spans)
        if sum(high - low for low, high in spans) > room:
            break
    return "\n".join(text[low:high] for low, high in _within(spans, room))


def _hits(lowered: str, anchor: str, most: int) -> Iterator[int]:
    at = lowered.find(anchor)
    while at >= 0 and most > 0:
        yield at
        most -= 1
        at = lowered.find(anchor, at + _BELOW // 2)


def _last_hits(lowered: str, anchor: str, most: int) -> Iterator[int]:
    at = lowered.rfind(anchor)
    while at >= 0 and most > 0:
        yield at
        most -= 1
        at = lowered.rfind(anchor, 0, max(0, at - _BELOW // 2))


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(spans):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged


def _within(spans: list[tuple[int, int]], room: int) -> list[tuple[int, int]]:
    """Return as much of ``spans`` as there is room for: half of it from the beginning and half from the end."""
    if sum(high - low for low, high in spans) <= room:
        return spans
    first, last = _taken(spans, room // 2), _taken([(-high, -low) for low, high in reversed(spans)], room // 2)
    return _merged(first + [(-high, -low) for low, high in last])


def _taken(spans: list[tuple[int, int]], room: int) -> list[tuple[int, int]]:
    taken = []
    for low, high in spans:
        if room <= 0:
            break
        taken.append((low, min(high, low + room)))
        room -= high - low
    return taken

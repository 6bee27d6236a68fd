"""Leaves out of a long log what repeats, so that megabytes of progress cost little to read.

The shape of a line is what is left of it without digits and bars. Of each shape the first and the last lines are kept,
and everything beside a line of a rare shape: a traceback stays whole. Of what is left, stretches with none of the words
of any message go.

Limits: where megabytes remain, their middle is left out, apart from what says in so many words that memory ran out, in
English or in one of the languages that are met most.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import compress
from typing import Final

from oomdoctor.incident.formats import lowered_of

_REPEATING: Final = 1 << 16
"""Characters from which on what repeats is left out."""
_LONG: Final = 1 << 19
"""Characters from which on what cannot matter is left out as well."""
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
    "out of memor", "outofmemor", "out_of_memor", "not enough memor", "insufficient memor", "memoryerror",
    "alloc_failed", "allocate memory", "to allocate", "bad_alloc",
    "oom-kill", "oomkill", "oom_kill", "oom kill", "killed", "is killed by",
    "exhausted",
)  # fmt: skip
"""What is said where memory ran out, looked for before all else."""
ANCHORS: Final = (
    "emor", "lloc", "kill", "exhaust", "rror", "ernel", "signal", "fail", "rash", "137", "shm", "torch", "seg",
    "oom", "keyboardint", "driver", "timeo", "timed o", "peer", "invalid",
)  # fmt: skip
"""Pieces of words that the messages of the table have. What is said in ``STRONG`` contains one of them."""
TRANSLATED: Final = ("已杀死", "无法分配内存", "getötet", "processus arrêté", "強制終了", "убито")
"""The same in the languages that are met most; looked for where a text is not ASCII."""

_DROPPED: Final = bytes({*b"0123456789.:,%#=>|-+ \t\r", 0xE2, *range(0x80, 0xC0)})
"""Digits, and of UTF-8 what bars, frames and spinners are made of."""
_BLANK: Final = re.compile(r"\n{3,}")


def thin(text: str) -> str:
    """Return ``text`` as it is where it is short, and otherwise without what repeats or cannot matter."""
    if len(text) <= _REPEATING:
        return text
    kept = _without_repeats(text)
    return kept if len(kept) <= _LONG else _around_anchors(kept)


def ends(text: str, most: int) -> str:
    """Return ``text``, of a longer one the first and the last half of ``most`` characters."""
    return text if len(text) <= most else f"{text[: most // 2]}\n{text[-(most // 2) :]}"


def _without_repeats(text: str) -> str:
    if "\n\n\n" in text:
        text = _BLANK.sub("\n\n", text)
    lines = text.split("\n")
    shapes = text.encode("utf-8", "replace").translate(None, _DROPPED).split(b"\n")
    counts = Counter(shapes)
    common = {shape for shape, count in counts.items() if count > 2 * _KEPT}
    if 2 * sum(counts[shape] for shape in common) < len(lines):
        return text
    wanted = bytearray(len(lines))
    for at in (*_first(shapes, common), *(len(lines) - 1 - at for at in _first(reversed(shapes), common))):
        wanted[at] = 1
    beside = -1  # the line up to which all is kept
    for at in compress(range(len(lines)), map((set(counts) - common).__contains__, shapes)):
        low = max(beside, at - _BESIDE, 0)
        beside = min(len(lines), at + _BESIDE + 1)
        wanted[low:beside] = b"\1" * (beside - low)
    return "\n".join(compress(lines, wanted))


def _first(shapes: Iterable[bytes], common: set[bytes]) -> Iterator[int]:
    """Yield where the first lines of each common shape stand; ends as soon as all are found."""
    left = dict.fromkeys(common, _KEPT)
    for at, shape in enumerate(shapes):
        if shape in left:
            yield at
            left[shape] -= 1
            if not left[shape]:
                del left[shape]
                if not left:
                    return


def _around_anchors(text: str) -> str:
    lowered = lowered_of(text)
    spans: list[tuple[int, int]] = [(0, _BELOW), (max(0, len(text) - _ABOVE), len(text))]
    there = [anchor for anchor in ANCHORS if anchor in lowered]
    said = [strong for strong in STRONG if any(anchor in strong for anchor in there)]
    for strong in said if text.isascii() else (*said, *TRANSLATED):
        places = list(_hits(lowered, strong))
        spans += _around([*places[:_ENDS], *places[-_ENDS:]], len(text))
    spans = _merged(spans)
    for anchor in there:
        if sum(high - low for low, high in spans) > _MOST:
            break
        spans = _merged(spans + _around(_hits(lowered, anchor), len(text)))
    return ends("\n".join(text[low:high] for low, high in spans), _MOST)


def _around(places: Iterable[int], end: int) -> list[tuple[int, int]]:
    return [(max(0, at - _ABOVE), min(end, at + _BELOW)) for at in places]


def _hits(lowered: str, anchor: str) -> Iterator[int]:
    """Yield where ``anchor`` stands; of hits close to one another the first, whose surroundings have the others."""
    at = lowered.find(anchor)
    while at >= 0:
        yield at
        at = lowered.find(anchor, at + _BELOW // 2)


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(spans):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged

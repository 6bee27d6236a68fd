from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterator
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]

import pytest

from oomdoctor.incident import describe, formats, frames, from_text
from oomdoctor.incident.formats import FORMATS, Format, compiled
from oomdoctor.model.sizes import GIB, MIB


def test_each_row_recognises_its_own_sample():
    for row in FORMATS:
        first, *_ = from_text(row.sample)
        told_by_words = {family for _, family in row.families}
        assert (first.format, first.is_oom, describe(first)) == (row.name, row.is_oom, row.title)
        assert first.family is row.family or first.family in told_by_words, row.name


def test_names_are_unique_and_needles_are_lower_case_and_in_the_sample():
    assert len({row.name for row in FORMATS}) == len(FORMATS)
    for row in FORMATS:
        assert all(needle == needle.lower() for needle in row.needles), row.name
        flat = " ".join(row.sample.lower().split())
        assert any(needle in flat for needle in row.needles), row.name
        assert not row.beside or any(word in flat for word in row.beside), row.name


def unbounded(pattern: re.Pattern[str]) -> bool:
    """Whether some repetition in the pattern has no upper bound."""

    def walk(node: object) -> bool:
        if isinstance(node, tuple) and len(node) == 2 and node[0] in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            low_high_inner = node[1]
            if low_high_inner[1] is codes.MAXREPEAT:
                return True
        if isinstance(node, (list, tuple, parser.SubPattern)):
            return any(walk(child) for child in node)
        return False

    return walk(parser.parse(pattern.pattern, pattern.flags))


def test_the_check_for_unbounded_repetition_can_fail():
    assert unbounded(re.compile(r"a(?:bc+)?"))
    assert not unbounded(re.compile(r"a(?:bc{0,9})?\d{1,4}"))


def patterns_of(row: Format) -> list[re.Pattern[str]]:
    optional = (row.requires, row.context, row.unless, row.on_line, row.denied)
    return [row.pattern, *row.clauses, *(one for one in optional if one), *(words for words, _ in row.families)]


def test_no_pattern_repeats_without_bound():
    assert not [(row.name, one.pattern) for row in FORMATS for one in patterns_of(row) if unbounded(one)]


_OF_SHAPES = ("_PLACE", "_SPACES", "_WORD")
"""What reads the table itself."""


@pytest.mark.parametrize("module", [formats, frames], ids=lambda module: module.__name__)
def test_nor_does_what_looks_at_the_lines_around(module):
    patterns = [one for name, one in vars(module).items() if isinstance(one, re.Pattern) and name not in _OF_SHAPES]
    assert patterns
    assert not [one.pattern for one in patterns if unbounded(one)]


@pytest.mark.parametrize(
    ("shape", "text"),
    [("free[ :=]{1,3}{free}", "free: 16.00 GiB"), ("a ?b", "a\n b"), ("a b", "a \n b"), (r"a\[ b", "a[  b")],
)
def test_a_space_in_a_shape_is_white_space_and_in_a_set_one_of_it(shape, text):
    found = compiled(shape).search(text)
    assert found is not None
    assert found.groupdict().get("free", "16.00 GiB") == "16.00 GiB"


def seconds(pattern: re.Pattern[str], text: str) -> float:
    """Return what finding every match takes: once where that is next to nothing, or else the fastest of three."""
    times: list[float] = []
    while len(times) < 3 and (not times or times[0] > _NOTHING):
        start = time.process_time()
        deque(pattern.finditer(text), maxlen=0)
        times.append(time.process_time() - start)
    return min(times)


def hostile(row: Format) -> Iterator[str]:
    """Yield what to repeat: the beginnings that a pattern gets far into before it fails, and what it repeats."""
    yield from (needle + " " for needle in row.needles[:2])
    yield from (row.sample[: len(row.sample) * part // 3] for part in (1, 2))
    yield from ("9", "a.", " ", "x: ", "1,")


_SMALL, _LARGE = 2_000, 16_000
_NOTHING = 0.003


def test_each_pattern_takes_time_linear_in_the_text():
    tried: set[tuple[str, str]] = set()
    slow = []
    for row in FORMATS:
        for unit in hostile(row):
            for pattern in patterns_of(row):
                if (pattern.pattern, unit) in tried:
                    continue
                tried.add((pattern.pattern, unit))
                small, large = (unit * (size // len(unit)) for size in (_SMALL, _LARGE))
                # Eight times the text: a quadratic pattern takes sixty-four times as long.
                if (took := seconds(pattern, large)) > _NOTHING and took > 24 * seconds(pattern, small):
                    slow.append((row.name, unit, pattern.pattern))
    assert not slow


def test_the_check_for_linear_time_can_fail():
    quadratic = re.compile(r"(?:a.*)b", re.DOTALL)
    assert seconds(quadratic, "a" * _LARGE) > 24 * seconds(quadratic, "a" * _SMALL)


NEW_TAIL = (
    ". GPU 0 has a total capacity of 8.00 GiB of which 1.00 MiB is free. Of the allocated memory 3.00 GiB is "
    "allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated."
)


# The three meanings of "cached": excluding what is allocated, including it, and the unused part alone.
@pytest.mark.parametrize(
    ("text", "reserved"),
    [
        ("(GPU 0; 8.00 GiB total capacity; 3.00 GiB already allocated; 1.00 MiB free; 2.00 GiB cached)", 5 * GIB),
        (
            "(GPU 0; 8.00 GiB total capacity; 3.00 GiB already allocated; 1.00 MiB free; 4.00 GiB reserved in total)",
            4 * GIB,
        ),
        (
            NEW_TAIL,
            3 * GIB + 512 * MIB,
        ),
    ],
)
def test_reserved_always_includes_what_is_allocated(text, reserved):
    lead = "CUDA out of memory. Tried to allocate 1.00 GiB" + (" " if text.startswith("(") else "")
    (incident,) = from_text(f"RuntimeError: {lead}{text}")
    assert (incident.requested, incident.total, incident.free) == (GIB, 8 * GIB, MIB)
    assert (incident.allocated, incident.reserved, incident.device) == (3 * GIB, reserved, "cuda:0")

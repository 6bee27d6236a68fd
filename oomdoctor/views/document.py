"""A view as a document: blocks in their order, from which both the text and the HTML are made.

All sentences and figures are made where the facts are, so that text and HTML cannot differ: the renderers add nothing
to a document and leave nothing out of it. What stands inside a line is rich's ``Text``, whose styles are names that
each renderer knows; a plain string is a sentence in which code stands between backticks. What comes from the user's
program has gone through ``labels.clean``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal, NamedTuple, TypeAlias

from rich.text import Text

from oomdoctor.model.memory import Role
from oomdoctor.model.plan import Course, Verdict
from oomdoctor.model.sizes import format_size

Said: TypeAlias = str
"""A text in our words, which is shown in the reader's language; others are code, figures and marks."""
Inline: TypeAlias = Said | Text


def prose(sentence: Inline) -> Text:
    """Return a sentence with the code in it set apart."""
    if isinstance(sentence, Text):
        return sentence
    text = Text(sentence)
    text.highlight_regex(r"`[^`]+`", "quoted")
    return text


@dataclass(frozen=True, slots=True)
class Line:
    """Sentences on lines of their own; ``gap`` is an empty line, which only text needs."""

    text: Inline
    look: Literal["title", "name", "lead", "plain", "inner", "muted", "more", "next", "offer", "gap"] = "plain"


GAP: Final = Line("", "gap")


def given(*blocks: Block | None) -> Document:
    """Return those of ``blocks`` that there are."""
    return tuple(block for block in blocks if block is not None)


def apart(*blocks: Block | None) -> Document:
    """Return those of ``blocks`` that there are, with an empty line before them."""
    found = given(*blocks)
    return (GAP, *found) if found else ()


@dataclass(frozen=True, slots=True)
class Head:
    """The title of what follows, and what belongs on its line."""

    title: Said
    aside: Said = ""


@dataclass(frozen=True, slots=True)
class Source:
    """A line of the user's code and where it stands; ``before`` says what it is."""

    place: Said
    line: str
    before: Said = ""


@dataclass(frozen=True, slots=True)
class Items:
    """Short facts, one a line. ``most``: how many of them text shows; a page folds a long list instead."""

    rows: tuple[Inline, ...]
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells; how their columns look goes by what they are of."""

    of: Literal["holders", "growth", "facts", "cards", "cells"]
    rows: tuple[tuple[Inline, ...], ...]


@dataclass(frozen=True, slots=True)
class Notice:
    """How something ended: a mark that says good or bad without colour, one sentence, then named facts."""

    mark: str
    title: Said
    facts: tuple[tuple[Said, Said], ...]


class Cause(NamedTuple):
    """A likely cause with the sentences that speak for it, its rule's id, and the address of that one's page."""

    title: Said
    confidence: Said
    because: tuple[Said, ...]
    rule: str = ""
    page: str = ""


@dataclass(frozen=True, slots=True)
class Causes:
    """Likely causes, the likeliest first. The first ``told`` are told with all that speaks for them."""

    rows: tuple[Cause, ...]
    told: int = 5


@dataclass(frozen=True, slots=True)
class Diff:
    """A diff, of which no line is broken, so that ``patch`` can read it."""

    text: str


@dataclass(frozen=True, slots=True)
class Fold:
    """What a page shows only where a reader opens it; text shows it below its title."""

    title: Said
    blocks: Document
    aside: Said = ""


@dataclass(frozen=True, slots=True)
class Static:
    """What a page shows only where no live controls tell the same."""

    blocks: Document


@dataclass(frozen=True, slots=True)
class Section:
    """What belongs together, set apart from what stands above it."""

    blocks: Document


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One stretch of a bar; ``ratio`` is its share of the whole, 0 to 1.

    ``kind`` is a role's value, or ``cached``, ``context``, ``elsewhere``, ``outside``, ``process``, ``simulated``,
    ``children``, ``free``, ``asked`` or ``over``.
    """

    kind: str
    label: Said
    size: str
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Segments that fill a bar from left to right.

    Attributes:
        budget: where the memory ends, in words; ``budget_ratio``: where that is on the bar. A bar is longer than
            its budget when more was asked for than there is.
        is_slim: whether a page names its segments within the bar alone.
    """

    title: Said
    budget: str | None
    budget_ratio: float | None
    segments: tuple[Segment, ...]
    is_slim: bool = False

    @classmethod
    def of(cls, title: str, total: int | None, pieces: list[tuple[str, str, int]]) -> Bar | None:
        """Return the bar of ``(kind, label, bytes)`` out of a total, None where there are no bytes."""
        pieces = [piece for piece in pieces if piece[2] > 0]
        scale = max(total or 0, sum(size for *_, size in pieces))
        if not scale:
            return None
        return cls(
            title=title,
            budget=None if total is None else format_size(total),
            budget_ratio=None if total is None else total / scale,
            segments=tuple(
                Segment(kind=kind, label=label, size=format_size(size), ratio=size / scale)
                for kind, label, size in pieces
            ),
        )


class Column(NamedTuple):
    """A stretch of a timeline: the highest point in it as a share of the whole height."""

    ratio: float
    kind: str
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """How the memory of a cell goes.

    Attributes:
        sentence: the same in words.
        points: ``(bytes, line)`` in the order of the operations; ``by_role``: what they are made of, where it is known.
        budget_bytes: where the memory ends, None where the sentence is not about it.
        limit_bytes: where a picture shows that it ends.
        axis: what the lines are: of a cell, or numbers of cells, where each point is the end of one.
    """

    sentence: Said
    points: tuple[tuple[int, int | None], ...]
    by_role: tuple[tuple[Role, tuple[int, ...]], ...] = ()
    budget_bytes: int | None = None
    limit_bytes: int | None = None
    axis: Literal["lines", "cells"] = "lines"

    @classmethod
    def of(
        cls,
        course: Course | None,
        budget: int | None = None,
        *,
        limit: int | None = None,
        forecast_bytes: int | None = None,
        failed_at: int | None = None,
    ) -> Timeline | None:
        """Return the timeline of ``course``, None where no dry run saw one.

        Args:
            budget: bytes that there are, where the timeline is to be held against them in words.
            limit: bytes that there are, where it is not.
            forecast_bytes: the peak as the forecast tells it, which has what the allocator rounds up.
            failed_at: line of the cell at which memory ran out: what is told goes past it.
        """
        if course is None or not course.points:
            return None
        highest = max(range(len(course.points)), key=lambda at: course.points[at][0])
        size, line = course.points[highest]
        peak = (max(size, forecast_bytes or 0), line)
        points = (*course.points[:highest], peak, *course.points[highest + 1 :])
        first, last = points[0], points[-1]
        sentence = f"From {point(*first)} to the peak of {point(*peak)}; {point(*last)} where it was last seen."
        if failed_at is not None:
            goes = f"the cell goes from {point(*first)} to the peak of {point(*peak)}"
            sentence = f"Memory ran out at line {failed_at}. With enough of it, {goes}; last seen: {point(*last)}."
        elif budget is not None:
            passed = next((line for size, line in course.points if size > budget), 0)
            within = f"Its tensors stay within the limit of {format_size(budget)}."
            sentence += f" {within if passed == 0 else f'It first passes the limit of {point(budget, passed)}.'}"
        limit = limit if budget is None else budget
        return cls(sentence=sentence, points=points, by_role=course.by_role, budget_bytes=budget, limit_bytes=limit)

    @classmethod
    def of_cells(cls, ends: Sequence[tuple[int, int]], limit: int | None) -> Timeline | None:
        """Return how much was in use at the end of each cell, ``(bytes, number)``; None of fewer than two."""
        if len(ends) < 2:
            return None
        first, last, peak = (point(*end, "cells") for end in (ends[0], ends[-1], max(ends)))
        sentence = f"At the ends of cells: {first}, at most {peak}, now {last}."
        return cls(sentence=sentence, points=tuple(ends), limit_bytes=limit, axis="cells")

    @property
    def _top(self) -> int:
        return max(self.budget_bytes or 0, *(size for size, _ in self.points)) or 1

    def highest(self, count: int) -> tuple[int, ...]:
        """Return the places of the highest points of at most so many stretches."""
        share = max(len(self.points) / count, 1.0)
        edges = [round(at * share) for at in range(round(len(self.points) / share) + 1)]
        bins = [range(start, end) for start, end in pairwise(edges) if start < end]
        return tuple(max(places, key=lambda at: self.points[at][0]) for places in bins)

    def columns(self, count: int) -> tuple[Column, ...]:
        """Return the timeline in at most so many columns."""
        return tuple(self._column(*self.points[at]) for at in self.highest(count))

    def _column(self, size: int, line: int | None) -> Column:
        over = size == self._top if self.budget_bytes is None else size > self.budget_bytes
        return Column(size / self._top, "over" if over else "parameter", point(size, line, self.axis))


@dataclass(frozen=True, slots=True)
class Treemap:
    """Who holds the memory, by module and name: what a table of holders says, as areas. Text has the table alone.

    ``tiles`` are ``(name, bytes)`` of each kind, the largest first in both.
    """

    tiles: tuple[tuple[str, tuple[tuple[str, int], ...]], ...]


def point(size: int, line: int | None, axis: str = "lines") -> str:
    """Return a point of a timeline in words."""
    where = f"after In[{line}]" if axis == "cells" else f"at line {line}"
    return format_size(size) if line is None else f"{format_size(size)} {where}"


class Gauge(NamedTuple):
    """What a fix needs as its verdict counts it, and its limit; both as shares of the largest figure of the plan."""

    peak_ratio: float
    budget_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FixRow:
    """One fix.

    Attributes:
        number: what it is called by.
        peak: what the verdict and the gauge go by, of its limit: what the allocator would hold, where that is known,
            else what tensors would take. ``basis`` says how it was found, and how much of it tensors take; it is empty
            where there is no forecast.
        slowdown: empty where it is not known.
        apply: the command that applies it, None where nothing can be applied; likewise ``diff``.
        notes: caveats, and why a part of it cannot be had.
    """

    number: int
    title: Said
    dose: str
    effect: Said
    promise: Said
    peak: Said
    basis: Said
    verdict: Verdict
    verdict_text: Said
    slowdown: Said
    gauge: Gauge | None
    apply: str | None
    diff: str | None
    notes: tuple[Said, ...]


@dataclass(frozen=True, slots=True)
class Fixes:
    """Fixes with their prices, in the order of the plan."""

    rows: tuple[FixRow, ...]


Block = (
    Line
    | Head
    | Source
    | Items
    | Table
    | Notice
    | Causes
    | Diff
    | Fold
    | Static
    | Section
    | Bar
    | Timeline
    | Treemap
    | Fixes
)
Document = tuple[Block, ...]

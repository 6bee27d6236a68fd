"""How the memory of a cell goes while it runs, as a sentence and as columns of the same points."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from oomdoctor.model.sizes import format_size

if TYPE_CHECKING:
    from oomdoctor.model.plan import Course


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A stretch of the timeline: the highest point in it as a share of the whole height."""

    ratio: float
    kind: str
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """How the memory of the cell goes.

    Attributes:
        sentence: the same in words.
        points: ``(bytes, line)`` in the order of the operations.
        budget_bytes: where the memory ends, None where no line is drawn for it.
    """

    sentence: str
    points: tuple[tuple[int, int | None], ...]
    budget_bytes: int | None = None

    @property
    def budget_ratio(self) -> float | None:
        """Where the memory ends as a share of the whole height."""
        return None if self.budget_bytes is None else self.budget_bytes / self._top

    @property
    def _top(self) -> int:
        return max(self.budget_bytes or 0, *(size for size, _ in self.points)) or 1

    def columns(self, count: int) -> tuple[Column, ...]:
        """Return the timeline in at most so many columns."""
        share = max(len(self.points) / count, 1.0)
        edges = [round(at * share) for at in range(round(len(self.points) / share) + 1)]
        bins = [self.points[start:end] for start, end in pairwise(edges) if start < end]
        return tuple(self._column(max(points, key=lambda point: point[0])) for points in bins)

    def _column(self, point: tuple[int, int | None]) -> Column:
        size, line = point
        over = size == self._top if self.budget_bytes is None else size > self.budget_bytes
        label = f"{format_size(size)}{_at(line)}"
        return Column(ratio=size / self._top, kind="over" if over else "parameter", label=label)


def timeline(course: Course | None, budget: int | None = None) -> Timeline | None:
    """Return the timeline of ``course``, None where no shadow run saw one.

    Args:
        budget: bytes that there are, where the timeline is to be held against them.
    """
    if course is None or not course.points:
        return None
    (first, first_line), (last, last_line) = course.points[0], course.points[-1]
    peak, line = max(course.points, key=lambda point: point[0])
    sentence = (
        f"From {format_size(first)}{_at(first_line)} to the peak of {format_size(peak)}{_at(line)}; "
        f"{format_size(last)}{_at(last_line)} where it was last seen."
    )
    if budget is not None:
        sentence = f"{sentence} {_against(course.points, budget)}"
    return Timeline(sentence=sentence, points=course.points, budget_bytes=budget)


def _against(points: tuple[tuple[int, int | None], ...], budget: int) -> str:
    passed = next(((size, line) for size, line in points if size > budget), None)
    if passed is None:
        return f"Its tensors stay within the budget of {format_size(budget)}."
    return f"It first passes the budget of {format_size(budget)}{_at(passed[1])}."


def _at(line: int | None) -> str:
    return "" if line is None else f" at line {line}"

"""What one memory is shown as: a device or the host."""

from __future__ import annotations

from dataclasses import dataclass

from oomdoctor.views.bar import Bar
from oomdoctor.views.holders import Holders


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One figure, what it is of, and what that means for the reader."""

    figure: str
    name: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One memory.

    Attributes:
        headline: its state in one sentence.
        aside: what it calls itself, and which limit its total is.
        bars: the whole of it, and of the host this process once more on a scale of its own.
    """

    headline: str
    title: str
    aside: str
    bars: tuple[Bar, ...]
    holders: Holders
    facts: tuple[Fact, ...]

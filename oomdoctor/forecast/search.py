"""Finds the mildest change that fits, with as few forecasts as there need be.

A forecast costs seconds, and proposals come in order of strength, so the first that fits is found by bisection. That
needs the peak to fall from each proposal to the next; where it does not, what is found fits all the same, but may not
be the mildest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from oomdoctor.model.plan import Forecast, Verdict

__all__ = ["Choice", "mildest"]

P = TypeVar("P")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The proposal that was chosen.

    Attributes:
        index: its place among the proposals.
        forecast: its forecast; only if its verdict is FITS was one found that fits.
        priced: every forecast that was asked for, by index.
    """

    index: int
    forecast: Forecast
    priced: tuple[tuple[int, Forecast], ...]


def mildest(
    proposals: Sequence[P], price: Callable[[Sequence[P]], Sequence[Forecast]], *, at_once: int = 1
) -> Choice | None:
    """Return the mildest of ``proposals`` that fits, or the strongest if none does; None where there are none.

    Args:
        proposals: mildest first.
        price: prices some of them; called again and again.
        at_once: how many forecasts are made at the same time, which then cost no more than one.
    """
    if not proposals:
        return None
    priced: dict[int, Forecast] = {}
    low, high = 0, len(proposals) - 1  # the answer, if there is one, is in low..high
    best: int | None = None
    while low <= high:
        asked = _spread(low, high, at_once, with_last=best is None and not priced)
        priced.update(zip(asked, price([proposals[index] for index in asked]), strict=True))
        fitting = [index for index in asked if priced[index].verdict is Verdict.FITS]
        if fitting:
            best = fitting[0]
            high = best - 1
        failing = [index for index in asked if index not in fitting and (best is None or index < best)]
        low = max([low, *(index + 1 for index in failing)])
    chosen = len(proposals) - 1 if best is None else best
    return Choice(index=chosen, forecast=priced[chosen], priced=tuple(sorted(priced.items())))


def _spread(low: int, high: int, count: int, *, with_last: bool) -> list[int]:
    """Return up to ``count`` indices of low..high that cut it into equal parts.

    Asked first for the last alone or with others: if even the strongest does not fit, the search is over.
    """
    cuts = {low + (high - low + 1) * part // (count + 1) for part in range(1, count + 1)}
    if with_last:
        cuts = {high} if count == 1 else {*sorted(cuts)[1:], high}
    return sorted(cuts)

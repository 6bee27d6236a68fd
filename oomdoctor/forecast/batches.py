"""Finds the largest batch that fits, by forecasts alone.

From the batch that the cells set it goes up, or down to a single sample, until the answer lies between two sizes, and
then closes in. The peak grows all but evenly with the batch, so the next guess is where the line through two forecasts
meets the budget; every other guess leaves a third, for peaks that do not. Two sizes are forecast together. A guess has
the next one beside it that forecasts can tell from it: where the one fits and the other does not, the search is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from oomdoctor.model.memplan import LargestBatch
from oomdoctor.model.plan import Forecast, Verdict

_MOST: Final = 1 << 24
"""Larger batches are not asked for."""
_NEAR: Final = 100
"""Sizes that differ by less than one part in so many are not told apart: a forecast is no better than that."""
_ON_LINE: Final = 0.5
"""A batch that was to need the whole budget and needs less than this share of it has not the samples it was to have."""
_LATE: Final = "the time for forecasts was over"

Price = Callable[[Sequence[int]], Sequence[Forecast]]


def largest(now: int, forecast: Forecast, price: Price, *, has_time: Callable[[], bool]) -> LargestBatch:
    """Return the largest batch whose forecast fits.

    Args:
        now: samples in a batch as the cell stands; ``forecast``: what it needs so.
        price: forecasts the cell with batches of these sizes; called again and again.
        has_time: whether there is time for more forecasts.
    """
    search = _Search({now: forecast}, price, has_time)
    low, high = search.bracket(now)
    if high is not None:
        low, high = search.close_in(low, high)
    return LargestBatch(
        now=now,
        size=low,
        forecast=search.known[low or high or now],
        above=high,
        end=search.end,
        tried=len(search.known),
    )


class _Search:
    """What is known so far.

    Attributes:
        known: the forecast of each size.
        end: why the search ended early.
    """

    def __init__(self, known: dict[int, Forecast], price: Price, has_time: Callable[[], bool]) -> None:
        self.known = known
        self.end: str | None = None
        self._budget = next(iter(known.values())).budget or 0
        self._is_line = True
        self._price, self._has_time = price, has_time

    def bracket(self, now: int) -> tuple[int, int | None]:
        """Return a size that fits and a larger one that does not; 0 where none fits, None where all do."""
        if not self._fits(now):
            if now == 1 or not self._ask([1]):
                return 0, now
            return (1, now) if self._fits(1) else (0, 1)
        low = now
        while low < _MOST:
            sizes = self._upwards(low)
            asked = self._ask(sizes)
            for size in sizes:
                if size not in self.known:
                    break
                if not self._fits(size):
                    return low, size
                if self._is_same(low, size):
                    self.end = (
                        f"a batch of {size} needs exactly what one of {low} does: there seem to be no more samples"
                    )
                    return low, None
                if size > 4 * low and self._needs(size) < _ON_LINE * self._budget:
                    self._is_line = False
                    break
                low = size
            if not asked:
                return low, None
        self.end = f"larger batches than {low} were not asked for"
        return low, None

    def _upwards(self, low: int) -> list[int]:
        """Return the next larger sizes to forecast: twice as many samples, and as many as the line speaks for."""
        below = max((size for size in self.known if size < low), default=None)
        if below is None or not self._is_line or self._needs(low) <= self._needs(below):
            return [low * 2, low * 4]
        steepness = (self._needs(low) - self._needs(below)) / (low - below)
        return [low * 2, max(min(low + int((self._budget - self._needs(low)) / steepness), _MOST), low * 4)]

    def close_in(self, low: int, high: int) -> tuple[int, int]:
        """Return the two sizes next to each other, or as near as there was time for."""
        by_line = True
        while low and high - low > max(1, low // _NEAR):
            if by_line:
                guess = self._where_the_line_ends(low, high)
                sizes = [guess, guess + max(1, guess // _NEAR)]
            else:
                sizes = [low + (high - low) // 3, high - (high - low) // 3]
            by_line = not by_line
            sizes = sorted({size for size in sizes if low < size < high})
            asked = self._ask(sizes)
            for size in sizes:
                if low < size < high and size in self.known:
                    low, high = (size, high) if self._fits(size) else (low, size)
            if not asked:
                break
        return low, high

    def _where_the_line_ends(self, low: int, high: int) -> int:
        least, most = self._needs(low), self._needs(high)
        share = (self._budget - least) / (most - least) if most > least else 0.5
        return min(max(low + int((high - low) * share), low + 1), high - 1)

    def _needs(self, size: int) -> float:
        """Return what the verdict counts: the larger of peak and reserved, with the error of such forecasts."""
        forecast = self.known[size]
        return max(forecast.peak or 0, forecast.reserved or 0) * (1 + forecast.error_ratio)

    def _fits(self, size: int) -> bool:
        return self.known[size].verdict is Verdict.FITS

    def _is_same(self, size: int, other: int) -> bool:
        """Whether two batches hold the same samples, as far as forecasts tell: not a byte and not an operation more."""
        one, two = self.known[size], self.known[other]
        flops = [forecast.course.flops for forecast in (one, two) if forecast.course is not None]
        return (one.peak, one.reserved) == (two.peak, two.reserved) and len(set(flops)) <= 1

    def _ask(self, sizes: list[int]) -> bool:
        """Forecast ``sizes``; return False where one cannot be, which ends the search."""
        if not self._has_time():
            self.end = _LATE
            return False
        found = dict(zip(sizes, self._price(sizes), strict=True))
        refused = next(((size, one.refused) for size, one in found.items() if one.refused is not None), None)
        self.known.update({size: replace(one, slowdown=None) for size, one in found.items() if one.refused is None})
        if refused is not None and not self._has_time():
            self.end = _LATE
        elif refused is not None:
            self.end = f"a batch of {refused[0]} could not be forecast: {refused[1]}"
        return refused is None

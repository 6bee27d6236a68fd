"""The largest batch that fits, found by forecasts alone.

From the batch that the cells set it goes up, or down to a single sample, until the answer lies between two sizes, and
then closes in. The peak grows all but evenly with the batch, so the next guess is where the line through two forecasts
meets the budget; every other guess leaves a third, for peaks that do not. Two sizes are forecast together. A guess has
the next one beside it that forecasts can tell from it: where the one fits and the other does not, the search is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from oomdoctor.forecast.attempts import patched
from oomdoctor.forecast.dry_run_result import BASIS
from oomdoctor.forecast.dry_runs import price
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Patch
from oomdoctor.model.plan import Forecast, LargestBatch, Verdict
from oomdoctor.model.session import Cells, Session
from oomdoctor.model.unavailable import Refused

_MOST: Final = 1 << 24
"""Larger batches are not asked for."""
_NEAR: Final = 100
"""Sizes that differ by less than one part in so many are not told apart: a forecast is no better than that."""
_ON_LINE: Final = 0.5
"""A batch that was to need the whole budget and needs less than this share of it has not the samples it was to have."""
_LEAST_S: Final = 1.0
"""Less time than this is not enough for another round of forecasts."""
_LATE: Final = "the time for forecasts was over"
Price: TypeAlias = Callable[[Sequence[int]], Sequence[Forecast]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """How the batch size of the cells is read (``now``), and changed to so many samples; a value, as fixes are."""

    now: Callable[[Cells, Evidence], int | Refused]
    at: Callable[[Cells, Evidence, int], Patch | Refused]


def largest_batch(
    session: Session,
    forecast: Forecast,
    evidence: Evidence,
    ahead: Callable[[], Evidence],
    batches: Batches,
    *,
    time_s: float,
) -> LargestBatch | Refused:
    """Return the largest batch of the last cell of ``session`` that fits, or why it is not told.

    Args:
        ahead: returns the evidence with what the cell will have made itself.
        time_s: for all forecasts.
    """
    if forecast.peak is None:
        return Refused("the cell could not be forecast")
    if forecast.budget is None:
        return Refused("the available memory is unknown")
    if forecast.at_least:
        return Refused("more may be needed than the forecast saw, so that no batch is known to fit")
    now = batches.now(session.cells, evidence)
    if isinstance(now, Refused) and any(loop.in_failing_run for loop in evidence.code.loops):
        evidence = ahead()  # what the cell makes itself may tell
        now = batches.now(session.cells, evidence)
    if isinstance(now, Refused):
        return now
    changed = batches.at(session.cells, evidence, now * 2)
    if isinstance(changed, Refused):
        return changed
    end = time.monotonic() + time_s

    def price_batches(sizes: Sequence[int]) -> Sequence[Forecast]:
        patches = [batches.at(session.cells, evidence, size) for size in sizes]
        reasons = [patch.reason for patch in patches if isinstance(patch, Refused)]
        if reasons:
            return [Forecast(basis=BASIS, refused=reasons[0]) for _ in sizes]
        attempts = [patched(session.cells.failing, patch) for patch in patches if isinstance(patch, Patch)]
        left_s = round(end - time.monotonic(), 1)
        return price(session, attempts, budget=forecast.budget, prepare=lambda: None, timeout_s=left_s)

    return largest(now, forecast, price_batches, has_time=lambda: end - time.monotonic() > _LEAST_S)


def largest(now: int, forecast: Forecast, price_batches: Price, *, has_time: Callable[[], bool]) -> LargestBatch:
    """Return the largest batch whose forecast fits, from the batch of ``now`` samples and its ``forecast`` on.

    Args:
        price_batches: forecasts the cell with batches of these sizes; called again and again.
        has_time: whether there is time for more forecasts.
    """
    known, budget = {now: forecast}, forecast.budget or 0
    end, tried, by_line, is_line = None, 1, True, True
    while True:
        high = min((size for size in known if known[size].verdict is not Verdict.FITS), default=None)
        low = max((size for size in known if high is None or size < high), default=0)
        if high is None and low >= _MOST:
            end = f"larger batches than {low} were not asked for"
        if end is not None or high == 1 or (high is not None and low and high - low <= max(1, low // _NEAR)):
            break
        if not has_time():
            end = _LATE
            break
        if high is None:
            sizes = [low * 2, max(_where_the_line_ends(known, low, budget), low * 4) if is_line else low * 4]
        elif not low:
            sizes = [1]
        else:
            guess = _between(known, low, high, budget)
            thirds = [low + (high - low) // 3, high - (high - low) // 3]
            sizes = [guess, guess + max(1, guess // _NEAR)] if by_line else thirds
            by_line = not by_line
        sizes = sorted({size for size in sizes if low < size and (high is None or size < high)})
        for size, found in zip(sizes, price_batches(sizes), strict=True):
            tried += 1
            if found.refused is not None:
                end = f"a batch of {size} could not be forecast: {found.refused}" if has_time() else _LATE
                break
            fits = found.verdict is Verdict.FITS
            if high is None and fits and _is_same(known[low], found):
                end = f"a batch of {size} needs exactly what one of {low} does: there seem to be no more samples"
                break
            if high is None and fits and size > 4 * low and _needs(found) < _ON_LINE * budget:
                is_line = False
                break
            known[size] = replace(found, slowdown=None)
            low, high = (size, high) if fits else (low, size)
    return LargestBatch(now=now, size=low, forecast=known[low or high or now], above=high, end=end, tried=tried)


def _where_the_line_ends(known: dict[int, Forecast], low: int, budget: int) -> int:
    """Return the size that the line through the two largest known ones speaks for; 0 where there is none."""
    below = max((size for size in known if size < low), default=None)
    if below is None or _needs(known[low]) <= _needs(known[below]):
        return 0
    steepness = (_needs(known[low]) - _needs(known[below])) / (low - below)
    return min(low + int((budget - _needs(known[low])) / steepness), _MOST)


def _between(known: dict[int, Forecast], low: int, high: int, budget: int) -> int:
    least, most = _needs(known[low]), _needs(known[high])
    share = (budget - least) / (most - least) if most > least else 0.5
    return min(max(low + int((high - low) * share), low + 1), high - 1)


def _needs(forecast: Forecast) -> float:
    """Return what the verdict counts: the larger of peak and reserved, with the error of such forecasts."""
    return max(forecast.peak or 0, forecast.reserved or 0) * (1 + forecast.error_ratio)


def _is_same(one: Forecast, two: Forecast) -> bool:
    """Whether two batches hold the same samples, as far as forecasts tell: not a byte and not an operation more."""
    flops = {forecast.course.flops for forecast in (one, two) if forecast.course is not None}
    return (one.peak, one.reserved) == (two.peak, two.reserved) and len(flops) <= 1

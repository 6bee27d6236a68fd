"""The search for the largest batch, on peaks that are made up: exact where it can be, few forecasts, honest ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from oomdoctor.forecast.batch_search import largest
from oomdoctor.model.plan import Course, Forecast, LargestBatch, Verdict

BUDGET = 10_000


class Prices:
    """A cell whose peak is a function of its batch."""

    def __init__(self, peak: Callable[[int], int], samples: int = 1 << 30, refused: range = range(0)) -> None:
        self.peak, self.samples, self.refused = peak, samples, refused
        self.rounds: list[list[int]] = []

    def __call__(self, sizes: Sequence[int]) -> list[Forecast]:
        self.rounds.append(list(sizes))
        return [self.one(size) for size in sizes]

    def one(self, size: int) -> Forecast:
        if size in self.refused:
            return Forecast(basis="dry run", budget=BUDGET, refused="no")
        held = min(size, self.samples)
        course = Course(flops=float(held))
        return Forecast(basis="dry run", budget=BUDGET, peak=self.peak(held), slowdown=3.0, course=course)

    def search(self, now: int, rounds: int = 1000) -> LargestBatch:
        return largest(now, self.one(now), self, has_time=lambda: len(self.rounds) < rounds)


def _line(size: int) -> int:
    return 1000 + 100 * size  # 90 samples fit, 91 do not


@pytest.mark.parametrize("now", [1, 2, 7, 64, 90, 91, 128, 4096])
def test_it_is_the_largest_that_fits_from_wherever_it_begins(now: int) -> None:
    prices = Prices(_line)
    found = prices.search(now)
    assert (found.size, found.above, found.end) == (90, 91, None)
    assert found.now == now
    assert found.forecast.peak == _line(90)
    assert found.forecast.verdict is Verdict.FITS
    asked = [size for sizes in prices.rounds for size in sizes]
    assert len(asked) == len(set(asked)) == found.tried - 1
    assert len(prices.rounds) <= 6


def test_a_peak_that_goes_in_steps_is_searched_in_few_rounds_all_the_same() -> None:
    prices = Prices(lambda size: 1000 + 2000 * (size // 20))
    found = prices.search(64)
    assert (found.size, found.above) == (99, 100)
    assert len(prices.rounds) <= 10


def test_sizes_nearer_than_forecasts_can_tell_apart_are_not_told_apart() -> None:
    prices = Prices(lambda size: 1000 + size + 500 * (size // 777))
    found = prices.search(64)
    assert prices.one(found.size).fits is True
    assert found.above is not None
    assert prices.one(found.above).fits is False
    assert found.above - found.size <= found.size // 100


def test_where_not_one_sample_fits_that_is_asked_first() -> None:
    prices = Prices(lambda size: BUDGET + size)
    found = prices.search(64)
    assert (found.size, found.above) == (0, 1)
    assert prices.rounds == [[1]]
    assert found.forecast.peak == BUDGET + 1


def test_a_batch_of_one_that_does_not_fit_is_not_asked_again() -> None:
    prices = Prices(lambda size: BUDGET + size)
    assert prices.search(1).size == 0
    assert prices.rounds == []


def test_where_there_are_no_more_samples_the_search_ends_and_says_so() -> None:
    prices = Prices(_line, samples=50)
    found = prices.search(16)
    assert found.size == 64
    assert found.above is None
    assert found.end is not None
    assert "no more samples" in found.end


def test_a_peak_that_does_not_grow_yet_is_no_end_of_the_samples() -> None:
    prices = Prices(lambda size: max(5000, _line(size)))
    assert prices.search(4).size == 90


def test_a_size_that_cannot_be_forecast_ends_it_with_the_reason() -> None:
    found = Prices(_line, refused=range(64, 200)).search(16)
    assert (found.size, found.above) == (32, None)
    assert found.end == "a batch of 64 could not be forecast: no"


def test_the_end_of_the_time_ends_it_with_what_is_known() -> None:
    found = Prices(lambda size: 1000 + 2000 * (size // 20)).search(16, rounds=2)
    assert found.end == "the time for forecasts was over"
    assert found.above is not None
    assert found.size <= 99 < found.above


def test_a_batch_that_is_late_is_no_batch_that_cannot_be_forecast() -> None:
    prices = Prices(_line, refused=range(200, 1 << 30))
    found = largest(64, prices.one(64), prices, has_time=lambda: not prices.rounds)
    assert found.end == "the time for forecasts was over"


@pytest.mark.parametrize("needs", [1, 3, 7])
def test_a_small_batch_with_much_room_takes_few_rounds(needs: int) -> None:
    prices = Prices(lambda size: 100 + needs * size // 10)
    found = prices.search(8)
    assert found.above is not None
    assert prices.one(found.size).fits is True
    assert prices.one(found.above).fits is False
    assert found.above - found.size <= max(1, found.size // 100)
    assert len(prices.rounds) <= 5


def test_samples_that_run_out_before_the_line_does_are_seen() -> None:
    found = Prices(lambda size: 1000 + size, samples=300).search(16)
    assert found.above is None
    assert found.end is not None
    assert "no more samples" in found.end
    assert found.size < 600


def test_times_of_batches_are_not_told() -> None:
    """They would be relative to the first batch that was asked for."""
    assert Prices(_line).search(16).forecast.slowdown is None

"""The search for the mildest proposal that fits."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomdoctor.forecast import mildest
from oomdoctor.model.plan import Forecast, Verdict

BUDGET = 1000


def _forecast(peak):
    return Forecast(basis="test", budget=BUDGET, peak=peak, refused=None if peak is not None else "no")


class Prices:
    def __init__(self, peaks):
        self.peaks, self.calls, self.asked = peaks, 0, []

    def __call__(self, proposals):
        self.calls += 1
        self.asked += proposals
        return [_forecast(self.peaks[proposal]) for proposal in proposals]


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 5))
def test_it_is_the_mildest_that_fits_in_logarithmically_many_rounds(failing, fitting, at_once):
    peaks = [BUDGET + 1] * failing + [BUDGET - 1] * fitting
    prices = Prices(peaks)
    choice = mildest(range(len(peaks)), prices, at_once=at_once)
    if not peaks:
        assert choice is None
        assert prices.calls == 0
        return
    assert choice.index == (failing if fitting else len(peaks) - 1)
    assert choice.forecast == _forecast(peaks[choice.index])
    assert sorted(prices.asked) == [index for index, _ in choice.priced]
    assert prices.calls <= math.ceil(math.log(len(peaks), at_once + 1)) + 2
    if not fitting:
        assert prices.calls == 1
        assert len(prices.asked) <= at_once


@given(st.lists(st.one_of(st.none(), st.integers(1, 2000)), min_size=1, max_size=20), st.integers(1, 4))
def test_what_is_chosen_as_fitting_fits_even_where_peaks_do_not_fall(peaks, at_once):
    choice = mildest(range(len(peaks)), Prices(peaks), at_once=at_once)
    fits = [index for index, forecast in choice.priced if forecast.verdict is Verdict.FITS]
    assert choice.index == (min(fits) if fits else len(peaks) - 1)
    assert dict(choice.priced)[choice.index] is choice.forecast


def test_borderline_and_unknown_do_not_fit():
    close = Forecast(basis="test", budget=1000, peak=995, error_ratio=0.02)
    choice = mildest("ab", lambda proposals: [close if p == "a" else _forecast(900) for p in proposals])
    assert choice.index == 1


def test_a_price_for_each_is_required():
    with pytest.raises(ValueError, match="zip"):
        mildest("abc", lambda proposals: [])

"""The search for the mildest dose that fits."""

import math

from hypothesis import given
from hypothesis import strategies as st

from oomdoctor.forecast.dose_search import Search


def _run(fits, points_at):
    """Answer the search by ``fits``, a bool for each dose; return it and what it asked."""
    search, asked = Search(len(fits)), []
    while (dose := search.ask(points_at)) is not None:
        asked.append(dose)
        search.answer(dose, fits=fits[dose])
    return search, asked


def _guess(at):
    return lambda doses: at if at in doses else None


def _rising(failing, fitting):
    return [False] * failing + [True] * fitting


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 80))
def test_it_is_the_mildest_that_fits_wherever_the_estimate_points(failing, fitting, guess):
    search, asked = _run(_rising(failing, fitting), _guess(guess))
    assert search.found == (failing if fitting else None)
    assert search.over
    assert len(asked) == len(set(asked))
    assert len(asked) <= math.ceil(math.log2(failing + fitting + 1)) + 3


@given(st.integers(0, 30), st.integers(1, 30))
def test_a_good_estimate_takes_two_forecasts(failing, fitting):
    search, asked = _run(_rising(failing, fitting), lambda doses: failing if failing in doses else None)
    assert search.found == failing
    assert asked == ([failing, failing - 1] if failing else [failing])


@given(st.integers(1, 40))
def test_where_none_is_thought_to_fit_one_forecast_settles_it(failing):
    search, asked = _run(_rising(failing, 0), lambda doses: None)
    assert search.found is None
    assert asked == [failing - 1]


@given(st.lists(st.booleans(), min_size=1, max_size=20), st.integers(0, 20))
def test_what_is_found_fits_even_where_peaks_do_not_fall(fits, guess):
    search, asked = _run(fits, _guess(guess))
    if search.found is None:
        assert not any(fits[dose] for dose in asked)
    else:
        assert fits[search.found]
        assert search.found == min(dose for dose in asked if fits[dose])


def test_one_question_at_a_time():
    search = Search(5)
    assert search.ask(_guess(2)) == 2
    assert search.ask(_guess(2)) is None
    search.answer(2, fits=False)
    assert search.ask(_guess(2)) == 4


def test_doses_that_cannot_be_made_are_left_out():
    search = Search(5)
    assert search.ask(_guess(3)) == 3
    search.leave_out_from(3)
    assert search.ask(_guess(1)) == 1
    search.answer(1, fits=True)
    search.leave_out_from(1)
    assert search.found is None
    assert search.ask(_guess(0)) == 0


@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 40), st.randoms(use_true_random=False))
def test_asked_ahead_it_finds_the_same_whichever_answer_comes_first(failing, fitting, guess, random):
    fits = _rising(failing, fitting)
    search, running = Search(len(fits)), []
    while True:
        running += [dose for dose in (search.ask(_guess(guess)), search.ask_ahead()) if dose is not None]
        if not running:
            break
        assert len(set(running)) == len(running)
        dose = running.pop(random.randrange(len(running)))
        search.answer(dose, fits=fits[dose])
    assert search.found == (failing if fitting else None)
    assert search.over


def test_an_end_is_an_end():
    search = Search(5)
    search.ask(_guess(1))
    search.end()
    assert search.over
    assert search.found is None
    assert search.ask(_guess(1)) is None

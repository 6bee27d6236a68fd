"""Runs of a trial: made at once, made ahead, made again, given up."""

from __future__ import annotations

import errno
import math
import time
from itertools import count

import pytest

from oomdoctor.model.session import Attempt
from oomdoctor.sandbox import fork
from oomdoctor.trial import runs as module
from oomdoctor.trial.run import End, Terms
from oomdoctor.trial.runs import Runs, Ways

TERMS = Terms(rows=1, steps=1)
ONE, TWO, THREE = (Attempt(source=name) for name in ("one", "two", "three"))
LONG_S = 0.4


def slept(attempt, terms, share):
    time.sleep(LONG_S)
    return End(error=attempt.source)


def test_what_is_begun_ahead_runs_beside_what_is_waited_for():
    runs, begun = Runs(slept, 2), time.monotonic()
    for attempt in (ONE, TWO):
        runs.ahead(attempt, TERMS)
    assert [runs.end_of(attempt, TERMS).error for attempt in (TWO, ONE)] == ["two", "one"]
    assert time.monotonic() - begun < 2 * LONG_S


def test_each_run_is_made_once():
    runs = Runs(lambda attempt, terms, share: End(error=str(time.monotonic_ns())), 2)
    runs.ahead(ONE, TERMS)
    assert runs.end_of(ONE, TERMS) is runs.end_of(ONE, TERMS)


def test_with_one_processor_nothing_is_begun_ahead():
    runs = Runs(slept, 1)
    runs.ahead(TWO, TERMS)
    begun = time.monotonic()
    assert runs.end_of(ONE, TERMS).error == "one"
    assert time.monotonic() - begun < 2 * LONG_S


def test_what_is_waited_for_takes_the_place_of_what_is_not():
    runs, begun = Runs(slept, 2), time.monotonic()
    for attempt in (TWO, THREE):
        runs.ahead(attempt, TERMS)
    assert runs.end_of(ONE, TERMS).error == "one"
    assert time.monotonic() - begun < 2 * LONG_S


def test_what_lacked_memory_beside_others_is_made_again_alone(monkeypatch):
    shares = list[int]()
    monkeypatch.setattr(module, "bound_memory", shares.append)  # in the copy
    runs = Runs(lambda attempt, terms, share: End(error=f"{share} {shares}", is_ours=share > 1), 2)
    runs.ahead(TWO, TERMS)
    assert runs.end_of(ONE, TERMS) == End(error="1 [1]")


def test_what_cannot_be_run_at_all_is_made_twice_at_most(monkeypatch):
    begun = count()
    begin = Runs._begin
    monkeypatch.setattr(Runs, "_begin", lambda self, key, share: next(begun) < 9 and begin(self, key, share=share))
    runs = Runs(lambda attempt, terms, share: End(error="it may not", is_ours=True), 2)
    assert {runs.end_of(ONE, TERMS).error for _ in range(3)} == {"it may not"}
    assert next(begun) == 2


def test_what_is_late_is_given_up_and_made_again_where_there_is_time():
    runs = Runs(slept, 2)
    runs.until = time.monotonic() + LONG_S / 4
    assert runs.end_of(ONE, TERMS) == End(error="it did not end in time", is_ours=True)
    runs.until = math.inf
    assert runs.end_of(ONE, TERMS) == End(error="one")


def test_a_process_that_cannot_be_forked_is_told(monkeypatch):
    def refused(**_):
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    runs = Runs(slept, 2)
    monkeypatch.setattr(fork, "forked", refused)
    runs.ahead(TWO, TERMS)
    end = runs.end_of(ONE, TERMS)
    assert end.is_ours
    assert "cannot be forked" in end.error


def test_what_is_forgotten_ends():
    runs = Runs(slept, 2)
    runs.ahead(ONE, TERMS)
    (copy,) = runs._running.values()
    runs.forget()
    assert copy.over


@pytest.mark.parametrize("written", [(), (ONE,), (ONE, TWO)])
def test_ways_are_written_when_they_are_asked_for(written):
    asked = []
    ways = Ways(asked.append(one) or one for one in written)
    found = []
    while (way := ways.current) is not None:
        found.append(way)
        assert asked == list(written[: len(found)])
        assert ways.following == (written[len(found)] if len(found) < len(written) else None)
        ways.go_on()
    assert tuple(found) == written

"""Every family is a program that trains, fails for want of memory, and has a handle on how much it wants."""

from __future__ import annotations

import math

import pytest
from covering import few
from models import FAMILIES, Family
from running import budget_of, fail, finish, plain

from oomdoctor.model.memory import Role


@pytest.fixture(params=few(FAMILIES, ["mlp", "lstm", "history"]))
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


def test_it_fails_in_its_last_cell_and_is_understood(family: Family) -> None:
    failure = fail(family)
    assert failure.incident.is_oom
    assert failure.incident.cell is not None
    assert failure.incident.cell.number == len(family.cells())
    assert {f"{model.path}" for model in failure.evidence.code.models} >= set(family.models)
    ratio = failure.evidence.census.accounted_ratio
    assert ratio is not None
    assert ratio > 0.95
    assert failure.evidence.census.bytes_of(Role.UNEXPLAINED) < failure.evidence.census.found / 20


def test_it_leaves_results_and_the_same_ones_each_time(family: Family) -> None:
    first, again = plain(family), finish(family, family.cells())[0]
    assert all(map(math.isfinite, first.results))
    assert len(first.results) >= 5
    assert (first.results, first.random, first.peak) == (again.results, again.random, again.peak)
    assert first.peak > budget_of(family) / 2


def test_its_memory_grows_with_its_handle(family: Family) -> None:
    larger = finish(family, family.cells(2 * family.size))[0]
    assert larger.peak > 1.4 * plain(family).peak

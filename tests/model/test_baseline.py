"""What modules take is told apart from what the program holds."""

from __future__ import annotations

import sys
from types import ModuleType
from unittest import mock

import pytest

from oomdoctor.model import baseline


@pytest.fixture(autouse=True)
def anew() -> None:
    baseline._modules = baseline._last = baseline._bare = 0


def test_nothing_is_known_where_nothing_was_noted() -> None:
    assert baseline.bare(1_000, 0) is None


def test_what_a_cell_adds_without_loading_modules_is_the_programs() -> None:
    baseline.note(100)
    baseline.note(500)
    assert baseline.bare(500, 0) == 100


def test_what_a_cell_adds_that_loads_modules_is_theirs_but_for_what_the_program_holds() -> None:
    baseline.note(100)
    with mock.patch.dict(sys.modules, {"oomdoctor_of_this_test": ModuleType("of_this_test")}):
        baseline.note(800)
    assert baseline.bare(800, 0) == 800
    assert baseline.bare(800, 600) == 200

"""What is alive of a class: the same as a look at every object's type tells."""

from __future__ import annotations

import gc
from collections import deque

import pytest

from oomdoctor.objects.alive import alive, alive_exactly


class Base:
    pass


class Derived(Base):
    pass


class Lying(Base):
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise AssertionError("asked for its class")


@pytest.fixture
def kept() -> list[object]:
    """Some of each; what was there before the test is frozen."""
    return [Base(), Derived(), Lying(), deque([1]), [Base()]]


@pytest.mark.parametrize("roots", [(Base,), (Derived,), (deque,), (Base, deque), (Base, Derived)])
def test_all_of_a_class_and_of_those_below_it_are_found_once(kept: list[object], roots: tuple[type, ...]) -> None:
    expected = sorted(id(one) for one in gc.get_objects() if issubclass(type(one), roots))
    assert {id(one) for one in kept if issubclass(type(one), roots)} <= set(expected)
    assert sorted(map(id, alive(*roots))) == expected


@pytest.mark.parametrize("classes", [(Base,), (Base, deque), (Derived, Lying)])
def test_of_exactly_these_classes_there_is_none_of_those_below(kept: list[object], classes: tuple[type, ...]) -> None:
    expected = sorted(id(one) for one in gc.get_objects() if any(type(one) is cls for cls in classes))
    assert {id(one) for one in kept if type(one) in classes} <= set(expected)
    assert expected
    assert sorted(map(id, alive_exactly(*classes))) == expected


def test_a_class_with_very_many_below_it_is_searched_whole() -> None:
    many = [type(f"Below{at}", (Base,), {})() for at in range(60)]
    assert set(map(id, many)) <= set(map(id, alive(Base)))

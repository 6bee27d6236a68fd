"""Which rows of a table ``make test`` takes: the others are ``thorough``, and are left to ``make test-all``."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from itertools import product
from operator import eq
from typing import Any

import pytest

__all__ = ["each_value", "few"]

Row = tuple[Any, ...]


def few(values: Iterable[Any], taken: Container[Any]) -> list[Any]:
    """Return all ``values`` as parameters, of which ``make test`` takes those that are named."""
    return [_parameter(value, is_left=value not in taken) for value in values]


def each_value(*axes: Iterable[Any]) -> list[Any]:
    """Return all combinations as parameters, of which ``make test`` takes so many that each value is there.

    Args:
        axes: the values of each; those that are tuples are several values, of which only those combinations are made.
    """
    rows = [tuple(_flat(row)) for row in product(*axes)]
    left = {value for row in rows for value in enumerate(row)}
    taken = set[Row]()
    while left:
        # Of those that have as many, the one that is the least like what is taken: they spread over the table.
        best = max(rows, key=lambda row: (len(left.intersection(enumerate(row))), -_likeness(row, taken)))
        taken.add(best)
        left.difference_update(enumerate(best))
    return [_parameter(row, is_left=row not in taken) for row in rows]


def _flat(row: Row) -> Iterator[Any]:
    for value in row:
        yield from value if isinstance(value, tuple) else (value,)


def _likeness(row: Row, taken: Iterable[Row]) -> int:
    return sum(sum(map(eq, row, one)) ** 2 for one in taken)


def _parameter(value: Any, *, is_left: bool) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.thorough if is_left else ())

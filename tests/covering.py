"""Which rows of a table ``make test`` takes: the others are marked slow, and are left to ``make test-all``."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from itertools import combinations, product
from operator import eq
from typing import Any

import pytest

__all__ = ["each_value", "few", "pairwise"]

Row = tuple[Any, ...]


def few(values: Iterable[Any], taken: Container[Any]) -> list[Any]:
    """Return all ``values`` as parameters, of which ``make test`` takes those that are named."""
    return [_parameter(value, is_slow=value not in taken) for value in values]


def pairwise(*axes: Iterable[Any]) -> list[Any]:
    """Return all combinations as parameters, of which ``make test`` takes so many that each pair of values is there.

    Args:
        axes: the values of each; those that are tuples are parameters each for itself in what is returned.
    """
    return _covering(list(product(*axes)), strength=2)


def each_value(*axes: Iterable[Any]) -> list[Any]:
    """Return all combinations as parameters, of which ``make test`` takes so many that each value is there."""
    return _covering(list(product(*axes)), strength=1)


def _covering(rows: list[Row], strength: int) -> list[Any]:
    left = {part for row in rows for part in _parts(row, strength)}
    taken = set[Row]()
    while left:
        # Of those that cover as many, the one that is the least like what is taken: they spread over the table.
        best = max(rows, key=lambda row: (len(left.intersection(_parts(row, strength))), -_likeness(row, taken)))
        taken.add(best)
        left.difference_update(_parts(best, strength))
    return [_parameter(tuple(_flat(row)), is_slow=row not in taken) for row in rows]


def _parts(row: Row, strength: int) -> list[tuple[Any, ...]]:
    return list(combinations(enumerate(row), strength))


def _likeness(row: Row, taken: Iterable[Row]) -> int:
    return sum(sum(map(eq, _flat(row), _flat(one))) ** 2 for one in taken)


def _flat(row: Row) -> Iterator[Any]:
    for value in row:
        yield from value if isinstance(value, tuple) else (value,)


def _parameter(value: Any, *, is_slow: bool) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.slow if is_slow else ())

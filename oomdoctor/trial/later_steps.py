"""What decides otherwise in later steps: conditions and weights that stand still while what they are made of moves.

A trial runs the first steps alone. A term of the loss that begins later is behind a condition (``step > 1000``), or has
a weight that is nothing at first (``max(0, step - 1000) / 1000``). Both are found by running the unchanged program:
a value that was the same each time, though a number that it is made of was not, or is the number of rows, which the
trial has cut. Both programs are then run with that value as it may become: a condition turned round, a weight of one.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from types import FrameType, MappingProxyType
from typing import Any, Final

import torch

from oomdoctor.program.compiled import Site

_NAMED: Final = 3
_MOST_VISITS: Final = 2_000
"""Visits of an expression at which the names in it are looked up, which takes longer than most expressions."""


class Values:
    """The numbers that the expressions of a program come to, by their sites.

    Args:
        most: how many rows of a batch the trial takes; ``rows``: the sizes of batches that loaders have given.
        turned: the expressions that come to another value than they had, as in later steps, with what they had.
        is_first: tells whether the program is in the steps that are compared; ``is_later``: in those that are turned.
    """

    def __init__(
        self,
        most: int,
        rows: Collection[int] = (),
        turned: Mapping[Site, Any] = MappingProxyType({}),
        is_first: Callable[[], bool] = lambda: True,
        is_later: Callable[[], bool] = lambda: True,
    ) -> None:
        self._rows, self._most, self._turned = rows, most, turned
        self._is_first, self._is_later = is_first, is_later
        self._first: dict[Site, set[Any]] = {}
        self._parts: dict[tuple[str, str], set[Any]] = {}
        self._visits = Counter[Site]()

    def pass_on(self, told: tuple[Any, ...], value: Any) -> Any:
        """Return the value of an expression, or the one that it comes to in later steps; note what it is made of."""
        site = Site(*told)
        if site in self._turned and self._is_later():
            value = _otherwise(value, self._turned[site])
        number = _number(value)
        self._add((site.function, site.text), number)
        if number is not None:
            if self._is_first():
                self._first.setdefault(site, set()).add(number)
            self._visits[site] += 1
            if self._visits[site] <= _MOST_VISITS:
                frame = sys._getframe(1)
                for name in site.names:
                    self._add((site.function, name), _number(_read(frame, name)))
        return value

    def still(self) -> Mapping[Site, Any]:
        """Return the sites that may come to another value in later steps, with the one that they had in the first.

        What may begin stands before what may end.
        """
        found = {site: next(iter(values)) for site, values in self._first.items() if len(values) == 1}
        moved = (
            (site, value)
            for site, value in found.items()
            if (value is True or value == 0)
            and any(self._moves((site.function, part)) for part in (site.text, *site.names, *site.inner))
        )
        return dict(sorted(moved, key=lambda one: one[1] is True))

    def _add(self, part: tuple[str, str], number: float | None) -> None:
        numbers = self._parts.setdefault(part, set())
        if number is not None and len(numbers) < 2:
            numbers.add(number)

    def _moves(self, part: tuple[str, str]) -> bool:
        numbers = self._parts.get(part, set())
        is_cut = self._most in numbers and any(size > self._most for size in self._rows)
        return len(numbers) > 1 or is_cut


def _read(frame: FrameType, dotted: str) -> Any:
    """Return what a dotted name leads to in a frame, None where it leads nowhere."""
    first, *attributes = dotted.split(".")
    value = frame.f_locals.get(first, frame.f_globals.get(first))
    with suppress(Exception):  # a property of the user's
        for attribute in attributes:
            value = getattr(value, attribute)
        return value
    return None


def _number(value: Any) -> float | None:
    """Return a number, that of a tensor with one entry, or the length of a container; None for anything else."""
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, list | dict | set | tuple):
        return len(value)
    with suppress(Exception):  # within a transform of torch.func it has none
        if isinstance(value, torch.Tensor):
            return None if value.ndim or value.device.type != "cpu" else value.detach().item()
        if getattr(value, "ndim", None) == 0:  # of NumPy
            return value.item()  # type: ignore[no-any-return]
    return None


def _otherwise(value: Any, had: Any) -> Any:
    """Return the value that an expression may come to in later steps that has the one that it had; else its value.

    One that gradients go through is no weight.
    """
    if _number(value) != had or getattr(value, "requires_grad", False):
        return value
    if isinstance(value, torch.Tensor):
        return ~value if value.dtype is torch.bool else torch.ones_like(value)
    if type(had) is bool:
        return type(value)(not had)
    return value if isinstance(value, list | dict | set | tuple) else type(value)(1)


def shown(sites: Collection[Site]) -> str:
    """Return the expressions as a text."""
    texts = [f"`{text}`" for text in dict.fromkeys(site.text for site in sites)]
    return ", ".join(texts[:_NAMED]) + (f" and {len(texts) - _NAMED} more" if len(texts) > _NAMED else "")

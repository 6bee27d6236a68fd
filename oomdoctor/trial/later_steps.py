"""What decides otherwise in later steps: conditions and weights that stand still while what they are made of moves.

A trial runs the first steps alone. A term of the loss that begins later is behind a condition (``step > 1000``), or has
a weight that is nothing at first (``max(0, step - 1000) / 1000``). Both are found by running the unchanged program:
a value that was the same each time, though a number that it is made of was not, or is the number of rows, which the
trial has cut. Both programs are then run with that value as it may become: a condition turned round, a weight of one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from types import FrameType
from typing import Any, Final

import torch

from oomdoctor.program.compiled import Site

_NAMED: Final = 3


class Values:
    """The numbers that the expressions of a program have come to, by their sites.

    Args:
        rows: the sizes of batches that loaders have given; ``most``: how many rows of them the trial takes.
        is_first: tells whether the program is in the steps that are compared.
    """

    def __init__(self, rows: Collection[int], most: int, is_first: Callable[[], bool] = lambda: True) -> None:
        self._rows, self._most, self._is_first = rows, most, is_first
        self._first: dict[Site, set[Any]] = {}
        self._parts: dict[tuple[str, str], set[Any]] = {}

    def note(self, told: tuple[Any, ...], value: Any) -> Any:
        """Note the value of an expression and of the names in it; return the value."""
        site, number = Site(*told), _number(value)
        self._add((site.function, site.text), number)
        if number is not None:
            if self._is_first():
                self._first.setdefault(site, set()).add(number)
            frame = sys._getframe(1)
            for name in site.names:
                self._add((site.function, name), _number(_read(frame, name)))
        return value

    def still(self) -> Mapping[Site, Any]:
        """Return the sites that may come to another value in later steps, with the one that they had in the first."""
        found = {site: next(iter(values)) for site, values in self._first.items() if len(values) == 1}
        return {
            site: value
            for site, value in found.items()
            if (value is True or value == 0)
            and any(self._moves((site.function, part)) for part in (site.text, *site.names, *site.inner))
        }

    def _add(self, part: tuple[str, str], number: float | None) -> None:
        if number is not None:
            self._parts.setdefault(part, set()).add(number)

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
    """Return a number, that of a tensor with one entry, or how many items a container has; None for anything else."""
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, list | dict | set | tuple):
        return len(value)
    with suppress(Exception):  # within a transform of torch.func it has none
        if isinstance(value, torch.Tensor) and not value.ndim and value.device.type == "cpu":
            return value.detach().item()
    return None


def otherwise(told: tuple[Any, ...], value: Any, still: Mapping[Site, Any]) -> Any:
    """Return the value that an expression may come to in later steps: one of ``still`` that has its value there."""
    site = Site(*told)
    if site not in still or _number(value) != still[site]:
        return value
    if type(value) in (int, float):
        return type(value)(1)
    is_condition = isinstance(value, bool) or (isinstance(value, torch.Tensor) and value.dtype is torch.bool)
    return value ^ True if is_condition else value


def shown(sites: Collection[Site]) -> str:
    """Return the expressions as a text."""
    texts = [f"`{text}`" for text in dict.fromkeys(site.text for site in sites)]
    return ", ".join(texts[:_NAMED]) + (f" and {len(texts) - _NAMED} more" if len(texts) > _NAMED else "")

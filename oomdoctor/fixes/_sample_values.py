"""What a value in a training step is to the batch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

__all__ = ["COUNT", "EXTENT", "PLAIN", "ROWS", "Shape", "Value"]


class Shape(Enum):
    """What a value is to the batch."""

    PLAIN = auto()
    ROWS = auto()
    BATCH = auto()
    """The batch as the loader gave it: a dictionary or a list of rows."""
    COUNT = auto()
    EXTENT = auto()
    """The length of another dimension, or of that of the batch where it is the only one."""
    MEAN = auto()
    SUM = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """An abstract value.

    Attributes:
        counted: for a mean over the entries of a target alone that differ from a number: the target and the number.
        model: the model that returned it.
        entries: source text, over the batch as it came, of what has the same entries in whatever shape and order.
    """

    shape: Shape
    counted: tuple[str, int] | None = None
    model: str | None = None
    entries: str | None = None


PLAIN: Final = Value(shape=Shape.PLAIN)
ROWS: Final = Value(shape=Shape.ROWS)
COUNT: Final = Value(shape=Shape.COUNT)
EXTENT: Final = Value(shape=Shape.EXTENT)

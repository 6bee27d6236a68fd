"""What a cell would need, found out before it is run: the forecast, where it fits, and what would make it fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oomdoctor.model import jsonable
from oomdoctor.model.plan import Verdict

if TYPE_CHECKING:
    from oomdoctor.model.absence import Refused
    from oomdoctor.model.plan import Forecast, Plan
    from oomdoctor.model.session import Cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A memory that the cell is to fit into.

    Attributes:
        name: as it is called in sentences: ``cuda:0``, ``A100 80 GB``.
        total: capacity in bytes, None where it is not known.
        budget: bytes that tensors may take of it, None where that is not known.
        source: where the capacity was read, in words.
    """

    name: str
    total: int | None
    budget: int | None
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Whether the cell fits one place.

    Attributes:
        forecast: of the cell in that place, with the place's budget.
        least: what the cell needs at the least, where there is no forecast.
    """

    place: Place
    forecast: Forecast
    least: Forecast | None = None

    @property
    def verdict(self) -> Verdict:
        """Of the forecast; without one, too large where even the least is."""
        if self.forecast.peak is None and self.least is not None and self.place.budget is not None:
            return Verdict.TOO_LARGE if (self.least.peak or 0) > self.place.budget else Verdict.UNKNOWN
        return self.forecast.verdict

    @property
    def fits(self) -> bool | None:
        """True, False, or None where it is not known or too close to say."""
        return {Verdict.FITS: True, Verdict.TOO_LARGE: False}.get(self.verdict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """How large a batch may be.

    Attributes:
        now: samples in a batch as the cells stand.
        size: the largest that was forecast to fit, 0 where none was.
        forecast: of that batch; of the smallest that was forecast where ``size`` is 0.
        above: the smallest larger batch that was forecast not to fit for certain, None where none was.
        end: why nothing larger was forecast, None where the next larger batch does not fit.
        tried: how many batches were forecast.
    """

    now: int
    size: int
    forecast: Forecast
    above: int | None = None
    end: str | None = None
    tried: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemPlan:
    """A cell before it is run.

    Attributes:
        cell: its number and text.
        here: whether it fits the memory that it is planned for.
        least: the least that the cell needs, by an analytic estimate, where it could not be forecast.
        elsewhere: whether it fits well-known cards that nobody else uses, smallest first; empty without a forecast.
        batch: how large a batch may be there, or why that cannot be told.
        plan: the fixes with their prices, None where none is needed or none could be priced.
        elapsed_s: how long all of it took.
    """

    cell: Cell
    here: Fit
    elsewhere: tuple[Fit, ...]
    batch: LargestBatch | Refused
    plan: Plan | None = None
    least: Forecast | None = None
    elapsed_s: float = 0.0

    @property
    def forecast(self) -> Forecast:
        """What the cell needs where it is planned for."""
        return self.here.forecast

    @property
    def fits(self) -> bool | None:
        """True, False, or None where it is not known or too close to say."""
        return self.here.fits

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON shape of schema 1: bytes as ints, absent values null with their ``_why``."""
        return jsonable.memplan(self)

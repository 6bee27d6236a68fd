"""The reading of a dry run: its numbers, or why there are none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from oomdoctor.model.memory import ModuleMemory
from oomdoctor.model.plan import Forecast
from oomdoctor.sandbox.card import Card

Settings: TypeAlias = tuple[tuple[str, Any], ...]
"""Some of the caching allocator, ``(name, value)``."""
BASIS: Final = "dry run"
ON_CARD: Final = "as on cuda"
"""Stands in the basis where this machine has no such device."""
OUT_OF_TIME: Final = "out of time"
"""Why there is no figure of a dry run that was cut before it saw enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The outcome of one dry run.

    Attributes:
        forecast: its numbers, or why there are none.
        cost: time of the run in bytes moved (see ``cost``), comparable between dry runs of one cell only.
        left_early: whether what comes after the training was not seen, or not to its end.
        modules: what the forward of each module keeps; of the unchanged cell alone.
        is_unfit: whether there are no numbers because the change found itself unfit for the cell.
        breaks: whether there are none because the code failed, by nothing that only a dry run has.
        lacks_cuda: whether there are none because the cell asked in vain for a device of CUDA.
        otherwise: what the numbers are with other settings of the caching allocator.
    """

    forecast: Forecast
    cost: float = 0.0
    left_early: bool = False
    modules: tuple[ModuleMemory, ...] = ()
    is_unfit: bool = False
    breaks: bool = False
    lacks_cuda: bool = False
    otherwise: Mapping[Settings, Forecast] = field(default_factory=dict)

    @property
    def is_late(self) -> bool:
        """Whether the dry run was cut before it saw enough."""
        return self.forecast.refused == OUT_OF_TIME

    def priced(self, budget: int | None, unchanged_cost: float | None) -> Forecast:
        """Return the forecast for a budget, with its slowdown beside the cost of the unchanged cell's dry run.

        That is falsy where it is not known, as where a part was followed of which it is not known how large it is.
        """
        is_compared = unchanged_cost and self.cost and self.forecast.refused is None
        slowdown = round(self.cost / unchanged_cost, 4) if unchanged_cost and is_compared else None
        return replace(self.forecast, budget=budget, slowdown=slowdown)

    def with_settings(self, settings: Settings, told: Forecast) -> Forecast | None:
        """Return a forecast that this reading was told as, with other settings; None where it tells nothing of them."""
        other = self.otherwise.get(settings)
        if other is None:
            return None
        return replace(told, peak=other.peak, reserved=other.reserved, error_ratio=other.error_ratio)


def no_reading(why: str | None, *, is_unfit: bool = False, breaks: bool = False, lacks_cuda: bool = False) -> Reading:
    """Return the outcome of a dry run that has no numbers."""
    told = Forecast(basis=BASIS, refused=why or "it was ended")
    return Reading(forecast=told, is_unfit=is_unfit, breaks=breaks, lacks_cuda=lacks_cuda)


def late(timeout_s: float) -> str:
    """Return why there is no forecast where the time was over."""
    return f"the exact forecast timed out after {timeout_s:g} s"


def is_of_card(forecast: Forecast) -> bool:
    """Return whether the forecast is that of a device which this machine has not."""
    return f", {ON_CARD}" in forecast.basis


def lacked_card(forecast: Forecast) -> Card | None:
    """Return the device which this machine has not and that the forecast was made on, None where there is none."""
    return Card() if is_of_card(forecast) else None

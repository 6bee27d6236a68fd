"""What one shadow run says: a forecast, and what else whoever asked for it has to know; or why there is none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from oomdoctor.model.memory import ModuleMemory
from oomdoctor.model.plan import Forecast

BASIS: Final = "shadow run"
ON_CARD: Final = "as on "
"""Before the type of a device that this machine has not, in the basis."""
OUT_OF_TIME: Final = "out of time"
"""Why there is no figure of a shadow that was cut before it saw enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The outcome of one shadow run.

    Attributes:
        forecast: its numbers, or why there are none.
        cost: time of the run in bytes moved (see ``cost``), comparable between shadow runs of one cell only.
        left_early: whether what comes after the training was not seen, or not to its end.
        modules: what the forward of each module keeps; of the unchanged cell alone.
        is_unfit: whether there are no numbers because the change found itself unfit for the cell.
        breaks: whether there are none because the code failed, by nothing that only a shadow run has.
        lacks: type of the device that the cell asked for in vain, where that is why.
    """

    forecast: Forecast
    cost: float = 0.0
    left_early: bool = False
    modules: tuple[ModuleMemory, ...] = ()
    is_unfit: bool = False
    breaks: bool = False
    lacks: str | None = None

    @property
    def is_late(self) -> bool:
        """Whether the shadow was cut before it saw enough."""
        return self.forecast.refused == OUT_OF_TIME

    def priced(self, budget: int | None, unchanged_cost: float | None) -> Forecast:
        """Return the forecast for a budget, with its slowdown.

        Args:
            unchanged_cost: cost of the unchanged cell's shadow run; falsy if not known.
        """
        slowdown = round(self.cost / unchanged_cost, 4) if unchanged_cost and self.forecast.refused is None else None
        return replace(self.forecast, budget=budget, slowdown=slowdown)


def no_reading(why: str | None, *, is_unfit: bool = False, breaks: bool = False, lacks: str | None = None) -> Reading:
    """Return the outcome of a shadow run that has no numbers."""
    told = Forecast(basis=BASIS, refused=why or "it was ended")
    return Reading(forecast=told, is_unfit=is_unfit, breaks=breaks, lacks=lacks)


def late(timeout_s: float) -> str:
    """Return why there is no forecast where the time was over."""
    return f"not priced within {timeout_s:g} s"

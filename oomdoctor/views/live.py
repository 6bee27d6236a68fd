"""A retry while it runs, as facts: which attempt, for how long, how much memory is in use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from oomdoctor.model.sizes import format_size

if TYPE_CHECKING:
    from oomdoctor.model.case import OutcomeKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """A retry at one moment.

    Attributes:
        attempt: which one is running, 0 before the first has begun; ``most``: how many there may be.
        allocated: bytes of tensors, None where that cannot be told; ``budget``: bytes that there are for them.
        waits: whether it begins only when the forecasts are there.
        outcome: how it ended; None while it runs, and where it came to no result, as one that was interrupted.
    """

    attempt: int
    most: int
    elapsed_s: float
    allocated: int | None = None
    budget: int | None = None
    waits: bool = False
    outcome: OutcomeKind | None = None

    @property
    def sentence(self) -> str:
        """All of it in words."""
        before = "Waiting for the forecasts" if self.waits else "Going back to the cell's start"
        what = f"Attempt {self.attempt} of at most {self.most}" if self.attempt else before
        return f"{what}, {self.elapsed_s:.1f} s{self._memory()}; the kernel's interrupt button ends it."

    @property
    def end(self) -> str:
        """That it came to no result and how long it took, in words."""
        attempts = f", {self.attempt} attempt{'' if self.attempt == 1 else 's'}" if self.attempt else ""
        return f"! Ended without a result after {self.elapsed_s:.1f} s{attempts}."

    def _memory(self) -> str:
        if self.allocated is None:
            return ""
        of = "" if self.budget is None else f" of {format_size(self.budget)}"
        return f": {format_size(self.allocated)}{of} in use"

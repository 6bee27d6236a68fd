"""When a shadow run has seen enough: loops are cut once the memory has reached its steady state.

The first optimizer step allocates the optimizer's state, the second runs with it; after that every iteration is
alike. A loop over a ``DataLoader`` then just ends, so that what comes after it (an evaluation, say) is still seen;
any other loop is left by ``StopForecast``. Code without an optimizer is followed for a few batches. Limits: what comes
after a training loop that is not over a ``DataLoader`` is not seen.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

__all__ = ["Pace", "StopForecast"]

_STEPS: Final = 2
_STEPS_OF_ONE: Final = 6
"""Steps of one optimizer after which the others, which step less often, are no longer waited for."""
_IDLE_BATCHES: Final = 3
"""Batches without a backward after which a loop is taken to be an evaluation in its steady state."""
_BACKWARDS: Final = 4
"""Backward passes that are followed where no optimizer exists to step."""


class StopForecast(BaseException):
    """Leaves the shadowed cell. Not an ``Exception``, so that the user's handlers do not catch it."""


class Pace:
    """Counts optimizer steps, backward passes and batches.

    Attributes:
        optimizers: optimizers known to exist.
        ended_early: whether a loader was ended before its time.
    """

    def __init__(self, optimizers: int) -> None:
        self.optimizers = optimizers
        self.ended_early = False
        self._steps: Counter[int] = Counter()
        self._backwards = 0
        self._running: list[int] = []
        self._trained: dict[int, list[int]] = {}
        self._depth = 0

    @property
    def steady(self) -> bool:
        """Whether each optimizer that steps has stepped often enough."""
        counts = self._steps.values()
        return bool(counts) and (min(counts) >= _STEPS or max(counts) >= _STEPS_OF_ONE)

    @property
    def trains(self) -> bool:
        """Whether there is an optimizer that may yet step."""
        return self.optimizers > 0

    @property
    def share(self) -> float:
        """How many times the followed part of the training loop the whole of it is; 1 where that is not known."""
        seen = [(total, batches) for total, batches in self._trained.values() if batches and total]
        return seen[0][0] / seen[0][1] if seen else 1.0

    def stepped(self, optimizer: object) -> None:
        """Count a finished optimizer step.

        Raises:
            StopForecast: nothing new is to be expected from this loop.
        """
        was_steady = self.steady
        self._steps[id(optimizer)] += 1
        for loader in self._running:
            self._trained.setdefault(loader, [0, 0])
        if was_steady or (self.steady and not self._running):
            raise StopForecast

    def backward_begins(self) -> None:
        """Count a backward pass; those inside another, as reentrant checkpoints make them, are part of it."""
        self._depth += 1

    def backward_ended(self) -> None:
        """End what ``backward_begins`` began.

        Raises:
            StopForecast: there is no optimizer, and enough was seen.
        """
        self._depth -= 1
        if self._depth == 0:
            self._backwards += 1
            if not self.trains and self._backwards >= _BACKWARDS and not self._running:
                raise StopForecast

    def loop_begins(self, loader: int) -> None:
        """Note that the loader with this identity is being iterated over.

        Raises:
            StopForecast: it is the loader of a training loop that was seen already.
        """
        if self.steady and loader in self._trained:
            raise StopForecast
        self._running.append(loader)

    def loop_ended(self, loader: int, total: int | None, batches: int) -> None:
        """Note that the iteration is over after ``batches`` of ``total``."""
        self._running.remove(loader)
        if loader in self._trained:
            self._trained[loader] = [total or 0, batches]

    def wants_more(self, batches: int, backwards_before: int) -> bool:
        """Whether another batch would show anything new.

        Args:
            batches: how many the loop has had.
            backwards_before: ``backwards`` when the loop began.
        """
        here = self._backwards - backwards_before
        more = not self.steady and (batches < _IDLE_BATCHES or (here > 0 and (self.trains or here < _BACKWARDS)))
        self.ended_early = self.ended_early or not more
        return more or batches == 0

    @property
    def backwards(self) -> int:
        """Backward passes so far."""
        return self._backwards

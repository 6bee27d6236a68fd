"""Where a loop stands that is given parts of its batches, and what it may not do there.

The body of such a loop runs once for each part, so that what it does by itself must not add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from oomdoctor.errors import OomDoctorError
from oomdoctor.fixes._loss_graph import MEAN, check_apart, may_count, reduction

__all__ = ["Place"]


@dataclass(slots=True)
class Place:
    """Where the loop stands: which share of its batch the part at hand has, and what is still to come.

    Attributes:
        share: None outside of a loop over a known loader; ``rows``: samples of the part.
        pending: gradients of earlier parts wait for the step.
        checked: the graph of a loss was looked through.
        went_back: ``backward`` was called in this part; ``asked``: a step was.
        unfinished: loops that took parts and have not come to the end of their batches.
        factors: what sums in the loss are multiplied by.
        settings: of the optimizers, as the step of the batch's first part found them.
        gradients: as the last ``backward`` left them.
        optimizers: those of the session; ``weights``: parameters and buffers of its modules.
    """

    share: float | None = None
    rows: int = 0
    is_last: bool = True
    pending: bool = False
    checked: bool = False
    went_back: bool = False
    asked: bool = False
    unfinished: int = 0
    factors: Any = None
    settings: Any = None
    gradients: Any = None
    optimizers: Sequence[Any] = ()
    weights: Sequence[torch.Tensor] = ()

    def begin(self, start: int, end: int, rows: int) -> None:
        """Begin a part, whose samples are ``start`` to ``end`` of ``rows``."""
        self.share, self.rows, self.is_last = (end - start) / rows, end - start, end == rows
        self.went_back = self.asked = False
        if start == 0:
            self.settings = None

    def written(self) -> list[int]:
        """Return how often each weight was written to."""
        return [weight._version for weight in self.weights]

    def collected(self) -> list[tuple[int, int]]:
        """Return which tensor holds each gradient, and how often it was written to."""
        grads = (p.grad for one in self.optimizers for group in one.param_groups for p in group["params"])
        return [(id(grad), 0 if grad is None else grad._version) for grad in grads]

    def weight(self, node: Any) -> float:
        """Return what the loss that ``node`` made is multiplied by so that the parts add up to the whole.

        Raises:
            OomDoctorError: no number would do.
        """
        if self.asked:
            raise OomDoctorError("backward is called again after a step: the loop takes several for a batch")
        if self.gradients is not None and self.pending and self.gradients != self.collected():
            raise OomDoctorError("the loop changes gradients itself, and would do so for each part of a batch")
        if not self.checked:
            check_apart(node, self.rows)
            self.checked = True
        self.pending = self.went_back = True
        kind, factors = reduction(node)
        if self.factors is None and may_count(factors, self.rows):
            raise OomDoctorError("the loss is a sum that is divided or multiplied by what may be a count of samples")
        if self.factors not in {None, factors}:
            raise OomDoctorError("the loss is a sum that is multiplied otherwise in each part of a batch")
        self.factors = factors
        return self.share if kind == MEAN and self.share is not None else 1.0

    def check(self, written: list[int]) -> None:
        """Check that the body of the loop has left for the last part what is not for each.

        Raises:
            OomDoctorError: it has not.
        """
        if self.went_back and not self.asked:
            raise OomDoctorError("a part ended without a step of the optimizer: the loop accumulates already")
        if self.went_back and not self.is_last and self.written() != written:
            raise OomDoctorError("the loop writes to weights itself, and would do so for each part of a batch")

    def may_zero(self) -> bool:
        """Whether gradients may be zeroed; those of earlier parts are kept.

        Raises:
            OomDoctorError: the loop would lose gradients that no step has taken.
        """
        if self.went_back and not self.asked:
            raise OomDoctorError("gradients are zeroed between backward and the step")
        return not self.pending

    def may_step(self) -> bool:
        """Note that a step is asked for, and return whether it is taken.

        Raises:
            OomDoctorError: the settings of the optimizers are others than in the batch's first part.
        """
        if self.share is None:
            return True
        # What is set anew for each batch, by a counter of the loop, would be set for each part.
        settings = [
            value
            for one in self.optimizers
            for group in one.param_groups
            for value in group.values()
            if isinstance(value, int | float | tuple)
        ]
        if self.settings is not None and self.settings != settings:
            raise OomDoctorError("the loop sets the optimizer anew for each part of a batch, as it counts them")
        self.settings, self.asked = settings, True
        return self.is_last

    def stepped(self) -> None:
        """Note that a step was taken."""
        self.pending = False

    def check_owner(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Refuse the step of an optimizer that is not held back; called before each step of any.

        Raises:
            OomDoctorError: it is such a one.
        """
        if self.share is not None and all(optimizer is not one for one in self.optimizers):
            raise OomDoctorError(
                "an optimizer that the cell made itself steps in the loop: its steps cannot be held back"
            )

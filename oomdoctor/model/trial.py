"""What a trial says of a change: whether both programs leave the same."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What came of running the failing cell as it was and as changed, for a step or two on a few rows.

    Attributes:
        same: whether both left the same; None where that could not be found out.
        basis: what was compared, and how close it is: ``2 steps of 13 rows, up to 3e-07 of the largest value``.
        why: what differs first, and by how much; or why it could not be found out.
        beside: names that hold other rows afterwards, as those that a loop over parts leaves.
        draws: whether the changed program has drawn other random numbers.
        chosen: which of the ways to write the change it is about.
    """

    same: bool | None
    basis: str = ""
    why: str = ""
    beside: tuple[str, ...] = ()
    draws: bool = False
    chosen: int = 0

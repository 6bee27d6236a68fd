"""What is said in place of a value that could not be had."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A measurement that could not be made, with the reason in one sentence."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A change that was not made because it would not be right, with the reason in one sentence."""

    reason: str

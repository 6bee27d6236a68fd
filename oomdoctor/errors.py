"""Every error that oomdoctor raises on purpose.

OomDoctorError
├── UsageError              what a user typed cannot be used; one line, nothing was changed
│   ├── SizeError           a size that does not parse
│   └── RuleErrors          rule files with faults, all of them, each with path:line
├── ForecastError           a shadow run that could not give an answer
├── StateError              a snapshot that could not be taken or brought back
└── NotAvailable            a part of oomdoctor that this machine or this process lacks
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "Fault",
    "ForecastError",
    "NotAvailable",
    "OomDoctorError",
    "RuleErrors",
    "SizeError",
    "StateError",
    "UsageError",
]


class OomDoctorError(Exception):
    """Base of every error that oomdoctor raises on purpose."""


class UsageError(OomDoctorError):
    """Bad input: one line that says what was wrong and what is accepted."""


class SizeError(UsageError):
    """A memory size that does not parse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of one rule file."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


class RuleErrors(UsageError):
    """Rule files with faults.

    Attributes:
        faults: every fault that was found, in the order of files and lines.
    """

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(map(str, self.faults)))


class ForecastError(OomDoctorError):
    """A shadow run that could not give an answer; the text says why."""


class StateError(OomDoctorError):
    """A snapshot that could not be taken or brought back; the text says what."""


class NotAvailable(OomDoctorError):
    """Something that this machine or process lacks; the text says what."""

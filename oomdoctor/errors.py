"""Every error that oomdoctor raises on purpose.

OomDoctorError
├── UsageError              what a user typed cannot be used; one line, nothing was changed
│   └── SizeError           a size that does not parse
├── ForecastError           a run in a copy of the process that could not give an answer
├── StateError              a snapshot that could not be taken or brought back
└── NotAvailable            a part of oomdoctor that this machine or this process lacks
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "Fault",
    "ForecastError",
    "NotAvailable",
    "OomDoctorError",
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


class ForecastError(OomDoctorError):
    """A run in a copy of the process that could not give an answer; the text says why."""


class StateError(OomDoctorError):
    """A snapshot that could not be taken or brought back; the text says what."""


class NotAvailable(OomDoctorError):
    """Something that this machine or process lacks; the text says what."""

"""Every error that oomdoctor raises on purpose.

OomDoctorError
├── UsageError              what a user typed cannot be used; one line, nothing was changed
│   └── SizeError           a size that does not parse
├── ForecastError           a run in a copy of the process that could not give an answer
├── StateError              a snapshot that could not be taken or brought back
└── NotAvailable            a part of oomdoctor that this machine or this process lacks

MemoryError
└── HostMemoryPressure      host memory is about to run out: raised in the user's code, at the line that was running
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "Fault",
    "ForecastError",
    "HostMemoryPressure",
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


class HostMemoryPressure(MemoryError):
    """Host memory that is about to run out, told before the kernel ends a process.

    Attributes:
        used: bytes in use that cannot be reclaimed, of ``limit``; ``limit_name``: what sets it.
        requested: bytes that were asked for; None where memory was touched that had been mapped before.
    """

    requested: int | None = None
    used: int | None = None
    limit: int | None = None
    limit_name: str = ""

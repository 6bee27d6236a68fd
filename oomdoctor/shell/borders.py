"""The border around what is ours: a failure of it prints one line, and the user's result and traceback stay."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from oomdoctor.objects.frames import is_of_signal

_EACH_CELL: Final = frozenset({"counters", "loading", "reserve"})
"""Stages beside each cell: what a full memory does to them is told once."""


class Borders:
    """The borders of one shell.

    Attributes:
        faults: what was printed, a line each.
    """

    def __init__(self) -> None:
        self.faults: list[str] = []
        self._signalled: BaseException | None = None

    def guarded(self, stage: str, do: Callable[[], Any]) -> Any:
        """Return what ``do`` returns; None where it fails, which is printed."""
        try:
            return do()
        except Exception as exc:  # noqa: BLE001 - border: a failure of ours never hides or changes the user's
            self.fault(stage, exc)
            return None

    def fault(self, stage: str, exc: BaseException) -> None:
        """Print that a stage failed; what the handler of a signal raised in it is the program's, and kept."""
        with suppress(MemoryError):  # then there is none to tell it with either
            if is_of_signal(exc):
                self._signalled = exc
                return
            line = f"{stage}: {type(exc).__name__}: {exc}".splitlines()[0].rstrip(": ")
            is_told = stage in _EACH_CELL and isinstance(exc, MemoryError) and line in self.faults
            self.faults.append(line)
            if is_told:
                return
            print(f"oomdoctor could not finish ({line})", file=sys.stderr)

    def take_signalled(self) -> BaseException | None:
        """Return what the handler of a signal has raised in a stage of ours, once."""
        found, self._signalled = self._signalled, None
        return found

    def tell(self, fault: str) -> None:
        """Print a fault that is not ours the first time that it is met."""
        if fault not in self.faults:
            self.faults.append(fault)
            print(f"oomdoctor: {fault}", file=sys.stderr)


def quietly(do: Callable[[], Any]) -> Any:
    """Return what ``do`` returns, None where it fails. It is to be done again, which tells the fault."""
    try:
        return do()
    except Exception as exc:
        with suppress(MemoryError):
            if not is_of_signal(exc):
                return None
            raise  # there is no other time
        return None

"""The border around what is ours: a failure of it prints one line, and the user's result and traceback stay."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["Borders", "quietly"]


class Borders:
    """The borders of one shell.

    Attributes:
        faults: what was printed, a line each.
    """

    def __init__(self) -> None:
        self.faults: list[str] = []

    def guarded(self, stage: str, do: Callable[[], Any]) -> Any:
        """Return what ``do`` returns; None where it fails, which is printed."""
        try:
            return do()
        except Exception as exc:  # noqa: BLE001 - border: a failure of ours never hides or changes the user's
            self.fault(stage, exc)
            return None

    def fault(self, stage: str, exc: BaseException) -> None:
        """Print that a stage failed."""
        line = f"{stage}: {type(exc).__name__}: {exc}".splitlines()[0]
        self.faults.append(line)
        print(f"oomdoctor could not finish ({line})", file=sys.stderr)

    def tell(self, fault: str) -> None:
        """Print a fault that is not ours the first time that it is met."""
        if fault not in self.faults:
            self.faults.append(fault)
            print(f"oomdoctor: {fault}", file=sys.stderr)


def quietly(do: Callable[[], Any]) -> Any:
    """Return what ``do`` returns, None where it fails. It is to be done again, which tells the fault."""
    try:
        return do()
    except Exception:  # noqa: BLE001 - border: what is done so is done twice, and the other time tells the fault
        return None

"""What is running in a shell, so that a failure that is shown is told to be that of the cell, or of something else.

A failure is the cell's where it is shown in the cell's own context: by its code, by a task that it made, by a cell that
it runs in its turn. A callback of a widget and a thread have contexts of their own, even while a cell is running.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

__all__ = ["Run", "current"]


@dataclass(slots=True, eq=False)
class Run:
    """One run of a cell.

    Attributes:
        shell: that it runs in.
        is_retry: whether it is a further attempt of ours.
        depth: how many cells are running within one another, 1 where the cell runs its own code.
        failure: what was shown of it last: of an attempt any error, of the user's own run one that memory ran out with.
    """

    shell: Any
    is_retry: bool = False
    depth: int = 0
    failure: BaseException | None = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Have what runs in the body, and what the body starts, belong to this run."""
        token = _current.set(self)
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1
            _current.reset(token)

    def take_failure(self) -> BaseException | None:
        """Return the failure, and forget it: it holds frames."""
        failure, self.failure = self.failure, None
        return failure


_current: ContextVar[Run | None] = ContextVar("_current", default=None)


def current(shell: Any) -> Run | None:
    """Return the run of ``shell`` that the caller belongs to; None outside of every cell, or after its cell's end."""
    run = _current.get()
    return run if run is not None and run.shell is shell and run.depth else None

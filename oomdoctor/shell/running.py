"""What is running in a shell, so that a failure that is shown is told to be that of the cell, or of something else.

A failure is the cell's where it is shown in the cell's own context: by its code, by a task that it made, by a cell that
it runs in its turn. A callback of a widget and a thread have contexts of their own, even while a cell is running.

A cell that loads the extension has begun before it, so it has no run: it is known by its frame.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any


@dataclass(slots=True, eq=False)
class Run:
    """One run of a cell.

    Attributes:
        owner: the extension that saw it begin.
        is_retry: whether it is a further attempt of ours.
        depth: how many cells are running within one another, 1 where the cell runs its own code.
        failure: what was shown of it last: of an attempt any error, of the user's own run one that memory ran out with.
    """

    owner: Any
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


def current(owner: Any) -> Run | None:
    """Return the run that the caller belongs to and ``owner`` saw begin; None outside of it, or after its end."""
    run = _current.get()
    return run if run is not None and run.owner is owner and run.depth else None


def source_begun_before(runs_cells: CodeType, ours: CodeType, owner: Any) -> str | None:
    """Return the text of the cell that is running the caller and began before ``owner`` was there; None outside of one.

    Args:
        runs_cells: of the shell's method that runs a cell; ``ours``: of the method of ``owner`` that stands around it.
    """
    source: str | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is ours and frame.f_locals.get("self") is owner:
            return None
        if frame.f_code is runs_cells:
            source = str(frame.f_locals.get("raw_cell", ""))
        frame = frame.f_back
    return source

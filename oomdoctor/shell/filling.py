"""Forecasts that come after the diagnosis was shown, and are filled in.

Forecasts take seconds, which are spent in a forked copy of the kernel. The kernel's own loop listens to it between
cells and does nothing else for it than to show what has come, so it is free for the user all the while. What is forked
is the failed cell's end, and a retry goes back to its start by the transaction that the kernel keeps: no forecast, come
or not, changes what a retry does.

Whatever looks at the plan waits for the rest of it first. A cell of the user's ends it: it moves the state that the
forecasts are of, and should have the machine for itself.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from oomdoctor.forecast.planning import Planning
    from oomdoctor.model.case import Case
    from oomdoctor.shell.borders import Borders

_SERVERS: Final = ("JPY_SESSION_NAME", "COLAB_RELEASE_TAG", "VSCODE_PID")
"""Environment variables that tell of a notebook that somebody looks at. Source: `jupyter_server` sets the first for
each kernel from 2.0 on; nbclient and papermill, which run a notebook to its end, set none of them."""
_BETWEEN_S: Final = 1.0
"""Time between two displays of a plan that is not complete yet."""


def comes_later(shell: Any, setting: str) -> bool:
    """Return whether the forecasts of a failure are filled in after it was shown.

    Args:
        setting: ``OomDoctor.forecasts``.
    """
    if setting == "first" or not hasattr(shell, "kernel") or not hasattr(os, "fork"):
        return False
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return setting == "later" or any(name in os.environ for name in _SERVERS)


class Filling:
    """The plan of one failure in the making.

    Args:
        case: as far as it is known.
        kept: is told the case whenever it is another one, and when it is complete.

    Attributes:
        case: with the plan as it stands.
    """

    def __init__(self, case: Case, planning: Planning, borders: Borders, kept: Callable[[Case], None]) -> None:
        self._planning, self._borders, self._kept = planning, borders, kept
        self._show: Callable[[Case], None] | None = None
        self._shown_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self.case = self._with(case)

    @property
    def over(self) -> bool:
        """Whether the plan is as good as it gets."""
        return not self.case.plan.pending

    def begin(self, show: Callable[[Case], None]) -> None:
        """Fill in what comes, from now on.

        Args:
            show: shows the case, which was shown before, as it is now.
        """
        self._show, self._shown_s = show, time.monotonic()
        if self.over:
            self._borders.guarded("display", lambda: show(self.case))
        else:
            self._task = asyncio.get_running_loop().create_task(self._listen())

    def settle(self) -> None:
        """Wait for the rest of the plan."""
        try:
            if not self.over:
                for _ in self._planning.wait():
                    self._take()
        finally:
            self.end()

    def end(self) -> None:
        """Forecast nothing more; what has no forecast says so."""
        if not self.over:
            self._planning.cancel()
            self._take()

    async def _listen(self) -> None:
        try:
            async for _ in self._planning.listen():
                self._take()
        except Exception as exc:  # noqa: BLE001 - border: nobody awaits this task
            self._borders.fault("forecast", exc)
            self.end()

    def _take(self) -> None:
        if self.over:
            return
        self.case = self._with(self.case)
        self._kept(self.case)
        if self._show is not None and (self.over or time.monotonic() - self._shown_s > _BETWEEN_S):
            show, case = self._show, self.case
            self._borders.guarded("display", lambda: show(case))
            self._shown_s = time.monotonic()

    def _with(self, case: Case) -> Case:
        return replace(case, plan=replace(self._planning.plan, pending=not self._planning.over))

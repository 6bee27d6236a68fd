"""The forecasts of a failure, made while the kernel goes on, and shown as they come.

Limits: a copy of the kernel makes them, so there are none where processes cannot be forked.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from oomdoctor import pipeline
from oomdoctor.model.case import Case
from oomdoctor.shell.warm_up import is_watched

if TYPE_CHECKING:
    from oomdoctor.forecast.ranking import Planning
    from oomdoctor.model.plan import Plan
    from oomdoctor.shell.error_boundary import Borders
    from oomdoctor.shell.showing import Shown

_SOON_S: Final = 0.3
"""Until it is looked again whether the kernel has nothing to do."""


def may_fill_in(shell: Any) -> bool:
    """Return whether the forecasts of a failure can be filled in after it was shown."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return is_watched(shell) and hasattr(os, "fork")


class Filling:
    """The plan of one failure in the making, while the kernel goes on.

    Args:
        shown: shows the case with its plan in the place of what was shown before.
    """

    def __init__(self, case: Case, planning: Planning, borders: Borders, shown: Shown) -> None:
        self._case: Case | None = case
        self._planning, self._borders, self._shown = planning, borders, shown
        self._begun_s = time.monotonic()
        self._handler: Any = None
        self._heed()
        self._task = asyncio.get_running_loop().create_task(self._listen())

    def settle(self) -> bool:
        """Wait for the rest of the plan; return whether it came, and the user did not interrupt it."""
        why = ""
        try:
            for plan in self._planning.wait():
                self._tell(plan)
        except KeyboardInterrupt:
            why = pipeline.INTERRUPTED
        finally:
            self.end(why)
        return not why

    def _tell(self, plan: Plan) -> None:
        if self._case is not None:
            elapsed_s = time.monotonic() - self._begun_s
            self._borders.guarded("display", partial(self._shown.show_progress, plan, elapsed_s))

    def _heed(self) -> None:
        """Let an interrupt end the forecasts. Between cells the kernel ignores it, and so do the copies."""
        if self._case is None or self._handler is not None:
            return
        loop = asyncio.get_running_loop()
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a cell is still running, which it would end
            loop.call_later(_SOON_S, self._heed)
            return
        self._handler = lambda *_: loop.call_soon_threadsafe(self.end, pipeline.INTERRUPTED)
        with suppress(ValueError):  # of a thread that is not the main one
            signal.signal(signal.SIGINT, self._handler)

    def end(self, why: str = "") -> None:
        """Forecast nothing more; what has no forecast says so, and ``why``."""
        if self._case is not None:
            self._planning.cancel(why or "the forecasts were skipped")
            if self._handler is not None and signal.getsignal(signal.SIGINT) is self._handler:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            case, self._case = pipeline.record(replace(self._case, plan=self._planning.plan)), None
            self._borders.guarded("display", lambda: self._shown.update(case))

    async def _listen(self) -> None:
        try:
            async for plan in self._planning.listen():
                self._tell(plan)
        except Exception as exc:  # noqa: BLE001 - border: nobody awaits this task
            self._borders.fault("forecast", exc)
        self.end()

"""What is shown of a failure: the diagnosis, and below it the panel, whose buttons do what the user could type.

Forecasts take seconds, spent in a forked copy of the kernel: they may be filled in after the diagnosis was shown. The
kernel's loop listens to the copy between cells and shows what came. Whatever looks at the plan waits for the rest of it
first; a cell of the user's ends it, as it moves the state that the forecasts are of.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from oomdoctor import pipeline
from oomdoctor.errors import NotAvailable, OomDoctorError
from oomdoctor.model.absence import Unavailable
from oomdoctor.model.case import Case, Outcome
from oomdoctor.model.plan import Candidate

if TYPE_CHECKING:
    from oomdoctor.forecast.planning import Planning
    from oomdoctor.shell.borders import Borders
    from oomdoctor.shell.extension import Extension
    from oomdoctor.shell.retrying import OpenCase
    from oomdoctor.views.panel import Live
    from oomdoctor.views.story import Retry


_EVERY_S: Final = 0.25
"""Time between two looks at the memory while a retry runs."""


class Shown:
    """One failure on the screen: the last one, until there is another."""

    def __init__(self, extension: Extension) -> None:
        self._extension = extension
        self._number = 0
        self._diagnosis: Any = None
        self._told: dict[str, str] = {}
        self._panel: Any = None

    def show(self, case: Case) -> None:
        """Show the diagnosis and the panel."""
        from IPython.display import DisplayHandle

        from oomdoctor.views import bundle, panel

        extension, retry = self._extension, retry_of(case)
        before, extension.shown, self._number = extension.shown, self, case.number
        if before is not None:
            extension.borders.guarded("display", before.refresh)
        self._diagnosis = DisplayHandle()
        try:
            self._told = bundle(case, extension.names, retry)
        except (MemoryError, SystemError):  # there is none for a page
            self._told = {"text/plain": _brief(case)}
        self._diagnosis.display(self._told, raw=True)
        if extension.config.panel and hasattr(extension.shell, "kernel"):
            typed = extension.open is not None and extension.is_source_awaited(extension.open.session.cells.failing)
            self._panel = panel.build(case, _Doctor(self, extension, case.number), retry=retry, typed=typed)
            if self._panel is not None:
                self._panel.display()

    def update(self, case: Case) -> None:
        """Show what is known now in the place of what was."""
        self.tell_end(case)
        self.offer(case)

    def refresh(self) -> None:
        """Turn on in the panel what can be done now, and off what cannot."""
        if self._panel is not None:
            self._panel.refresh()

    def offer(self, case: Case) -> None:
        """Show in the panel what can be done after a retry that has shown a change to be wrong."""
        if self._panel is not None and case.number == self._number:
            self._panel.update(case, retry_of(case))

    def tell_end(self, case: Case) -> None:
        """Say in the diagnosis how a retry ended: what a button puts out is not in the notebook's file."""
        from oomdoctor.views import bundle

        if case.number != self._number or not hasattr(self._extension.shell, "kernel"):
            return  # another failure is shown; and a terminal cannot take back what it has printed
        told = bundle(case, self._extension.names, retry_of(case))
        if self._diagnosis is not None and told != self._told:  # to send it again would fold what the user has unfolded
            self._diagnosis.update(told, raw=True)
            self._told = told


def _brief(case: Case) -> str:
    """Return what was found, in as many lines as there are causes."""
    causes = [f"  {number}. {one.title}" for number, one in enumerate(case.findings, 1)]
    title = f"Out of memory, case {case.number}; there was no memory left to tell more"
    return "\n".join([title, case.incident.message, *causes])


def retry_of(case: Case) -> Retry:
    """Return what a retry would do now."""
    from oomdoctor.views.story import Retry

    return Retry(chosen=pipeline.admitted(case, "exact"), why=pipeline.beyond_cure(case) or "")


class _Doctor:
    """What the panel of one failure does: see ``views.panel.Doctor``."""

    def __init__(self, shown: Shown, extension: Extension, number: int) -> None:
        self._shown, self._extension, self._number = shown, extension, number

    @property
    def auto(self) -> str:
        return str(self._extension.config.auto)

    @auto.setter
    def auto(self, value: str) -> None:
        self._extension.config.auto = value

    @property
    def in_place(self) -> tuple[Candidate, ...]:
        case = self._case()
        if case is None or self._extension.healed is None:
            return ()
        return tuple(one for one in case.plan.candidates if one.label in case.outcome.fixes)

    @property
    def gone(self) -> str:
        from oomdoctor.shell.retrying import why_not_retried

        case = self._case()
        if case is None:
            return "another cell has failed since, so run this one again"
        if self._extension.open is not None or self._extension.healed is not None:
            return ""
        return why_not_retried(self._extension, case.outcome)

    def press(self, verb: str, what: int | str | None, tell: Callable[[Live], None]) -> Live | None:
        """Do what a button asks for, as if the user had typed it."""
        extension, case = self._extension, pipeline.last_case()
        if case is None or case.number != self._number:
            print("oomdoctor: these buttons are of an earlier failure: run its cell again", file=sys.stderr)
            return None
        line = f"%oomdoctor {verb}" if what is None else f"%oomdoctor {verb} {what}"
        watch = None if extension.open is None or verb in ("undo", "fit") else _Watch(extension, extension.open, tell)
        try:
            run_cell_anywhere(extension.shell, line)
        except OomDoctorError as exc:
            print(f"oomdoctor: {exc}", file=sys.stderr)
        finally:
            ended = None if watch is None else watch.end()
        told = self._case()
        if ended is not None and ended.outcome is not None and told is not None:
            extension.borders.guarded("display", lambda: self._shown.tell_end(told))
        return ended

    def _case(self) -> Case | None:
        case = pipeline.last_case()
        return case if case is not None and case.number == self._number else None


class _Watch:
    """Looks at the memory while a retry runs, on a thread of its own, as the retry has the kernel's."""

    def __init__(self, extension: Extension, opened: OpenCase, tell: Callable[[Live], None]) -> None:
        self._opened, self._tell, self._most = opened, tell, int(extension.config.attempts)
        self._before = _outcome()
        opened.attempts = 0
        self._began, self._ended = time.monotonic(), threading.Event()
        case = pipeline.last_case()
        self._budget = None if case is None else case.plan.unchanged.budget
        self._thread = threading.Thread(target=self._look, name="oomdoctor-progress", daemon=True)
        self._thread.start()

    def end(self) -> Live:
        """Look no more; return how it ended."""
        self._ended.set()
        self._thread.join()
        outcome = _outcome()
        kind = None if outcome is None or outcome is self._before else outcome.kind
        return replace(self._live(None), outcome=kind)

    def _look(self) -> None:
        while not self._ended.wait(_EVERY_S):
            allocated = self._opened.session.accelerator.read().allocated
            self._tell(self._live(None if isinstance(allocated, Unavailable) else allocated))

    def _live(self, allocated: int | None) -> Live:
        from oomdoctor.views.panel import Live

        case = pipeline.last_case()
        return Live(
            attempt=self._opened.attempts,
            most=self._most,
            elapsed_s=time.monotonic() - self._began,
            allocated=allocated,
            budget=self._budget,
            waits=case is not None and case.plan.pending,
        )


def _outcome() -> Outcome | None:
    """Return how the last failure ended: another object after each retry that came to a result."""
    case = pipeline.last_case()
    return None if case is None else case.outcome


def run_cell_anywhere(shell: Any, source: str) -> None:
    """Run ``source`` as a cell on the main thread; return when it is done.

    Raises:
        NotAvailable: the cell awaits, which a cell of its own can have it do.
    """
    if shell.should_run_async(source, transformed_cell=shell.transform_cell(source)):
        raise NotAvailable(f"a cell that awaits is not run again from here: type `{source}` in a cell of its own")
    if threading.current_thread() is threading.main_thread():
        shell.run_cell(source, store_history=False)
        return
    kernel, done = shell.kernel, threading.Event()

    async def run() -> None:
        try:
            # Before ipykernel 7 there is no lock: one request runs at a time.
            async with getattr(kernel, "_main_asyncio_lock", None) or nullcontext():
                # SIGINT raises an interrupt, as the kernel arranges for its own requests.
                before = signal.signal(signal.SIGINT, signal.default_int_handler)
                try:
                    shell.run_cell(source, store_history=False)
                finally:
                    signal.signal(signal.SIGINT, before)
        finally:
            done.set()

    context = contextvars.copy_context()
    tasks: list[asyncio.Task[None]] = []
    loop = kernel.io_loop.asyncio_loop
    loop.call_soon_threadsafe(lambda: tasks.append(loop.create_task(run())), context=context)
    done.wait()


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
        case: with the plan as it stands.
        kept: is told the case whenever it is another one, and when it is complete.
    """

    def __init__(self, case: Case, planning: Planning, borders: Borders, kept: Callable[[Case], Case]) -> None:
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

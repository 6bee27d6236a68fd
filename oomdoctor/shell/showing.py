"""What is shown of a failure: the diagnosis, and below it the panel, whose buttons do what the user could type."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from oomdoctor.errors import OomDoctorError
from oomdoctor.model.absence import Unavailable

if TYPE_CHECKING:
    from oomdoctor.model.case import Case, Outcome
    from oomdoctor.model.plan import Candidate
    from oomdoctor.shell.extension import Extension
    from oomdoctor.shell.retrying import OpenCase
    from oomdoctor.views.live import Live
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
        self._retell(case)
        if self._panel is not None:
            self._panel.update(case, retry_of(case))

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
        if case.number == self._number:
            self._retell(case)

    def _retell(self, case: Case) -> None:
        from oomdoctor.views import bundle

        if not hasattr(self._extension.shell, "kernel"):  # a terminal cannot take back what it has printed
            return
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
    from oomdoctor import pipeline
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
        from oomdoctor.shell.keeping import why_not_retried

        case = self._case()
        if case is None:
            return "another cell has failed since, so run this one again"
        if self._extension.open is not None or self._extension.healed is not None:
            return ""
        return why_not_retried(self._extension, case.outcome)

    def press(self, verb: str, number: int | None, tell: Callable[[Live], None]) -> Live | None:
        """Do what a button asks for, as if the user had typed it."""
        from oomdoctor import pipeline
        from oomdoctor.shell.anywhere import run_cell_anywhere

        extension, case = self._extension, pipeline.last_case()
        if case is None or case.number != self._number:
            print("oomdoctor: these buttons are of an earlier failure: run its cell again", file=sys.stderr)
            return None
        line = f"%oomdoctor {verb}" if number is None else f"%oomdoctor {verb} {number}"
        watch = None if extension.open is None or verb == "undo" else _Watch(extension, extension.open, tell)
        try:
            run_cell_anywhere(extension.shell, line)
        except OomDoctorError as exc:
            print(f"oomdoctor: {exc}", file=sys.stderr)
        finally:
            ended = None if watch is None else watch.end()
        if ended is not None and ended.outcome is not None:
            extension.borders.guarded("display", self._tell_end)
        return ended

    def _tell_end(self) -> None:
        case = self._case()
        if case is not None:
            self._shown.tell_end(case)

    def _case(self) -> Case | None:
        from oomdoctor import pipeline

        case = pipeline.last_case()
        return case if case is not None and case.number == self._number else None


class _Watch:
    """Looks at the memory while a retry runs, on a thread of its own, as the retry has the kernel's."""

    def __init__(self, extension: Extension, opened: OpenCase, tell: Callable[[Live], None]) -> None:
        self._opened, self._tell, self._most = opened, tell, int(extension.config.attempts)
        self._before = _outcome()
        opened.attempts = 0
        self._began, self._ended = time.monotonic(), threading.Event()
        self._budget = self._of_budget()
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
        from oomdoctor import pipeline
        from oomdoctor.views.live import Live

        case = pipeline.last_case()
        return Live(
            attempt=self._opened.attempts,
            most=self._most,
            elapsed_s=time.monotonic() - self._began,
            allocated=allocated,
            budget=self._budget,
            waits=case is not None and case.plan.pending,
        )

    def _of_budget(self) -> int | None:
        from oomdoctor import pipeline

        case = pipeline.last_case()
        return None if case is None else case.plan.unchanged.budget


def _outcome() -> Outcome | None:
    """Return how the last failure ended: another object after each retry that came to a result."""
    from oomdoctor import pipeline

    case = pipeline.last_case()
    return None if case is None else case.outcome

"""What is shown of a failure: the diagnosis, and below it the panel, whose buttons do what the user could type.

Forecasts take seconds, spent in a forked copy of the kernel. Where somebody looks at the notebook they are filled in
after the diagnosis was shown: the kernel's loop listens to the copy between cells. Whatever looks at the plan waits for
the rest of it first; a cell of the user's ends it, as it moves the state that the forecasts are of.
"""

from __future__ import annotations

import asyncio
import contextvars
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from oomdoctor import pipeline
from oomdoctor.errors import NotAvailable, OomDoctorError
from oomdoctor.language import say
from oomdoctor.model.case import Case, OutcomeKind
from oomdoctor.model.plan import Candidate, Plan
from oomdoctor.shell.open_case import why_not_retried
from oomdoctor.shell.warm_up import is_watched

if TYPE_CHECKING:
    from oomdoctor.shell.extension import Extension
    from oomdoctor.views.outcome import Retry


_SOON_S: Final = 0.3
_ABOVE: Final = "▲ <strong>Out of memory</strong>: the diagnosis is above this traceback."
_EMPTY: Final = {"text/plain": "", "text/html": ""}
_LOOKING: Final = {
    "text/plain": "Out of memory: `%oomdoctor why` tells more",
    "text/html": "<strong>Out of memory</strong>: looking at what holds it…",
}


def output_place(told: dict[str, str]) -> Any:
    """Return a place in the output of the cell that runs, with what stands there until more is known."""
    from IPython.display import DisplayHandle

    handle = DisplayHandle()
    handle.display(told, raw=True)
    return handle


class Shown:
    """One failure on the screen: the last one, until there is another.

    ``tells_end``: whether the answer is going to tell how a retry has ended, so that nothing else has to.
    """

    def __init__(self, extension: Extension) -> None:
        self._extension = extension
        self._number = 0
        self._places: tuple[Any, ...] = ()
        self._told: list[dict[str, str]] = [{}, {}]
        self._panel: Any = None
        self._below: tuple[Any, ...] = ()
        self._offers_below = False
        self.tells_end = False
        self._outputs: Sequence[Mapping[str, Any]] | None = None

    @classmethod
    def announced(cls, extension: Extension) -> Shown:
        """Hold the places of the answer, its controls, its details and what they put out, above the traceback."""
        shown = cls(extension)
        try:
            looking = {kind: say(text) for kind, text in _LOOKING.items()}
            for told in (looking, _EMPTY, _EMPTY, _EMPTY):
                shown._places = (*shown._places, output_place(told))
        except BaseException:
            shown.withdraw()
            raise
        return shown

    def answer_below(self, case: Case) -> None:
        """Say and offer the same below the traceback: a front end that scrolls to the next cell shows its end.

        One that shows text, and does not change what it has shown, has the answer here.
        """
        from oomdoctor.views import in_brief

        is_healed = case.outcome.kind is OutcomeKind.HEALED
        told = _EMPTY if is_healed else {"text/plain": in_brief(case, retry_of(case)), "text/html": say(_ABOVE)}
        if not self._below:
            self._below = output_place(told), output_place(_EMPTY)
        else:
            self._below[0].update(told, raw=True)
        if is_healed == self._offers_below and self._panel is not None:
            self._offers_below = not is_healed
            if is_healed:
                self._below[1].update(_EMPTY, raw=True)
            else:
                self._panel.display(self._below[1], again=True)

    def withdraw(self) -> None:
        """Leave the places that were held empty, unless something was told there since: there is nothing to tell."""
        if not any(self._told):
            places, self._places = self._places, ()
            for place in places:
                place.update(_EMPTY, raw=True)

    def show_with(self, send_traceback: Callable[[], None], case: Case) -> None:
        """Show the diagnosis and a traceback that was held back: the answer first where somebody looks at a page."""
        comes_first = is_watched(self._extension.shell)
        if not comes_first:
            send_traceback()
        try:
            self._extension.borders.guarded("display", lambda: self.show(case))
        finally:
            if comes_first:
                send_traceback()
                self._extension.borders.guarded("display", partial(self.answer_below, case))

    def show(self, case: Case) -> None:
        """Show the diagnosis and the panel."""
        was_announced = bool(self._places)
        extension, retry = self._extension, retry_of(case)
        before, extension.shown, self._number = extension.shown, self, case.number
        if before is not None:
            extension.borders.guarded("display", before.refresh)
        self._tell(case, retry)
        if extension.config.panel and hasattr(extension.shell, "kernel"):
            from oomdoctor.views import panel

            typed = extension.open is not None and extension.is_source_awaited(extension.open.session.cells.failing)
            self._panel = panel.build(case, _Doctor(self, extension, case.number), retry=retry, typed=typed)
            if self._panel is not None:
                self._panel.display(self._places[1] if len(self._places) > 1 else None)
        if was_announced:  # so that the traceback stands below it already
            self.answer_below(case)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Have the answer itself tell how what runs in the body ends, where there is a page to tell it on."""
        self.tells_end = len(self._places) > 1
        try:
            yield
        finally:
            self.tells_end = False

    def _tell(self, case: Case, retry: Retry) -> None:
        """Show what is known now; what is shown already is not sent again, as that folds what the user has unfolded."""
        from oomdoctor.views import answer_bundles, bundle

        is_page = len(self._places) > 1 if self._places else is_watched(self._extension.shell)
        told: list[dict[str, str]] = []
        try:
            is_brief = not hasattr(self._extension.shell, "kernel") and self._extension.names is None
            shown = partial(bundle, case, self._extension.names, retry, is_brief=is_brief)
            told += answer_bundles(case, retry) if is_page else [shown()]
        except (MemoryError, SystemError):  # there is none for a page
            told = [{"text/plain": _brief(case)}]
        if not self._places:
            self._places = tuple(map(output_place, [told[0], _EMPTY, *told[1:], _EMPTY] if is_page else told))
        else:
            for place, new, before in zip(self._places[::2], told, self._told, strict=False):
                if new != before:
                    place.update(new, raw=True)
        self._told = [*told, {}][:2]
        if self._below:
            self.answer_below(case)

    def update(self, case: Case) -> None:
        """Show what is known now in the place of what was."""
        self.tell_end(case)
        self.offer(case)

    def keep(self, outputs: Sequence[Mapping[str, Any]]) -> None:
        """Keep in the notebook what a button has put out, which is not saved with the button; soon, and all at once."""
        is_waiting, self._outputs = self._outputs is not None, outputs
        if len(self._places) > 1 and not is_waiting:
            try:
                asyncio.get_running_loop().call_later(_SOON_S, self._keep)
            except RuntimeError:
                self._keep()

    def _keep(self) -> None:
        from oomdoctor.views import kept

        outputs, self._outputs = self._outputs, None
        if outputs is not None:
            told = kept(outputs)
            self._extension.borders.guarded("display", lambda: self._places[-1].update(told, raw=True))

    def refresh(self) -> None:
        """Turn on in the panel what can be done now, and off what cannot."""
        if self._panel is not None:
            self._panel.refresh()

    def offer(self, case: Case) -> None:
        """Show in the panel what can be done now."""
        if self._panel is not None and case.number == self._number:
            self._panel.update(case, retry_of(case))

    def show_progress(self, plan: Plan, elapsed_s: float) -> None:
        """Show in the panel how far the forecasts are."""
        if self._panel is not None:
            self._panel.show_progress(plan, elapsed_s)

    def tell_end(self, case: Case) -> None:
        """Say in the diagnosis how a retry ended: what a button puts out is not in the notebook's file."""
        if case.number != self._number or not hasattr(self._extension.shell, "kernel"):
            return  # another failure is shown; and a terminal cannot take back what it has printed
        if self._places:
            self._tell(case, retry_of(case))


def _brief(case: Case) -> str:
    """Return what was found, in as many lines as there are causes."""
    causes = [f"  {number}. {one.title}" for number, one in enumerate(case.findings, 1)]
    title = say(f"Out of memory, case {case.number}; there was no memory left to tell more")
    return "\n".join([title, case.incident.message, *causes])


def retry_of(case: Case) -> Retry:
    """Return what a retry would do now."""
    from oomdoctor.views.outcome import Retry

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
    def ended(self) -> str:
        from oomdoctor.views.outcome import aftermath

        case = self._case()
        return "" if case is None or case.outcome.kind is OutcomeKind.OFFERED else aftermath(case).title

    @property
    def gone(self) -> str:
        case = self._case()
        if case is None:
            return "another cell has failed since: run this one again"
        if self._extension.open is not None:
            return self._extension.open.gone
        if self._extension.healed is not None:
            return ""
        return why_not_retried(self._extension, case.outcome)

    def report(self, *, with_code: bool) -> str:
        """Return the environment and the case as JSON."""
        from oomdoctor.views.mime import issue_report

        case = next(one for one in pipeline.cases() if one.number == self._number)
        return issue_report(case, with_code=with_code)

    def skip(self) -> None:
        """Forecast nothing more."""
        if self._extension.filling is not None and self._case() is not None:
            self._extension.filling.end()

    def keep(self, outputs: Sequence[Mapping[str, Any]]) -> None:
        """Keep what a button has put out."""
        self._extension.borders.guarded("display", lambda: self._shown.keep(outputs))

    def press(self, verb: str, what: int | str | None = None) -> None:
        """Do what a button asks for, as if the user had typed it."""
        extension = self._extension
        if self._case() is None:
            print(say("oomdoctor: these buttons are of an earlier failure: run its cell again"), file=sys.stderr)
            return
        try:
            with self._shown.telling():
                run_cell_anywhere(extension.shell, " ".join(map(str, filter(None, ("%oomdoctor", verb, what)))))
        except OomDoctorError as exc:
            print(f"oomdoctor: {say(str(exc))}", file=sys.stderr)
        finally:
            case = self._case()
            if case is not None:
                extension.borders.guarded("display", lambda: self._shown.tell_end(case))

    def _case(self) -> Case | None:
        case = pipeline.last_case()
        return case if case is not None and case.number == self._number else None


def run_cell_anywhere(shell: Any, source: str) -> None:
    """Run ``source`` as a cell on the main thread and wait for it; ``NotAvailable`` where it awaits."""
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

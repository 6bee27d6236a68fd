"""The controls under a diagnosis: retry with a fix, look at its diff, undo.

ipywidgets are imported when a panel is built; ``controls`` has its parts. The panel holds no facts of its own, so
nothing is lost where widgets are not shown. What a button does is the caller's (see ``Doctor``), which may be called on
the main thread or on a subshell's, and whose output is captured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from oomdoctor.language import say
from oomdoctor.model.sizes import format_size
from oomdoctor.views.controls import (
    FITTING,
    REST,
    WRAPPING,
    Buttons,
    Part,
    Row,
    live,
    paragraph,
    to_copy,
    working,
)
from oomdoctor.views.document import FixRow
from oomdoctor.views.html import part
from oomdoctor.views.outcome import Retry, changing, why_nothing
from oomdoctor.views.prices import fix_rows, offered

if TYPE_CHECKING:
    from oomdoctor.model.case import Case
    from oomdoctor.model.plan import Candidate, Plan

_AUTO: Final = (
    ("ask me", "off"),
    ("retry by itself, results kept", "exact"),
    ("retry by itself, any change", "any"),
)
_CHANGES: Final = "The best that changes them, never applied by itself:"
_UNDO: Final = "Undo what the last retry changed"
_SKIP: Final = "Stop the forecasts: fixes without one keep their estimates"
_NARROW: Final = {"width": "auto", "max_width": "14em"}
_SAVED: Final = {"text/plain": "", "text/html": ""}
"""What stands in the place of controls that are not live: nothing, as the diagnosis has the commands."""


class Doctor(Protocol):
    """What the panel of one failure has done and looked up for it; ``auto`` is the setting of that name."""

    auto: str

    @property
    def in_place(self) -> tuple[Candidate, ...]:
        """What the cell was healed with and can be taken back, in the dose that it had."""

    @property
    def ended(self) -> str:
        """How the last retry ended, in one sentence; nothing where there was none."""

    @property
    def gone(self) -> str:
        """Why the cell cannot be run again any more; nothing while it can, or while its change can be taken back."""

    def report(self, *, with_code: bool) -> str:
        """Return what a report of a fault needs: the environment and the case as JSON, without the user's code."""

    def skip(self) -> None:
        """Forecast nothing more: what has no forecast keeps its estimate."""

    def keep(self, outputs: Sequence[Mapping[str, Any]]) -> None:
        """Keep in the notebook what a button has put out, in the form that notebooks have."""

    def press(self, verb: str, what: int | str | None = None) -> None:
        """Do ``fix`` with the fix of a number, ``fit`` with a size, ``retry``, ``undo``."""


def build(case: Case, doctor: Doctor, *, retry: Retry | None = None, typed: bool = False) -> Panel | None:
    """Return the panel for ``case``, None where ipywidgets is not installed or there is nothing to press.

    Args:
        typed: whether the cell can be run again only by a command that is typed, as one that awaits.
    """
    try:
        import ipywidgets
    except ImportError:
        return None
    if not case.plan.pending and not any(row.apply or row.diff for row in fix_rows(case.plan)):
        return None
    panel = Panel(ipywidgets, doctor, typed=typed)
    panel.update(case, retry)
    return panel


class Panel:
    """The controls of one failure; ``box`` is the widget."""

    def __init__(self, widgets: Any, doctor: Doctor, *, typed: bool) -> None:
        self._widgets, self._doctor, self._typed = widgets, doctor, typed
        self._buttons = Buttons(widgets)
        self._rows: list[Row] = []
        self._has_best, self._waits, self._fits, self._said, self._was_in_place = False, "", "", "", False
        again = working("the best fix")
        self._best = self._buttons.add("Fix it", "", lambda: self._press("retry"), again)
        self._undo = self._buttons.add("Undo", "", lambda: self._press("undo"), "⏳ The change is being undone.")
        self._fit = widgets.Text(
            description=say("Fit in"),
            placeholder=say("at most, as 11GiB"),
            continuous_update=False,
            layout=_NARROW,
        )
        self._fit.observe(lambda _: self._fit_in(), "value")
        self._buttons.output.observe(lambda change: doctor.keep(change["new"]), "outputs")
        self._skip = widgets.Button(description=say("Skip forecasts"), tooltip=say(_SKIP), layout=FITTING)
        self._skip.on_click(lambda _: doctor.skip())
        self._why, self._now, self._note = widgets.HTML(layout=REST), widgets.HTML(layout=REST), self._buttons.status
        self._leading: tuple[Any, ...] = ()
        self._others = Part(widgets, "Other fixes", "What else may help, and settings")
        first = widgets.HTML(part("inline", "This cell awaits: type `%oomdoctor retry` in a cell of its own."))
        self._first = first if typed else self._best
        report = self._reporting()
        settings = widgets.HBox([self._fit, self._auto(), report.button], layout=WRAPPING)
        self._settings = widgets.VBox([settings, report.box])
        self._lead = widgets.HBox(layout=WRAPPING)
        self._again = widgets.VBox([self._lead, self._note])
        self._again.add_class("oomdoctor-again")
        self.box = widgets.VBox()
        self.box.add_class("oomdoctor-panel")

    def display(self, place: Any = None, *, again: bool = False) -> None:
        """Show it, in a ``place`` that was held for it; where no kernel runs, nothing is seen of it.

        Seen ``again``, it is only the first button, its sentence and how it goes on.
        """
        from IPython.display import display

        box = self._again if again else self.box
        made = getattr(box, "_repr_mimebundle_", None)  # ipywidgets 7 has none, and displays itself
        if made is None:
            display(box)
        elif place is None:
            display({**made(), **_SAVED}, raw=True)
        else:
            place.update({**made(), **_SAVED}, raw=True)

    def update(self, case: Case, retry: Retry | None = None) -> None:
        """Show the controls for what is known of ``case`` now."""
        retry, pending = retry or Retry.of(case.plan), case.plan.pending
        self._has_best, self._waits = pending or bool(retry.chosen), say("Forecasts are running.") if pending else ""
        self._best.tooltip = say("Wait for the forecasts, then run the cell again" if pending else _best(case, retry))
        self._why.value = "" if pending else paragraph(part("inline", self._best.tooltip))
        budget = case.plan.unchanged.budget
        self._fits = self._fit.value = "" if budget is None else format_size(budget)
        other = changing(case.plan) if not (pending or retry.chosen or retry.why) else None
        self._fill(case.plan, retry.chosen[0] if retry.chosen else None, other)
        self.refresh()

    def show_progress(self, plan: Plan, elapsed_s: float) -> None:
        """Show how many fixes have a forecast by now, and the best that is known so far."""
        made = sum(one.forecast.peak is not None and one.forecast.estimated is None for one in plan.candidates)
        best = Retry.of(plan).chosen[:1]
        self._waits = say(f"Forecasts: {made} of {len(plan.candidates)} fixes, {elapsed_s:.0f} s.")
        self._note.value = live(self._waits)
        self._why.value = paragraph("".join(part("inline", f"Best so far: {offered(one)}") for one in best))

    def refresh(self) -> None:
        """Turn on what can be done now: a healed cell is run again only after its change was taken back."""
        in_place, gone = self._doctor.in_place, self._doctor.gone
        can_retry = not in_place and not gone
        if in_place or self._was_in_place:
            self._said = self._doctor.ended if in_place else ""
        self._was_in_place = bool(in_place)
        told = f"Retries are off: {gone}." if gone else self._waits or self._said
        self._note.value = live(part("inline", told)) if told else ""
        self._undo.tooltip = say(_UNDO if in_place else "There is nothing to undo")
        self._undo.layout.display = "" if in_place else "none"
        self._best.layout.display = "none" if in_place else ""
        self._best.button_style = "primary" if can_retry and self._has_best else ""
        self._buttons.enable(self._undo, enabled=bool(in_place))
        self._buttons.enable(self._best, enabled=self._has_best and can_retry)
        self._buttons.enable(self._fit, enabled=bool(self._fits) and not self._waits and can_retry)
        for row in self._rows:
            row.refresh(in_place, can_retry=can_retry)
        leading = [row.fix for row in self._rows if row.leads]
        others = [offered(one) for one in in_place if one.fix not in leading]
        self._now.value = paragraph(f"{say('✓ in place: ')}{part('inline', others[0])}") if others else ""
        self._lead.children = (self._now,) if others else self._leading

    def _fill(self, plan: Plan, best: Candidate | None, other: Candidate | None) -> None:
        """Show what concerns the best fix at once, and a row for each other one where it is asked for.

        ``other`` is the best of those that change results, where none that keeps them is to be tried.
        """
        press = None if self._typed else partial(self._press, "fix")
        before = f"{why_nothing(plan)} {_CHANGES}"

        def made(row: FixRow, one: Candidate) -> Row:
            place: dict[str, Any] = {"is_best": one is best, "before": before if one is other else ""}
            return Row(self._widgets, row.number, one, plan, self._buttons, press, **place)

        rows = zip(fix_rows(plan), plan.candidates, strict=True)
        self._rows = [made(row, one) for row, one in rows if row.apply or row.diff]
        first = next((row for row in self._rows if row.leads), None)
        others = [row.box for row in self._rows if row is not first]
        name = f"Other fixes ({len(others)})" if others else "Settings"
        self._others.show(name, [*others, self._settings])
        change = [] if first is None else [first.change.button]
        skip = [self._skip] if plan.pending else []
        controls = [*change, *skip, self._others.button, self._undo, self._note]
        parts = [] if first is None else [first.change.box]
        pressed = self._first if first is None or first.is_best else first.pressed
        self._leading = (pressed, self._why if first is None else first.text)
        self._lead.children = self._leading
        self.box.children = (
            self._lead,
            self._widgets.HBox(controls, layout=WRAPPING),
            *parts,
            self._others.box,
            self._buttons.output,
        )

    def _auto(self) -> Any:
        chosen = self._widgets.Dropdown(
            options=[(say(name), value) for name, value in _AUTO],
            value=self._doctor.auto,
            description=say("Next time"),
            style={"description_width": "initial"},
        )

        def choose(change: Any) -> None:
            self._doctor.auto = change["new"]
            self._note.value = part("inline", f"`%oomdoctor auto {self._doctor.auto}` is set.")

        chosen.observe(choose, "value")
        return chosen

    def _reporting(self) -> Part:
        """Return what is to be copied into an issue, made when it is asked for."""
        ticked = self._widgets.Checkbox(description=say("with my code"), indent=False)
        name, tooltip = "Copy report", "Environment and case as JSON, for an issue"

        def make(_: Any = None) -> None:
            text = self._doctor.report(with_code=ticked.value)
            made.box.children = (ticked, to_copy(self._widgets, "Report", text))

        ticked.observe(make, "value")
        made = Part(self._widgets, name, tooltip, [ticked], make)
        return made

    def _fit_in(self) -> None:
        if self._fit.value != self._fits:  # which is what the plan is for already
            size = self._fit.value.replace(" ", "")
            self._buttons.press(self._fit, lambda: self._press("fit", size), "⏳ Forecasts are running.")

    def _press(self, verb: str, what: int | str | None = None) -> None:
        fits, was_healed, self._said = self._fits, bool(self._doctor.in_place), ""
        self._doctor.press(verb, what)
        self._was_in_place = bool(self._doctor.in_place)
        if verb == "fit" and self._fits != fits:
            self._said = f"The fixes are for {self._fits} now."
        elif was_healed and not self._doctor.in_place:
            self._said = "Undone: the cell can be run again."
        else:
            self._said = self._doctor.ended
        self.refresh()


def _best(case: Case, retry: Retry) -> str:
    if retry.chosen:
        first = retry.chosen[0]
        certain = "" if first.forecast.fits else ", which is not certain to fit"
        return f"Run the cell again with fix {case.plan.number(first)}{certain}"
    return retry.why or why_nothing(case.plan)

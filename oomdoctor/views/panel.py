"""The controls under a diagnosis: retry with a fix, look at its diff, undo.

Only core ipywidgets are used, 7.7 or 8, as other frontends than JupyterLab show no others; they are imported when a
panel is built. The panel holds no facts of its own, so nothing is lost where widgets are not shown. What a button
does is the caller's (see ``Doctor``), which may be called on the main thread or on a subshell's, and whose output is
captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any, Final, Protocol

from oomdoctor.language import say
from oomdoctor.model.sizes import format_size
from oomdoctor.model.unavailable import Refused
from oomdoctor.views.diagnosis import Retry
from oomdoctor.views.document import FixRow
from oomdoctor.views.html import part
from oomdoctor.views.prices import fix_row, fix_rows, offered

if TYPE_CHECKING:
    from oomdoctor.model.case import Case
    from oomdoctor.model.plan import Candidate, Forecast, Plan

_AUTO: Final = (
    ("ask me", "off"),
    ("retry by itself, results kept", "exact"),
    ("retry by itself, any change", "any"),
)
_UNDO: Final = "Take back what the last retry changed"
_SKIP: Final = "Go on with what is known: what has no forecast yet keeps its estimate"
_WRAPPING: Final = {"flex_flow": "row wrap", "align_items": "center"}
"""The layout of a row that breaks where the screen is narrow."""
_FITTING: Final = {"width": "auto", "min_width": "7em"}
"""A button as wide as its name: the width that ipywidgets gives leaves no room for a dose."""
_REST: Final = {"flex": "1 1 16em", "width": "auto"}
"""What takes the rest of a line."""
_NARROW: Final = {"width": "auto", "max_width": "14em"}
_DIFF: Final = (
    "font-family:var(--jp-code-font-family, var(--vscode-editor-font-family, monospace));overflow-x:auto;"
    "white-space:pre;line-height:1.3;color:inherit;background:none"
)
_SAVED: Final = {"text/plain": "", "text/html": ""}
"""What stands in the place of controls that are not live: nothing, as the diagnosis has the commands."""


class Doctor(Protocol):
    """What the panel of one failure has done and looked up for it.

    Attributes:
        auto: the setting of that name.
    """

    auto: str

    @property
    def in_place(self) -> tuple[Candidate, ...]:
        """What the cell was healed with and can be taken back, in the dose that it had."""

    @property
    def gone(self) -> str:
        """Why the cell cannot be run again any more; nothing while it can, or while its change can be taken back."""

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
        self._has_best, self._waits, self._fits = False, "", ""
        self._best = self._buttons.add(say("Fix it"), "", lambda: self._press("retry"))
        self._undo = self._buttons.add(say("Undo"), "", lambda: self._press("undo"))
        self._fit = widgets.Text(
            description=say("Fit in"),
            placeholder=say("at most, as 11GiB"),
            continuous_update=False,
            layout=_NARROW,
        )
        self._fit.observe(lambda _: self._fit_in(), "value")
        self._buttons.output.observe(lambda change: doctor.keep(change["new"]), "outputs")
        self._skip = widgets.Button(description=say("Skip forecasts"), tooltip=say(_SKIP), layout=_FITTING)
        self._skip.on_click(lambda _: doctor.skip())
        self._why, self._note = widgets.HTML(layout=_REST), widgets.HTML()
        self._others = Part(widgets, "Other fixes", say("What else may help, and settings"))
        first = widgets.HTML(part("inline", "This cell awaits: type `%oomdoctor retry` in a cell of its own."))
        self._first = first if typed else self._best
        self._settings = widgets.HBox([self._fit, self._auto()], layout=_WRAPPING)
        self.box = widgets.VBox()
        self.box.add_class("oomdoctor-panel")

    def display(self, place: Any = None) -> None:
        """Show it, in a ``place`` that was held for it; where no kernel runs, nothing is seen of it."""
        from IPython.display import display

        made = getattr(self.box, "_repr_mimebundle_", None)  # ipywidgets 7 has none, and displays itself
        if made is None:
            display(self.box)
        elif place is None:
            display({**made(), **_SAVED}, raw=True)
        else:
            place.update({**made(), **_SAVED}, raw=True)

    def update(self, case: Case, retry: Retry | None = None) -> None:
        """Show the controls for what is known of ``case`` now."""
        retry, pending = retry or Retry.of(case.plan), case.plan.pending
        self._has_best, self._waits = pending or bool(retry.chosen), say("Forecasts are running.") if pending else ""
        self._best.tooltip = say("Wait for the forecasts, then run the cell again" if pending else _best(case, retry))
        self._why.value = "" if pending else _told(part("inline", self._best.tooltip))
        budget = case.plan.unchanged.budget
        self._fits = self._fit.value = "" if budget is None else format_size(budget)
        self._fill(case.plan, retry.chosen[0] if retry.chosen else None)
        self.refresh()

    def show_progress(self, plan: Plan, elapsed_s: float) -> None:
        """Show how many fixes have a forecast by now, and the best that is known so far."""
        made = sum(one.forecast.peak is not None and one.forecast.estimated is None for one in plan.candidates)
        best = Retry.of(plan).chosen[:1]
        self._waits = say(f"Forecasts: {made} of {len(plan.candidates)} fixes, {elapsed_s:.0f} s.")
        self._note.value = f'<span role="status">{self._waits}</span>'
        self._why.value = _told("".join(part("inline", f"Best so far: {offered(one)}") for one in best))

    def refresh(self) -> None:
        """Turn on what can be done now: a healed cell is run again only after its change was taken back."""
        in_place, gone = self._doctor.in_place, self._doctor.gone
        can_retry = not in_place and not gone
        self._note.value = part("inline", f"Retries are off: {gone}.") if gone else self._waits
        self._undo.tooltip = say(_UNDO if in_place else "There is nothing that can be taken back")
        self._undo.layout.display = "" if in_place else "none"
        self._best.button_style = "primary" if can_retry else ""
        self._buttons.enable(self._undo, enabled=bool(in_place))
        self._buttons.enable(self._best, enabled=self._has_best and can_retry)
        self._buttons.enable(self._fit, enabled=bool(self._fits) and not self._waits and can_retry)
        for row in self._rows:
            row.refresh(in_place, can_retry=can_retry)

    def _fill(self, plan: Plan, best: Candidate | None) -> None:
        """Show what concerns the best fix at once, and a row for each other one where it is asked for."""
        press = None if self._typed else partial(self._press, "fix")
        self._rows = [
            Row(self._widgets, row.number, candidate, plan.unchanged, self._buttons, press, is_best=candidate is best)
            for row, candidate in zip(fix_rows(plan), plan.candidates, strict=True)
            if row.apply or row.diff
        ]
        first = next((row for row in self._rows if row.is_best), None)
        others = [row.box for row in self._rows if row is not first]
        name = f"Other fixes ({len(others)})" if others else "Settings"
        self._others.show(name, [*others, self._settings])
        change = [] if first is None else [first.change.button]
        skip = [self._skip] if plan.pending else []
        controls = [*change, *skip, self._others.button, self._undo, self._note]
        parts = [] if first is None else [first.change.box]
        self.box.children = (
            self._widgets.HBox([self._first, self._why if first is None else first.text], layout=_WRAPPING),
            self._widgets.HBox(controls, layout=_WRAPPING),
            *parts,
            self._others.box,
            self._buttons.output,
        )

    def _auto(self) -> Any:
        """Return the choice of what is done by itself from now on."""
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

    def _fit_in(self) -> None:
        if self._fit.value != self._fits:  # which is what the plan is for already
            self._buttons.press(self._fit, lambda: self._press("fit", self._fit.value.replace(" ", "")))

    def _press(self, verb: str, what: int | str | None = None) -> None:
        self._doctor.press(verb, what)
        self.refresh()


def _best(case: Case, retry: Retry) -> str:
    """Return what the button for the best fix does."""
    if retry.chosen:
        first = retry.chosen[0]
        certain = "" if first.forecast.fits else ", which is not certain to fit"
        return f"Run the cell again with fix {case.plan.candidates.index(first) + 1}{certain}"
    return retry.why or "No fix that keeps the results is forecast to fit"


class Part:
    """What is shown below a button that is pressed, and hidden again by it."""

    def __init__(self, widgets: Any, name: str, tooltip: str, children: Sequence[Any] = ()) -> None:
        self.button = widgets.Button(description=say(name), tooltip=tooltip, layout=_FITTING)
        self.box = widgets.VBox(children, layout={"display": "none"})
        self._name = name
        self.button.on_click(lambda _: self._toggle())

    @property
    def is_open(self) -> bool:
        """Whether it is shown."""
        return bool(self.box.layout.display != "none")

    def show(self, name: str, children: Sequence[Any]) -> None:
        """Exchange what is in it, and how its button is called."""
        self._name, self.box.children = name, tuple(children)
        self._rename()

    def _toggle(self) -> None:
        self.box.layout.display = "none" if self.is_open else ""
        self._rename()

    def _rename(self) -> None:
        shows = self._name.removeprefix("Show ")
        self.button.description = say(f"Hide {shows[0].lower()}{shows[1:]}" if self.is_open else self._name)


class Row:
    """The controls of one fix.

    Args:
        retry: runs the cell again with the fix of a number; None where buttons cannot run it.
        is_best: whether a retry tries it first, which a button of its own does.
    """

    def __init__(
        self,
        widgets: Any,
        number: int,
        candidate: Candidate,
        unchanged: Forecast,
        buttons: Buttons,
        retry: Callable[[int], None] | None,
        *,
        is_best: bool,
    ) -> None:
        self._widgets, self._number, self._unchanged, self._buttons = widgets, number, unchanged, buttons
        self._candidate, self._in_place, self.is_best = candidate, False, is_best
        self.text = widgets.HTML(self._label(), layout=_REST if is_best else {"width": "auto"})
        self._run: Any = None
        row, controls = self._row(), []
        if row.apply and retry is None:
            controls.append(widgets.HTML(part("inline", f"`{row.apply}`")))
        elif row.apply and retry is not None:
            self._run = buttons.add(
                say(f"Retry with {number}"), say(f"Run the cell again: {row.title}"), lambda: retry(number)
            )
            controls.append(self._run)
        name = "Show change" if is_best else f"Show change {number}"
        self.change = Part(widgets, name, say(f"Diff: {row.title}"), self._change())
        if row.diff:  # to open it runs nothing, so the other buttons stay as they are
            controls.append(self.change.button)
        self.box = widgets.VBox([self.text, widgets.HBox(controls, layout=_WRAPPING), self.change.box])

    def refresh(self, in_place: Sequence[Candidate], *, can_retry: bool) -> None:
        """Show whether the cell was healed with it: then its change of the source matters, in the dose that it had.

        Args:
            can_retry: whether the cell can be run again now.
        """
        own = next((one for one in in_place if one.fix == self._candidate.fix), None)
        self._in_place = own is not None
        if own is not None and own.dose != self._candidate.dose:
            self._candidate = own
            self.change.box.children = tuple(self._change())
        self.text.value = self._label()
        self.change.button.button_style = "primary" if self._in_place else ""
        if self._run is not None:
            self._buttons.enable(self._run, enabled=can_retry)

    def _label(self) -> str:
        """Return the fix as HTML: what it is called, whether it fits, what it keeps and what it costs."""
        row, told = self._row(), part("inline", offered(self._candidate))
        if self.is_best:
            return _told(f"{say('✓ in place: ') if self._in_place else ''}{told}")
        mark = say("✓ in place" if self._in_place else row.verdict_text)
        notes = "".join(f"<br><small>{part('inline', note)}</small>" for note in row.notes)
        return _told(f"<b>{row.number}</b> {told} <small>{escape(mark)}</small>{notes}")

    def _row(self) -> FixRow:
        return fix_row(self._number, self._candidate, self._unchanged)

    def _change(self) -> list[Any]:
        """Return the change of the source as a diff, and the command that puts the changed cell into the next.

        A callback cannot put a cell into the notebook: what it asks for would ride on the reply to another cell, and
        could overwrite that one.
        """
        widgets, patch = self._widgets, self._candidate.patch
        if isinstance(patch, Refused):
            return [widgets.HTML(escape(say(f"There is no diff: {patch.reason}")))]
        shown = widgets.HTML(f'<pre dir="ltr" style="{_DIFF}">{part("changed", patch.diff())}</pre>')
        told = f"`%oomdoctor fix {self._number} --insert` in a cell puts the changed one into the next."
        return [shown, widgets.HTML(part("inline", told))]


def _told(content: str) -> str:
    return f'<div style="line-height:1.45;margin:2px 0">{content}</div>'


class Buttons:
    """Buttons of which one is pressed at a time: while it runs, all of them are off.

    Attributes:
        output: takes what a pressed button puts out.
    """

    def __init__(self, widgets: Any) -> None:
        self._widgets = widgets
        self.output = widgets.Output()
        self._enabled: dict[Any, bool] = {}
        self._running = False

    def add(self, name: str, tooltip: str, do: Callable[[], None]) -> Any:
        """Return a new button that does ``do``."""
        button = self._widgets.Button(description=say(name), tooltip=tooltip, layout=_FITTING)
        button.on_click(lambda _: self.press(button, do))
        self.enable(button, enabled=True)
        return button

    def enable(self, button: Any, *, enabled: bool) -> None:
        """Turn a button on or off; it is off in any case while one runs."""
        self._enabled[button] = enabled
        button.disabled = self._running or not enabled

    def press(self, button: Any, do: Callable[[], None]) -> None:
        """Do ``do`` unless something else is being done, and nothing else meanwhile."""
        if self._running or not self._enabled.get(button):
            return
        self._running = True
        self._refresh()
        try:
            self.output.clear_output()
            with self.output:
                do()
        finally:
            self._running = False
            self._refresh()

    def _refresh(self) -> None:
        for button, enabled in self._enabled.items():
            button.disabled = self._running or not enabled

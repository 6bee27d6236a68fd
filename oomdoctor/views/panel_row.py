"""One fix in the panel: what it is, its dose, and what can be done with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, Any

from oomdoctor.model.absence import Refused
from oomdoctor.views import words
from oomdoctor.views.panel_parts import Buttons, changed_cells, code, diff, opener, wrapping
from oomdoctor.views.prices import FixRow, fix_row

if TYPE_CHECKING:
    from oomdoctor.model.fix import Dose
    from oomdoctor.model.plan import Candidate, Forecast
    from oomdoctor.views.panel import Doctor

__all__ = ["Row", "label"]


def label(row: FixRow, *, priced: bool = True, in_place: bool = False) -> str:
    """Return a fix on one line as HTML: what it is called and whether it fits.

    Args:
        priced: whether with its effect and its price, which the diagnosis above does not have.
        in_place: whether the cell was healed with it.
    """
    title = f"{row.title} ({row.dose})" if row.dose else row.title
    told = ["✓ in place"] if in_place else []
    if priced:
        told += [row.effect, " ".join(filter(None, (f"{row.verdict_text}: {row.peak}", row.quantity)))]
        told += [row.basis] if row.basis else []
        told.append(f"time {row.slowdown}")
    elif not in_place:
        told.append(row.verdict_text)
    number = "" if row.number is None else f"<b>{row.number}</b> "
    text = f"{number}{escape(title)} <small>{escape('; '.join(told))}</small>"
    return f'<div style="line-height:1.45">{text}</div>'


class Row:
    """The controls of one fix.

    Args:
        retry: runs the cell again with what is chosen; None where buttons cannot run it.
        changed: is called when another dose is chosen, or the fix is chosen to be combined.

    Attributes:
        box: the widget.
    """

    def __init__(
        self,
        widgets: Any,
        number: int,
        candidate: Candidate,
        unchanged: Forecast,
        doctor: Doctor,
        buttons: Buttons,
        retry: Callable[[Candidate], None] | None,
        changed: Callable[[], None],
    ) -> None:
        self._widgets, self._number, self._unchanged, self._doctor = widgets, number, unchanged, doctor
        self._candidate, self._retry, self._changed = candidate, retry, changed
        self._doses = doctor.doses(candidate)
        self._dose: Dose = candidate.dose
        self._in_place = False
        self._text = widgets.HTML(self._label())
        self._refills: list[Callable[[], None]] = []
        self._openers: list[Any] = []
        self._buttons, self._run = buttons, None
        self._choice: Any = None
        self._doser: Any = None
        row, controls, parts = self._row(), [], []
        if row.apply and retry is None:
            controls.append(widgets.HTML(code(row.apply)))
        elif row.apply:
            tooltip = f"Run the cell again with: {row.title}"
            self._run = buttons.add(f"Retry with {number}", tooltip, self._press)
            controls.append(self._run)
        if row.diff:
            for name, tooltip, fill in (
                (f"diff {number}", f"Show the change in source: {row.title}", self._diff),
                (f"as a cell {number}", f"Show the changed cell to copy: {row.title}", self._cells),
            ):
                button, part, refill = opener(widgets, name, tooltip, fill)
                controls.append(button)
                parts.append(part)
                self._openers.append(button)
                self._refills.append(refill)
        if row.apply and retry is not None and doctor.joins(candidate):
            self._choice = widgets.Checkbox(
                value=False,
                description=f"Combine {number}",
                indent=False,
                layout=widgets.Layout(width="auto", margin="2px 14px 2px 6px"),
            )
            self._choice.observe(lambda _: changed(), "value")
            controls.append(self._choice)
        if len(self._doses) > 1 and row.apply and retry is not None:
            controls.append(widgets.HBox(self._dosing(), layout=wrapping(widgets)))
        lines = [self._text, widgets.HBox(controls, layout=wrapping(widgets)), *parts]
        self.box = widgets.VBox(lines, layout=widgets.Layout(margin="6px 0 6px 0"))

    @property
    def combines(self) -> bool:
        """Whether it can be combined with another."""
        return self._choice is not None

    @property
    def combined(self) -> bool:
        """Whether it is chosen to be combined with another."""
        return self._choice is not None and bool(self._choice.value)

    def refresh(self, in_place: Sequence[Candidate], *, can_retry: bool) -> None:
        """Show whether the cell was healed with it: then its change of the source matters, in the dose that it had.

        Args:
            can_retry: whether the cell can be run again now.
        """
        own = next((one for one in in_place if one.fix == self._candidate.fix), None)
        self._in_place = own is not None
        if own is not None and own.dose != self._dose:
            self._choose(own.dose)
        self._text.value = self._label()
        for button in self._openers:
            button.button_style = "primary" if self._in_place else ""
        if self._run is not None:
            self._buttons.enable(self._run, can_retry)

    def _choose(self, dose: Dose) -> None:
        """Have a dose chosen by what was done: the slider is set where it has that one."""
        place = next((at for at, (one, _) in enumerate(self._doses) if one == dose), None)
        if self._doser is not None and place is not None:
            self._doser.value = place
            return
        self._dose = dose
        for refill in self._refills:
            refill()

    def chosen(self) -> Candidate | Refused:
        """Return the fix in the dose that is chosen, or why it cannot be had in that one."""
        return self._doctor.at_dose(self._candidate, self._dose)

    def _dosing(self) -> list[Any]:
        """Return the choice of a dose, which shows its forecast as it moves, and for numbers a slider that moves it.

        The slider of ipywidgets tells a screen reader neither what it is of nor its value, so the list has both.
        """
        names = {name for dose, _ in self._doses for name, _ in dose.values}
        values = [dict(dose.values) for dose, _ in self._doses]
        moving = sorted(name for name in names if len({value.get(name) for value in values}) > 1)
        numeric = all(isinstance(value.get(name), (int, float)) for value in values for name in moving)
        shown = [", ".join(words.clean(str(value.get(name, "")), 40) for name in moving) for value in values]
        place = next(at for at, (dose, _) in enumerate(self._doses) if dose == self._dose)
        options = [(text, at) for at, text in enumerate(shown)]
        self._doser = self._widgets.Dropdown(
            options=options,
            value=place,
            description=escape(words.clean(", ".join(moving), 60)),
            style={"description_width": "initial"},
            layout=self._widgets.Layout(width="auto"),
        )
        self._doser.observe(self._moved, "value")
        if not numeric:
            return [self._doser]
        beside = self._widgets.Layout(width="12em", margin="2px 12px")  # else the box cuts the knob off at the ends
        slider = self._widgets.SelectionSlider(options=options, value=place, readout=False, layout=beside)
        self._widgets.link((self._doser, "index"), (slider, "index"))
        return [self._doser, slider]

    def _moved(self, change: Any) -> None:
        self._dose = self._doses[change["new"]][0]
        self._text.value = self._label()
        for refill in self._refills:
            refill()
        self._changed()

    def _label(self) -> str:
        """Return the fix on one line, with its price where that is not the one of the diagnosis."""
        return label(self._row(), priced=self._dose != self._candidate.dose, in_place=self._in_place)

    def _row(self) -> FixRow:
        """Return the facts of the fix in the dose that is chosen."""
        priced = dict(self._doses).get(self._dose, self._candidate.forecast)
        return fix_row(self._number, replace(self._candidate, dose=self._dose, forecast=priced), self._unchanged)

    def _diff(self) -> list[Any]:
        chosen = self.chosen()
        return diff(self._widgets, chosen if isinstance(chosen, Refused) else chosen.patch)

    def _cells(self) -> list[Any]:
        chosen = self.chosen()
        patch = chosen if isinstance(chosen, Refused) else chosen.patch
        return changed_cells(self._widgets, patch, f"%oomdoctor fix {self._number} --insert")

    def _press(self) -> None:
        assert self._retry is not None
        chosen = self.chosen()
        if isinstance(chosen, Refused):
            print(f"oomdoctor: {chosen.reason}")
        else:
            self._retry(chosen)

"""One fix in the panel: what it is, and what can be done with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from oomdoctor.views.document import FixRow
from oomdoctor.views.panel_parts import Buttons, changed_cells, code, diff, opener, wrapping
from oomdoctor.views.prices import fix_row

if TYPE_CHECKING:
    from oomdoctor.model.plan import Candidate, Forecast


class Row:
    """The controls of one fix.

    Args:
        retry: runs the cell again with the fix of a number; None where buttons cannot run it.

    Attributes:
        box: the widget.
    """

    def __init__(
        self,
        widgets: Any,
        number: int,
        candidate: Candidate,
        unchanged: Forecast,
        buttons: Buttons,
        retry: Callable[[int], None] | None,
    ) -> None:
        self._widgets, self._number, self._unchanged, self._buttons = widgets, number, unchanged, buttons
        self._candidate, self._in_place = candidate, False
        self._text = widgets.HTML(self._label())
        self._refills: list[Callable[[], None]] = []
        self._openers: list[Any] = []
        self._run: Any = None
        row, controls, parts = self._row(), [], []
        if row.apply and retry is None:
            controls.append(widgets.HTML(code(row.apply)))
        elif row.apply and retry is not None:
            tooltip = f"Run the cell again with: {row.title}"
            self._run = buttons.add(f"Retry with {number}", tooltip, lambda: retry(number))
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
        lines = [self._text, widgets.HBox(controls, layout=wrapping(widgets)), *parts]
        self.box = widgets.VBox(lines, layout=widgets.Layout(margin="6px 0 6px 0"))

    def refresh(self, in_place: Sequence[Candidate], *, can_retry: bool) -> None:
        """Show whether the cell was healed with it: then its change of the source matters, in the dose that it had.

        Args:
            can_retry: whether the cell can be run again now.
        """
        own = next((one for one in in_place if one.fix == self._candidate.fix), None)
        self._in_place = own is not None
        if own is not None and own.dose != self._candidate.dose:
            self._candidate = own
            for refill in self._refills:
                refill()
        self._text.value = self._label()
        for button in self._openers:
            button.button_style = "primary" if self._in_place else ""
        if self._run is not None:
            self._buttons.enable(self._run, can_retry)

    def _label(self) -> str:
        """Return the fix on one line as HTML: what it is called and whether it fits; the diagnosis has its price."""
        row = self._row()
        title = f"{row.title} ({row.dose})" if row.dose else row.title
        told = "✓ in place" if self._in_place else row.verdict_text
        text = f"<b>{row.number}</b> {escape(title)} <small>{escape(told)}</small>"
        return f'<div style="line-height:1.45">{text}</div>'

    def _row(self) -> FixRow:
        return fix_row(self._number, self._candidate, self._unchanged)

    def _diff(self) -> list[Any]:
        return diff(self._widgets, self._candidate.patch)

    def _cells(self) -> list[Any]:
        return changed_cells(self._widgets, self._candidate.patch, f"%oomdoctor fix {self._number} --insert")

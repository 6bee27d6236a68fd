"""The parts that a panel is made of: a fold, the row of one fix, buttons of which one works at a time, text to copy.

Only core ipywidgets are used, 7.7 or 8. No script runs, so nothing is written to the clipboard: a diff is selected
whole by a click, and a field selects all of its own text by Ctrl+A, with the keyboard alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Final

from oomdoctor.language import say
from oomdoctor.model.unavailable import Refused
from oomdoctor.views.document import FixRow
from oomdoctor.views.html import part
from oomdoctor.views.prices import fix_row, offered

if TYPE_CHECKING:
    from oomdoctor.model.plan import Candidate, Plan

WRAPPING: Final = {"flex_flow": "row wrap", "align_items": "center"}
"""The layout of a row that breaks where the screen is narrow."""
FITTING: Final = {"width": "auto", "min_width": "7em"}
"""A button as wide as its name: the width that ipywidgets gives leaves no room for a dose."""
REST: Final = {"flex": "1 1 16em", "width": "auto"}
"""What takes the rest of a line."""
_DIFF: Final = (
    "font-family:var(--jp-code-font-family, var(--vscode-editor-font-family, monospace));overflow-x:auto;"
    "white-space:pre;line-height:1.3;color:inherit;background:none;user-select:all;-webkit-user-select:all"
)
_MOST_ROWS: Final = 14
"""Lines that a field shows at once."""


class Part:
    """What is shown below a button that is pressed, and hidden again by it; ``opened`` is called when it is shown."""

    def __init__(
        self,
        widgets: Any,
        name: str,
        tooltip: str,
        children: Sequence[Any] = (),
        opened: Callable[[], None] = lambda: None,
    ) -> None:
        self._opened = opened
        self.button = widgets.Button(description=say(name), tooltip=say(tooltip), layout=FITTING)
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
        if self.is_open:
            self._opened()

    def _rename(self) -> None:
        shows = self._name.removeprefix("Show ")
        self.button.description = say(f"Hide {shows[0].lower()}{shows[1:]}" if self.is_open else self._name)


class Row:
    """The controls of one fix.

    Args:
        retry: runs the cell again with the fix of a number; None where buttons cannot run it.
        is_best: whether a retry tries it first, which a button of its own does.
        before: what is said before it, where it stands in the place of the best and changes results.
    """

    def __init__(
        self,
        widgets: Any,
        number: int,
        candidate: Candidate,
        plan: Plan,
        buttons: Buttons,
        retry: Callable[[int], None] | None,
        *,
        is_best: bool = False,
        before: str = "",
    ) -> None:
        self._widgets, self._number, self._plan, self._buttons = widgets, number, plan, buttons
        self._candidate, self._in_place, self.is_best = candidate, False, is_best
        self._before = before
        self.text = widgets.HTML(self._label(), layout=REST if self.leads else {"width": "auto"})
        self._run: Any = None
        row, controls = self._row(), []
        if row.apply and retry is None:
            controls.append(widgets.HTML(code(row.apply)))
        elif row.apply and retry is not None:
            name = f"Retry with {number}: changes results" if before else f"Retry with {number}"
            does = f"Run the cell again: {row.title}"
            self._run = buttons.add(name, does, lambda: retry(number), working(f"fix {number}"))
            controls.append(self._run)
        name = "Show change" if self.leads else f"Show change {number}"
        self.change = Part(widgets, name, f"Diff: {row.title}", self._change())
        if row.diff:  # to open it runs nothing, so the other buttons stay as they are
            controls.append(self.change.button)
        self.pressed = controls[0] if row.apply else self.change.button
        self.box = widgets.VBox([self.text, widgets.HBox(controls, layout=WRAPPING), self.change.box])

    def refresh(self, in_place: Sequence[Candidate], *, can_retry: bool) -> None:
        """Show whether the cell was healed with it: then its change of the source matters, in the dose that it had."""
        own = next((one for one in in_place if one.fix == self._candidate.fix), None)
        self._in_place = own is not None
        if own is not None and own != self._candidate:
            self._candidate, before = own, self._candidate
            if own.patch != before.patch:
                self.change.box.children = tuple(self._change())
        self.text.value = self._label()
        self.change.button.button_style = "primary" if self._in_place else ""
        if self._run is not None:
            self._buttons.enable(self._run, enabled=can_retry)

    @property
    def fix(self) -> str:
        """The id of its fix."""
        return self._candidate.fix

    @property
    def leads(self) -> bool:
        """Whether it stands first, apart from the others."""
        return self.is_best or bool(self._before)

    def _label(self) -> str:
        """Return the fix as HTML: what it is called, whether it fits, what it keeps and what it costs."""
        row, told = self._row(), part("inline", offered(self._candidate))
        gauge = "" if row.gauge is None else f'<div style="max-width:24em">{part("gauge", row)}</div>'
        if self.leads:
            before = f"{part('inline', self._before)}<br>" if self._before and not self._in_place else ""
            return paragraph(f"{say('✓ in place: ') if self._in_place else before}{told}")
        mark = say("✓ in place" if self._in_place else row.verdict_text)
        notes = "".join(f"<br><small>{part('inline', note)}</small>" for note in row.notes)
        return paragraph(f"<b>{row.number}</b> {told} <small>{escape(mark)}</small>{gauge}{notes}")

    def _row(self) -> FixRow:
        return fix_row(self._number, self._candidate, self._plan)

    def _change(self) -> list[Any]:
        """Return the change of the source as a diff, the changed cells to copy, and the command that inserts them.

        A callback cannot put a cell into the notebook: what it asks for would ride on the reply to another cell, and
        could overwrite that one.
        """
        widgets, patch = self._widgets, self._candidate.patch
        if isinstance(patch, Refused):
            return [widgets.HTML(escape(say(f"There is no diff: {patch.reason}")))]
        shown = widgets.HTML(f'<pre dir="ltr" style="{_DIFF}">{part("changed", patch.diff())}</pre>')
        cells = [to_copy(widgets, edit.name, edit.after) for edit in patch.edits]
        insert = f"`%oomdoctor fix {self._number} --insert` in a cell puts the changed one into the next."
        told = part("inline", f"A click selects the whole diff. {insert}")
        return [shown, widgets.HTML(paragraph(told)), *cells]


def to_copy(widgets: Any, name: str, text: str) -> Any:
    """Return a field to copy ``text`` from; what is typed into it does not stay."""
    rows = min(text.count("\n") + 1, _MOST_ROWS)
    field = widgets.Textarea(value=text, description=name, rows=rows, layout={"width": "98%"})

    def put_back(_change: Any) -> None:
        field.value = text

    field.observe(put_back, "value")
    return field


def paragraph(content: str) -> str:
    """Return lines of HTML as what stands between controls."""
    return f'<div style="line-height:1.45;margin:2px 0">{content}</div>'


def code(text: str) -> str:
    """Return code as HTML within a sentence."""
    return part("inline", f"`{text}`")


def live(content: str) -> str:
    """Return what is read aloud when it changes."""
    return f'<span role="status" aria-live="polite">{content}</span>'


def working(what: str) -> str:
    """Return what is said while the cell is run again."""
    return f"⏳ The cell runs again with {what}. Interrupt the kernel to stop it."


class Buttons:
    """Buttons of which one is pressed at a time: while it runs, all of them are off, and ``status`` says what is done.

    ``output`` takes what a pressed button puts out.
    """

    def __init__(self, widgets: Any) -> None:
        self._widgets = widgets
        self.output, self.status = widgets.Output(), widgets.HTML()
        if hasattr(self.status, "tabbable"):
            self.status.tabbable = False  # it can have the focus, and Tab passes it by
        self._enabled: dict[Any, bool] = {}
        self._running = False

    def add(self, name: str, tooltip: str, do: Callable[[], None], busy: str) -> Any:
        """Return a new button that does ``do``, and says ``busy`` meanwhile."""
        button = self._widgets.Button(description=say(name), tooltip=say(tooltip), layout=FITTING)
        button.on_click(lambda _: self.press(button, do, busy))
        self.enable(button, enabled=True)
        return button

    def enable(self, button: Any, *, enabled: bool) -> None:
        """Turn a button on or off; it is off in any case while one runs."""
        self._enabled[button] = enabled
        button.disabled = self._running or not enabled

    def press(self, button: Any, do: Callable[[], None], busy: str) -> None:
        """Do ``do`` unless something else is being done, and nothing else meanwhile."""
        if self._running or not self._enabled.get(button):
            return
        self._running = True
        self._refresh()
        self.status.value = before = live(say(busy))
        try:
            self.output.clear_output()
            with self.output:
                do()
        finally:
            self._running = False
            self._refresh()
            if self.status.value == before:
                self.status.value = ""
            focused = self.status if self.status.value else button
            if hasattr(focused, "focus"):  # since ipywidgets 8: a control that was off or is gone has lost it
                focused.focus()

    def _refresh(self) -> None:
        for button, enabled in self._enabled.items():
            button.disabled = self._running or not enabled

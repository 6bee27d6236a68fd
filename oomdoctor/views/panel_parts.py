"""The parts that the panel is made of: buttons that are pressed one at a time, parts that open, and a live retry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Final

from oomdoctor.model.absence import Refused
from oomdoctor.model.sizes import format_size
from oomdoctor.views.html import part

if TYPE_CHECKING:
    from oomdoctor.model.case import OutcomeKind
    from oomdoctor.model.fix import Patch

_MONO: Final = "var(--jp-code-font-family, var(--vscode-editor-font-family, monospace))"


def wrapping(widgets: Any) -> Any:
    """Return a layout that breaks its row where the screen is narrow."""
    return widgets.Layout(flex_flow="row wrap", align_items="center")


def _fitting(widgets: Any) -> Any:
    """Return a layout as wide as the button's name: the width that ipywidgets gives leaves no room for a dose."""
    return widgets.Layout(width="auto", min_width="7em")


def code(text: str) -> str:
    """Return code as HTML within a sentence."""
    return part("inline", f"`{text}`")


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

    def add(self, name: str, tooltip: str, do: Callable[[], None], *, enabled: bool = True) -> Any:
        """Return a new button that does ``do``."""
        button = self._widgets.Button(description=name, tooltip=tooltip, layout=_fitting(self._widgets))
        button.on_click(lambda _: self._press(button, do))
        self.enable(button, enabled)
        return button

    def enable(self, button: Any, enabled: bool) -> None:
        """Turn a button on or off; it is off in any case while one runs."""
        self._enabled[button] = enabled
        button.disabled = self._running or not enabled

    def _press(self, button: Any, do: Callable[[], None]) -> None:
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


class Opener:
    """A button that opens and closes a part, whose contents are made when it is opened.

    It runs nothing, so the other buttons stay as they are.
    """

    def __init__(self, widgets: Any, name: str, tooltip: str, contents: Callable[[], list[Any]]) -> None:
        self._name, self._contents = name, contents
        self.part = widgets.VBox([], layout=widgets.Layout(display="none"))
        self.button = widgets.Button(description=f"Show {name}", tooltip=tooltip, layout=_fitting(widgets))
        self.button.on_click(lambda _: self._toggle())

    def _toggle(self) -> None:
        is_hidden = self.part.layout.display == "none"
        self.part.layout.display = "" if is_hidden else "none"
        self.button.description = f"{'Hide' if is_hidden else 'Show'} {self._name}"
        self.fill()

    def fill(self) -> None:
        """Make the contents anew where the part is open."""
        if self.part.layout.display != "none":
            self.part.children = tuple(self._contents())


def diff(widgets: Any, patch: Patch | Refused, insert: str) -> list[Any]:
    """Return the change of the source as a diff, and the command ``insert`` that puts the changed cell into the next.

    A callback cannot put a cell into the notebook: what it asks for would ride on the reply to another cell, and could
    overwrite that one.
    """
    if isinstance(patch, Refused):
        return [widgets.HTML(f"There is no diff: {escape(patch.reason)}")]
    style = f"font-family:{_MONO};overflow-x:auto;white-space:pre;line-height:1.3;color:inherit;background:none"
    shown = widgets.HTML(f'<pre dir="ltr" style="{style}">{part("changed", patch.diff())}</pre>')
    return [shown, widgets.HTML(f"{code(insert)} in a cell puts the changed one into the next.")]


class Progress:
    """A retry while it runs, as a sentence and a bar of memory against the budget; hidden before the first."""

    def __init__(self, widgets: Any) -> None:
        hidden = widgets.Layout(display="none", align_items="center", flex_flow="row wrap")
        self._bar = widgets.FloatProgress(value=0.0, min=0.0, max=1.0, description="Memory")
        self._text = widgets.HTML()
        self.box = widgets.HBox([self._bar, self._text], layout=hidden)

    def show(self, live: Live) -> None:
        """Show the retry as it is now. May be called on another thread than the kernel's."""
        if live.allocated is not None and live.budget:
            self._bar.value = min(live.allocated / live.budget, 1.0)
        self._text.value = escape(live.sentence)
        self.box.layout.display = self._bar.layout.display = ""

    def end(self, live: Live) -> None:
        """Show that it has ended; where it came to a result, the notice that was put out says it all."""
        if live.outcome is not None:
            self.hide()
            return
        self._bar.layout.display = "none"
        self._text.value = escape(live.end)

    def hide(self) -> None:
        """Show nothing of it any more."""
        self._text.value = ""
        self.box.layout.display = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """A retry at one moment.

    Attributes:
        attempt: which one is running, 0 before the first has begun; ``most``: how many there may be.
        allocated: bytes of tensors, None where that cannot be told; ``budget``: bytes that there are for them.
        waits: whether it begins only when the forecasts are there.
        outcome: how it ended; None while it runs, and where it came to no result, as one that was interrupted.
    """

    attempt: int
    most: int
    elapsed_s: float
    allocated: int | None = None
    budget: int | None = None
    waits: bool = False
    outcome: OutcomeKind | None = None

    @property
    def sentence(self) -> str:
        """All of it in words."""
        before = "Waiting for the forecasts" if self.waits else "Going back to the cell's start"
        what = f"Attempt {self.attempt} of at most {self.most}" if self.attempt else before
        return f"{what}, {self.elapsed_s:.1f} s{self._memory()}; the kernel's interrupt button ends it."

    @property
    def end(self) -> str:
        """That it came to no result and how long it took, in words."""
        attempts = f", {self.attempt} attempt{'' if self.attempt == 1 else 's'}" if self.attempt else ""
        return f"! Ended without a result after {self.elapsed_s:.1f} s{attempts}."

    def _memory(self) -> str:
        if self.allocated is None:
            return ""
        of = "" if self.budget is None else f" of {format_size(self.budget)}"
        return f": {format_size(self.allocated)}{of} in use"

"""The controls under a diagnosis: retry with a fix, look at its diff, undo.

Only core ipywidgets are used, 7.7 or 8, as other frontends than JupyterLab show no others; they are imported when a
panel is built. The panel holds no facts of its own, so nothing is lost where widgets are not shown. What a button
does is the caller's: ``act`` may be called on the main thread or on a subshell's, and its output is captured.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from oomdoctor.model.absence import Refused
from oomdoctor.views.prices import FixRow, fix_rows

if TYPE_CHECKING:
    from oomdoctor.model.case import Case
    from oomdoctor.model.plan import Candidate

__all__ = ["Act", "build"]

Act: TypeAlias = "Callable[[str, Candidate | None], None]"
"""Does what a button says: ``fix`` with a candidate, ``retry`` with the best, ``undo``. Diffs need no act."""

_MONO: Final = "var(--jp-code-font-family, var(--vscode-editor-font-family, monospace))"


def build(case: Case, act: Act) -> Any | None:
    """Return the panel for ``case``, None where ipywidgets is not installed or there is nothing to press."""
    try:
        import ipywidgets
    except ImportError:
        return None
    rows = fix_rows(case.plan)
    if not any(row.apply or row.diff for row in rows):
        return None
    return _Panel(ipywidgets, act).box(list(zip(rows, case.plan.candidates, strict=True)))


class _Panel:
    """The buttons of one panel, which are pressed one at a time."""

    def __init__(self, widgets: Any, act: Act) -> None:
        self._widgets = widgets
        self._act = act
        self._output = widgets.Output()
        self._buttons: list[Any] = []

    def box(self, fixes: list[tuple[FixRow, Candidate]]) -> Any:
        """Return the whole panel: the overall buttons, a row for each fix, and the output."""
        can_retry = any(row.apply for row, _ in fixes)
        retry = self._button("Retry best", "Run the cell again with the best fix that fits", "retry", None, can_retry)
        retry.button_style = "primary"
        undo = self._button("Undo", "Take back what the last retry changed", "undo", None)
        rows = [self._fix(row, candidate) for row, candidate in fixes if row.apply or row.diff]
        return self._widgets.VBox([self._widgets.HBox([retry, undo]), *rows, self._output])

    def _fix(self, row: FixRow, candidate: Candidate) -> Any:
        title = f"{row.title} ({row.dose})" if row.dose else row.title
        label = f"<b>{row.number}</b> {escape(title)} <small>{escape(row.effect)}, {escape(row.verdict_text)}</small>"
        controls = [
            self._button(f"Retry with {row.number}", f"Run the cell again with: {title}", "fix", candidate, row.apply),
            self._widgets.HTML(label, layout=self._widgets.Layout(margin="0 0 0 8px")),
        ]
        if isinstance(candidate.patch, Refused):
            return self._widgets.HBox(controls, layout=self._wrapping())
        shown = self._widgets.HTML(layout=self._widgets.Layout(display="none"))
        shown.value = f'<pre style="font-family:{_MONO};overflow-x:auto">{escape(candidate.patch.diff())}</pre>'
        controls.insert(1, self._toggle(row.number, title, shown))
        return self._widgets.VBox([self._widgets.HBox(controls, layout=self._wrapping()), shown])

    def _wrapping(self) -> Any:
        return self._widgets.Layout(flex_flow="row wrap", align_items="center")

    def _toggle(self, number: int, title: str, shown: Any) -> Any:
        """Return the button that shows and hides a diff; it runs nothing, so the others stay as they are."""
        button = self._widgets.Button(description=f"Show diff {number}", tooltip=f"Show the change in source: {title}")

        def toggle(pressed: Any) -> None:
            hidden = shown.layout.display == "none"
            shown.layout.display = "" if hidden else "none"
            pressed.description = f"{'Hide' if hidden else 'Show'} diff {number}"

        button.on_click(toggle)
        return button

    def _button(self, name: str, tooltip: str, verb: str, candidate: Candidate | None, enabled: object = True) -> Any:
        button = self._widgets.Button(description=name, tooltip=tooltip, disabled=not enabled)
        if enabled:
            self._buttons.append(button)
            button.on_click(lambda _: self._press(verb, candidate))
        return button

    def _press(self, verb: str, candidate: Candidate | None) -> None:
        """Run ``act`` with every button off, and turn them on again however it ends."""
        if any(button.disabled for button in self._buttons):
            return
        self._set_disabled(True)
        try:
            self._output.clear_output()
            with self._output:
                self._act(verb, candidate)
        finally:
            self._set_disabled(False)

    def _set_disabled(self, disabled: bool) -> None:
        for button in self._buttons:
            button.disabled = disabled

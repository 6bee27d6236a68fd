from __future__ import annotations

import contextlib
import sys
from typing import Any

import cases
import ipywidgets
import pytest

from oomdoctor.model.plan import Candidate
from oomdoctor.views import panel


class Recorder:
    """Stands for the shell: notes each call, and whether any button could be pressed during it."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.calls: list[tuple[str, Candidate | None]] = []
        self.enabled_during: list[list[str]] = []
        self.box: Any = None
        self.error = error

    def __call__(self, verb: str, candidate: Candidate | None) -> None:
        self.calls.append((verb, candidate))
        self.enabled_during.append([button.description for button in _running(self.box) if not button.disabled])
        if self.error:
            raise self.error


def _all(widget: Any) -> list[Any]:
    return [widget, *(found for child in getattr(widget, "children", ()) for found in _all(child))]


def _buttons(box: Any) -> dict[str, Any]:
    return {widget.description: widget for widget in _all(box) if isinstance(widget, ipywidgets.Button)}


def _running(box: Any) -> list[Any]:
    return [button for name, button in _buttons(box).items() if "diff" not in name]


def _built(act: Recorder, case: Any = None) -> Any:
    act.box = panel.build(case or cases.offered(), act)
    assert act.box is not None
    return act.box


def test_there_are_controls_for_what_can_be_done_and_no_others() -> None:
    assert list(_buttons(_built(Recorder()))) == [
        "Retry best",
        "Undo",
        "Retry with 1",
        "Show diff 1",
        "Retry with 2",
        "Retry with 3",
        "Show diff 3",
    ]


def test_each_button_says_what_is_to_be_done() -> None:
    act = Recorder()
    buttons = _buttons(_built(act))
    for name in ("Retry with 1", "Retry best", "Undo", "Retry with 3"):
        buttons[name].click()
    assert act.calls == [("fix", cases.MICRO_BATCH), ("retry", None), ("undo", None), ("fix", cases.AUTOCAST)]


def test_buttons_are_off_while_one_runs_and_on_again_after() -> None:
    act = Recorder()
    box = _built(act)
    _buttons(box)["Retry best"].click()
    assert act.enabled_during == [[]]
    assert not any(button.disabled for button in _running(box))


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_buttons_are_on_again_after_a_failure(error: BaseException) -> None:
    act = Recorder(error)
    box = _built(act)
    with contextlib.suppress(KeyboardInterrupt):  # ipywidgets logs an error of a callback, and lets an interrupt pass
        _buttons(box)["Retry best"].click()
    assert act.calls == [("retry", None)]
    assert not any(button.disabled for button in _running(box))


def test_a_press_during_a_run_does_nothing() -> None:
    act = Recorder()
    box = _built(act)
    again = _buttons(box)["Undo"]
    outer = act.__call__

    def reenter(verb: str, candidate: Candidate | None) -> None:
        outer(verb, candidate)
        again.click()

    nested = panel.build(cases.offered(), reenter)
    act.box = nested
    again = _buttons(nested)["Undo"]
    _buttons(nested)["Retry best"].click()
    assert act.calls == [("retry", None)]


def test_the_diff_is_shown_and_hidden_without_a_run() -> None:
    act = Recorder()
    box = _built(act)
    button = _buttons(box)["Show diff 1"]
    shown = next(w for w in _all(box) if isinstance(w, ipywidgets.HTML) and w.value.startswith("<pre"))
    assert shown.layout.display == "none"
    button.click()
    assert (shown.layout.display, button.description) == ("", "Hide diff 1")
    assert "+    for micro in batch.split(16):" in shown.value
    button.click()
    assert (shown.layout.display, button.description) == ("none", "Show diff 1")
    assert act.calls == []


def test_every_button_has_a_name_of_its_own_and_a_tooltip() -> None:
    buttons = [widget for widget in _all(_built(Recorder())) if isinstance(widget, ipywidgets.Button)]
    assert len({button.description for button in buttons}) == len(buttons)
    assert all(button.tooltip for button in buttons)


def test_hostile_names_stay_text() -> None:
    box = _built(Recorder(), cases.hostile())
    values = [widget.value for widget in _all(box) if isinstance(widget, ipywidgets.HTML)]
    assert len(values) == 2
    assert all("<img" not in value and "&lt;img" in value for value in values)


def test_there_is_no_panel_where_nothing_can_be_pressed() -> None:
    assert panel.build(cases.no_candidates(), Recorder()) is None


def test_there_is_no_panel_without_ipywidgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert panel.build(cases.offered(), Recorder()) is None

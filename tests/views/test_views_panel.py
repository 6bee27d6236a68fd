from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from typing import Any

import cases
import ipywidgets
import pytest

from oomdoctor.model.case import Case
from oomdoctor.model.fix import Dose
from oomdoctor.model.plan import Candidate
from oomdoctor.model.sizes import format_size
from oomdoctor.model.unavailable import Refused
from oomdoctor.views import panel
from oomdoctor.views.outcome import Retry


class Recorder:
    """Stands for the shell: notes each call, and which buttons could be pressed during it.

    Args:
        error: what a press ends with.
        heals: what a retry heals the cell with; it is not healed without one.
    """

    def __init__(self, error: BaseException | None = None, heals: Candidate | None = None) -> None:
        self.heals = heals
        self.in_place: tuple[Candidate, ...] = ()
        self.calls: list[tuple[str, int | None]] = []
        self.enabled_during: list[list[str]] = []
        self.box: Any = None
        self.error = error
        self.auto = "off"
        self.gone = self.ended = ""

    is_skipped = False

    def skip(self) -> None:
        self.is_skipped = True

    def report(self, *, with_code: bool) -> str:
        return f"with code: {with_code}"

    def keep(self, outputs: Any) -> None:
        self.kept = outputs

    def press(self, verb: str, what: int | None = None) -> None:
        self.calls.append((verb, what))
        self.enabled_during.append([button.description for button in _running(self.box) if not button.disabled])
        self.said_during = _text(self.box)
        if self.error:
            raise self.error
        self.in_place = () if verb == "undo" or self.heals is None else (self.heals,)


def _all(widget: Any) -> list[Any]:
    return [widget, *(found for child in getattr(widget, "children", ()) for found in _all(child))]


def _of(box: Any, kind: Any) -> list[Any]:
    return [widget for widget in _all(box) if isinstance(widget, kind)]


def _buttons(box: Any) -> dict[str, Any]:
    return {widget.description: widget for widget in _of(box, ipywidgets.Button)}


def _running(box: Any) -> list[Any]:
    return [button for name, button in _buttons(box).items() if name.startswith(("Fix it", "Retry", "Undo"))]


def _off(box: Any) -> list[str]:
    return [button.description for button in _running(box) if button.disabled]


def _primary(box: Any) -> list[str]:
    return [name for name, button in _buttons(box).items() if button.button_style == "primary"]


def _text(box: Any) -> str:
    return "\n".join(widget.value for widget in _of(box, ipywidgets.HTML))


def _row(box: Any, number: int) -> str:
    """Return what is said of one fix."""
    return next(text.value for text in _of(box, ipywidgets.HTML) if f"<b>{number}</b>" in text.value)


def _row_box(box: Any, number: int) -> Any:
    """Return the box of one fix."""
    return next(
        one for one in box.children if any(f"<b>{number}</b>" in text.value for text in _of(one, ipywidgets.HTML))
    )


def _built(doctor: Recorder, case: Case | None = None, **kwargs: Any) -> Any:
    made = panel.build(case or cases.offered(), doctor, **kwargs)
    assert made is not None
    doctor.box = made.box
    return made.box


def test_there_are_controls_for_what_can_be_done_and_no_others() -> None:
    box = _built(Recorder())
    assert list(_buttons(box)) == [
        *("Fix it", "Show change", "Other fixes (2)", "Undo"),
        *("Retry with 2", "Retry with 3", "Show change 3", "Copy report"),
    ]


def test_each_button_says_what_is_to_be_done() -> None:
    doctor = Recorder()
    buttons = _buttons(_built(doctor))
    for name in ("Fix it", "Retry with 3"):
        buttons[name].click()
    assert doctor.calls == [("retry", None), ("fix", 3)]


def test_a_size_that_is_typed_is_what_the_cell_is_planned_for() -> None:
    doctor = Recorder()
    box = _built(doctor)
    (field,) = _of(box, ipywidgets.Text)
    assert field.description == "Fit in"
    assert field.value == format_size(cases.offered().plan.unchanged.budget or 0)
    field.value = "3 GiB"
    assert doctor.calls == [("fit", "3GiB")]
    assert doctor.enabled_during == [[]]
    assert "Forecasts are running" in doctor.said_during
    assert "Forecasts are running" not in _text(box)


def test_buttons_are_off_while_one_runs_and_on_again_after() -> None:
    doctor = Recorder()
    box = _built(doctor)
    _buttons(box)["Fix it"].click()
    assert doctor.enabled_during == [[]]
    assert _off(box) == ["Undo"]
    assert 'aria-live="polite">⏳ The cell runs again with the best fix.' in doctor.said_during
    assert "runs again" not in _text(box)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_buttons_are_on_again_after_a_failure(error: BaseException) -> None:
    doctor = Recorder(error)
    box = _built(doctor)
    with contextlib.suppress(KeyboardInterrupt):  # ipywidgets logs an error of a callback, and lets an interrupt pass
        _buttons(box)["Fix it"].click()
    assert doctor.calls == [("retry", None)]
    assert _off(box) == ["Undo"]


def test_a_press_during_a_run_does_nothing() -> None:
    class Nested(Recorder):
        def press(self, verb: str, what: int | None = None) -> None:
            super().press(verb, what)
            _buttons(self.box)["Undo"].click()

    doctor = Nested()
    _buttons(_built(doctor))["Fix it"].click()
    assert doctor.calls == [("retry", None)]


def test_the_diff_is_shown_and_hidden_without_a_run() -> None:
    doctor = Recorder()
    box = _built(doctor)
    button = _buttons(box)["Show change"]
    part = next(one for one in _of(box, ipywidgets.VBox) if "<pre" in _text(one) and len(_all(one)) == 4)
    assert part.layout.display == "none"
    button.click()
    assert button.description == "Hide change"
    assert "+    for micro in batch.split(16):" in _text(box)
    assert "%oomdoctor fix 1 --insert" in _text(box)
    assert part.layout.display == ""
    assert "user-select:all" in _text(part), "a click selects the whole diff"
    (cell,) = _of(part, ipywidgets.Textarea)
    assert "for micro in batch.split(16):" in cell.value
    cell.value = "typed into it"
    assert "for micro in batch.split(16):" in cell.value, "what is copied is the change"
    button.click()
    assert (part.layout.display, button.description) == ("none", "Show change")
    assert doctor.calls == []


def test_the_setting_of_what_is_done_by_itself_can_be_chosen() -> None:
    doctor = Recorder()
    box = _built(doctor)
    choice = _of(box, ipywidgets.Dropdown)[0]
    assert choice.value == "off"
    choice.value = "exact"
    assert doctor.auto == "exact"
    assert "%oomdoctor auto exact" in _text(box)


def test_what_a_retry_puts_out_stands_below_the_buttons() -> None:
    """Where the notebook keeps it as well."""
    doctor = Recorder()
    box = _built(doctor)
    head, *_, output = box.children
    assert "Fix it" in _buttons(head)
    assert isinstance(output, ipywidgets.Output)
    output.outputs = ({"output_type": "stream", "name": "stdout", "text": "steps 2"},)
    assert doctor.kept == output.outputs


def test_the_other_fixes_are_folded_away() -> None:
    box = _built(Recorder())
    button = _buttons(box)["Other fixes (2)"]
    part = next(one for one in box.children if "Retry with 2" in _buttons(one))
    assert part.layout.display == "none"
    button.click()
    assert (part.layout.display, button.description) == ("", "Hide other fixes (2)")
    assert "Fix it" not in _buttons(part)


@pytest.mark.parametrize("typed", [False, True])
def test_there_is_nothing_to_undo_before_a_cell_was_healed(typed: bool) -> None:
    doctor = Recorder()
    undo = _buttons(_built(doctor, typed=typed))["Undo"]
    undo.click()
    assert (undo.disabled, undo.tooltip, doctor.calls) == (True, "There is nothing to undo", [])


def test_after_a_cell_was_healed_its_change_and_the_way_back_matter() -> None:
    doctor = Recorder(heals=cases.MICRO_BATCH)
    box = _built(doctor)
    buttons = _buttons(box)
    buttons["Fix it"].click()
    assert _off(box) == ["Fix it", "Retry with 2", "Retry with 3"]
    assert buttons["Fix it"].layout.display == "none", "what cannot be pressed any more is not there"
    assert [name for name, one in buttons.items() if one.button_style == "primary"] == ["Show change"]
    assert "✓ in place: " in _text(box.children[0])
    assert "in place" not in _row(box, 3)
    assert buttons["Undo"].layout.display == ""
    buttons["Undo"].click()
    assert _off(box) == ["Undo"]
    assert _primary(box) == ["Fix it"]
    assert "in place" not in _text(box)
    assert "Healed" not in _text(box), "it is healed no more"


def test_a_cell_that_was_healed_elsewhere_is_shown_so() -> None:
    """By a command that was typed; and after the cell that follows, there is no way back."""
    doctor = Recorder()
    made = panel.build(cases.offered(), doctor)
    assert made is not None
    doctor.in_place = (cases.AUTOCAST,)
    made.refresh()
    assert "Undo" not in _off(made.box)
    assert "✓ in place" in _row(made.box, 3)
    doctor.in_place = ()
    made.refresh()
    assert _off(made.box) == ["Undo"]


def test_what_a_command_has_healed_and_undone_is_said_so() -> None:
    doctor = Recorder()
    made = panel.build(cases.offered(), doctor)
    assert made is not None
    doctor.in_place, doctor.ended = (cases.MICRO_BATCH,), "Healed: In[5] ran to its end."
    made.refresh()
    assert "Healed: In[5]" in _text(made.box)
    doctor.in_place, doctor.ended = (), ""
    made.refresh()
    assert "Healed" not in _text(made.box)
    before = made.box.children[0].children
    doctor.in_place = (cases.CHECKPOINT,)
    made.refresh()
    assert _text(made.box.children[0]).count("✓ in place: ") == 1
    assert cases.CHECKPOINT.title in _text(made.box.children[0]), (
        "what is in place, and not what a retry would begin with"
    )
    doctor.in_place = ()
    made.refresh()
    assert made.box.children[0].children == before


def test_what_can_be_run_no_more_is_off_and_says_why() -> None:
    doctor = Recorder()
    made = panel.build(cases.offered(), doctor)
    assert made is not None
    doctor.gone = "another <cell> has failed since: run it again by `Run`"
    made.refresh()
    assert _off(made.box) == [button.description for button in _running(made.box)]
    assert _primary(made.box) == []
    assert "Retries are off: another &lt;cell&gt; has failed since" in _text(made.box)
    assert "`" not in _text(made.box)
    doctor.gone = ""
    made.refresh()
    assert _off(made.box) == ["Undo"]
    assert "Retries are off" not in _text(made.box)


def test_the_dose_that_healed_the_cell_is_the_one_that_is_shown() -> None:
    doctor = Recorder(
        heals=replace(cases.MICRO_BATCH, dose=Dose.of(micro_batch=8), patch=Refused("no diff of this one"))
    )
    box = _built(doctor)
    _buttons(box)["Show change"].click()
    _buttons(box)["Fix it"].click()
    assert "(micro_batch=8)" in _text(box.children[0]), "a stronger one than was asked for"
    assert "no diff of this one" in _text(box), "an open diff is that of the dose"


def test_there_is_nothing_to_retry_with_where_nothing_fits() -> None:
    box = _built(Recorder(), cases.nothing_fits())
    buttons = _buttons(box)
    assert buttons["Fix it"].disabled
    assert buttons["Fix it"].tooltip == "No fix that keeps the results is forecast to fit."
    assert buttons["Fix it"].tooltip in _text(box.children[0])
    assert _primary(box) == []
    assert not buttons["Retry with 1"].disabled


def test_where_only_a_change_of_the_results_fits_it_has_a_button_of_its_own() -> None:
    case, doctor = cases.nothing_fits(), Recorder()
    fits = replace(cases.AUTOCAST, forecast=cases.forecast(5))
    plan = replace(case.plan, candidates=(*case.plan.candidates, fits))
    box = _built(doctor, replace(case, plan=plan))
    number = plan.number(fits)
    button = box.children[0].children[0]
    assert button.description == f"Retry with {number}: changes results"
    assert button.button_style == "", "it is not what a retry would do by itself"
    said = _text(box.children[0])
    assert "No fix that keeps the results is forecast to fit." in said
    assert "never applied by itself" in said
    button.click()
    assert doctor.calls == [("fix", number)]
    assert "Fix it" not in _buttons(box)


def test_what_a_retry_would_do_is_what_the_caller_says() -> None:
    why = Retry(why="other processes hold the device")
    button = _buttons(_built(Recorder(), retry=why))["Fix it"]
    assert (button.disabled, button.tooltip) == (True, "other processes hold the device")
    second = _buttons(_built(Recorder(), retry=Retry(chosen=(cases.CHECKPOINT,))))["Fix it"]
    assert (second.disabled, second.tooltip) == (False, "Run the cell again with fix 2, which is not certain to fit")


def test_forecasts_that_come_later_fill_in() -> None:
    doctor = Recorder()
    made = panel.build(cases.pending(), doctor)
    assert made is not None
    doctor.box = made.box
    shown = ["Fix it", "Skip forecasts", "Settings", "Undo", "Copy report"]
    assert list(_buttons(made.box)) == shown, "numbers may still change"
    assert not _buttons(made.box)["Fix it"].disabled
    assert "Forecasts are running" in _text(made.box)
    made.show_progress(cases.offered().plan, 2.4)
    assert "Forecasts: 3 of 4 fixes, 2 s." in _text(made.box)
    assert "Best so far: " in _text(made.box)
    _buttons(made.box)["Skip forecasts"].click()
    assert doctor.is_skipped
    made.update(cases.nothing_fits())
    assert "Forecasts are running" not in _text(made.box)
    assert "Retry with 1" in _buttons(made.box)
    assert _buttons(made.box)["Fix it"].disabled


def test_a_cell_that_awaits_is_retried_by_typing() -> None:
    box = _built(Recorder(), typed=True)
    assert list(_buttons(box)) == ["Show change", "Other fixes (2)", "Undo", "Show change 3", "Copy report"]
    assert "%oomdoctor retry" in _text(box)
    for number in (2, 3):
        assert f">%oomdoctor fix {number}<" in _text(box)


def test_the_focus_goes_to_how_it_ended_or_back_to_the_button(monkeypatch: pytest.MonkeyPatch) -> None:
    focused: list[Any] = []
    monkeypatch.setattr(ipywidgets.DOMWidget, "focus", lambda one: focused.append(one), raising=False)
    doctor = Recorder(heals=cases.MICRO_BATCH)
    box = _built(doctor)
    doctor.ended = "Healed: In[5] ran to its end."
    _buttons(box)["Fix it"].click()
    assert "Healed: In[5]" in focused[-1].value
    doctor.ended = ""
    _buttons(box)["Undo"].click()
    assert "Undone: the cell can be run again." in focused[-1].value
    doctor.heals = None
    _buttons(box)["Retry with 2"].click()
    assert focused[-1].description == "Retry with 2"


def test_a_report_is_made_when_it_is_asked_for_and_again_with_code() -> None:
    box = _built(Recorder())
    assert "with code" not in [field.value for field in _of(box, ipywidgets.Textarea)]
    _buttons(box)["Copy report"].click()
    assert _of(box, ipywidgets.Textarea)[-1].value == "with code: False"
    _of(box, ipywidgets.Checkbox)[0].value = True
    assert _of(box, ipywidgets.Textarea)[-1].value == "with code: True"


def test_every_control_has_a_name_of_its_own_and_every_button_a_tooltip() -> None:
    box = _built(Recorder())
    for name in ("Show change", "Show change 3"):
        _buttons(box)[name].click()
    kinds = (ipywidgets.Button, ipywidgets.Dropdown)
    names = [widget.description for widget in _of(box, kinds)]
    assert all(names)
    named = list(_buttons(box))
    assert len(named) == len(_of(box, ipywidgets.Button))
    assert all(button.tooltip for button in _of(box, ipywidgets.Button))


def test_hostile_names_stay_text() -> None:
    case = cases.hostile()
    twice = replace(case, plan=replace(case.plan, candidates=case.plan.candidates * 2))
    box = _built(Recorder(), twice, retry=Retry(why=cases.HOSTILE))
    _buttons(box)["Show change 1"].click()
    text = _text(box)
    assert "<img" not in text
    assert "&lt;img" in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    labels = [widget.description for widget in _of(box, ipywidgets.DOMWidget) if hasattr(widget, "description")]
    assert not any("<" in label for label in labels), "ipywidgets 7 takes descriptions for HTML"


def test_where_no_kernel_runs_nothing_is_seen_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr("IPython.display.display", lambda data, **_: shown.append(data))
    made = panel.build(cases.offered(), Recorder())
    assert made is not None
    made.display()
    if hasattr(made.box, "_repr_mimebundle_"):
        (data,) = shown
        assert (data["text/plain"], data["text/html"]) == ("", "")
        assert data["application/vnd.jupyter.widget-view+json"]["model_id"] == made.box.model_id
    else:
        assert shown == [made.box]


def test_there_is_no_panel_where_nothing_can_be_pressed() -> None:
    assert panel.build(cases.no_candidates(), Recorder()) is None


def test_there_is_no_panel_without_ipywidgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert panel.build(cases.offered(), Recorder()) is None

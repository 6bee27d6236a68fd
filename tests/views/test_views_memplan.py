"""A cell that was not run, in text and in HTML: how it looks, the same facts in both, and nothing of the user's obeyed.

After a wanted change, write the files anew and read the difference before it is committed:

    OOMDOCTOR_REGENERATE=1 pytest tests/views/test_views_memplan.py
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from cases import blocks
from memplans import CELL, COURSE, MEMPLANS, fits, forecast, nowhere, refused, too_large
from seen import Seen
from test_views_html import ATTRIBUTES, PROPERTIES, TAGS
from test_views_same_facts import NUMBER, WIDE, _facts, _squeeze

from oomdoctor.model.fix import Patch
from oomdoctor.model.memory import Role
from oomdoctor.model.plan import Verdict
from oomdoctor.model.sizes import GIB
from oomdoctor.views import html, labels, text
from oomdoctor.views.displayed import Planned, foresight
from oomdoctor.views.document import Bar, Items, Line, Source, Timeline

GOLDEN = Path(__file__).parent / "golden_memplan"
EVERY = pytest.mark.parametrize("name", MEMPLANS)


def _check(path: Path, shown: str) -> None:
    if os.environ.get("OOMDOCTOR_REGENERATE"):
        path.write_text(shown, encoding="utf-8")
    assert shown == path.read_text(encoding="utf-8")


@EVERY
@pytest.mark.parametrize("width", [50, 100])
def test_text_looks_as_it_did(name: str, width: int) -> None:
    shown = text.render(foresight(MEMPLANS[name]()), width=width)
    assert max(map(len, shown.splitlines())) <= width
    _check(GOLDEN / f"{name}.{width}.txt", shown)


def test_no_line_of_the_diff_is_broken() -> None:
    plan = too_large()
    assert plan.plan is not None
    diff = next(one.patch.diff() for one in plan.plan.candidates if one.forecast.fits and isinstance(one.patch, Patch))
    shown = text.render(foresight(plan), width=30)
    assert max(map(len, diff.splitlines())) > 30
    assert "".join(f"  {line}".rstrip() + "\n" for line in diff.splitlines()) in shown


@EVERY
def test_html_looks_as_it_did(name: str) -> None:
    _check(GOLDEN / f"{name}.html", html.render(foresight(MEMPLANS[name]())))


def test_no_golden_file_is_left_over() -> None:
    wanted = {f"{name}.{ending}" for name in MEMPLANS for ending in ("50.txt", "100.txt", "html")}
    assert {path.name for path in GOLDEN.iterdir()} == wanted


@EVERY
def test_only_what_an_untrusted_notebook_keeps_is_used(name: str) -> None:
    seen = Seen(html.render(foresight(MEMPLANS[name]())))
    assert set(seen.tags) <= TAGS
    assert {attribute for _, attribute, _ in seen.attributes} <= ATTRIBUTES
    assert {prop for _, prop, _ in seen.styles} <= PROPERTIES


@EVERY
def test_every_number_and_every_fact_stands_in_both(name: str) -> None:
    plan = MEMPLANS[name]()
    plain, page = (
        _squeeze(shown) for shown in (text.render(foresight(plan), width=WIDE), Seen(html.render(foresight(plan))).text)
    )
    assert set(NUMBER.findall(plain)) == set(NUMBER.findall(page))
    facts = list(_facts(foresight(plan)))
    assert len(facts) > 5
    assert [fact for fact in facts if fact not in plain] == []
    assert [fact for fact in facts if fact not in page] == []


def test_text_of_the_users_is_escaped() -> None:
    page = html.render(foresight(refused()))
    assert "<img src=x" not in page
    assert "&lt;img src=x" in page


def test_the_timeline_keeps_the_peak_however_few_its_columns() -> None:
    (timeline,) = blocks(foresight(too_large()), Timeline)
    for count in (1, 7, 80, 1000):
        columns = timeline.columns(count)
        assert len(columns) <= count
        assert max(column.ratio for column in columns) == 1.0
        assert [column.label for column in columns if column.kind == "over"] == ["9.06 GiB at line 3"]
    assert len(timeline.columns(1000)) == len(COURSE.points)
    assert "to the peak of 9.06 GiB at line 3" in timeline.sentence


def test_the_line_at_the_peak_and_what_it_is_made_of() -> None:
    facts = foresight(too_large())
    assert blocks(facts, Source) == [Source("line 3", "loss.backward()", "peak at ")]
    (bar,) = blocks(facts, Bar)
    assert [segment.kind for segment in bar.segments][:2] == [Role.ACTIVATION.value, Role.PARAMETER.value]
    # More than the budget is alive: the marker stands before the end of the bar, and nothing is free.
    assert bar.budget_ratio is not None
    assert bar.budget_ratio < 1
    assert "free" not in [segment.kind for segment in bar.segments]
    assert "The part that was followed takes 32.5 TFLOPs and moves 420 GiB." in text.render(facts)


def test_what_is_absent_is_not_shown() -> None:
    facts = foresight(MEMPLANS["no_batch_fits"]())
    assert blocks(facts, Bar) + blocks(facts, Timeline) + blocks(facts, Items) == []
    shown = text.render(facts)
    assert [one for one in ("Memory over time", "Temporaries", "was followed") if one in shown] == []


def test_no_command_is_offered_that_would_apply_to_another_cell() -> None:
    for shown in (text.render(foresight(too_large())), html.render(foresight(too_large()))):
        assert "%oomdoctor" not in shown
        assert "+++ In[5] fixed" in shown


def test_without_a_budget_no_verdict_is_given() -> None:
    plan = nowhere()
    assert plan.fits is None
    headline = str(blocks(foresight(plan), Line)[1].text)
    assert "fits" not in headline
    assert headline.startswith("It needs ≈ 9.06 GiB (≈ 9.19 GiB reserved) on a device that this machine lacks (")


def test_the_least_that_it_needs_tells_what_cannot_fit_and_never_what_does() -> None:
    plan = refused()
    verdicts = {fit.place.name: fit.verdict for fit in plan.elsewhere}
    assert verdicts["T4 16 GB"] is Verdict.TOO_LARGE
    assert verdicts["L4 24 GB"] is Verdict.UNKNOWN
    assert verdicts["MI300X 192 GB"] is Verdict.UNKNOWN
    assert plan.fits is False
    assert plan.forecast.peak is None


def test_a_script_has_its_own_names() -> None:
    planned = Planned(too_large(), {5: "train.py", 7: "train()"})
    for shown in (str(planned), planned.to_html()):
        assert "Forecast of train(), made without running it" in shown
        assert "+++ train.py fixed" in shown
        assert "In[" not in shown


def test_the_object_shows_itself_and_has_the_json_shape() -> None:
    planned = Planned(fits())
    assert repr(planned) == "<Planned: ≈ 3.00 GiB, fits>"
    assert planned.fits is True
    assert planned.forecast == forecast(peak=3 * GIB)
    assert set(planned._repr_mimebundle_()) == {"text/plain", "text/html"}
    found = json.loads(json.dumps(planned.to_dict()))
    assert (found["schema"], found["fits"], found["verdict"]) == (1, True, "fits")
    assert found["cell"] == {"number": 7, "source": CELL.source, "file": None}
    assert found["forecast"]["course"]["at_peak"][0] == ["activation", 6 * GIB]
    assert found["largest_batch"]["size"] == 256
    assert [card["name"] for card in found["cards"]][:2] == ["T4 16 GB", "L4 24 GB"]
    lacking = json.loads(json.dumps(refused().to_dict()))
    assert lacking["largest_batch"] is None
    assert lacking["largest_batch_why"] == "the cell could not be forecast"
    assert lacking["least"]["peak"] == 20 * GIB
    assert lacking["forecast"]["peak"] is None
    priced = json.loads(json.dumps(too_large().to_dict()))
    assert [one["id"] for one in priced["fixes"]][:1] == ["micro_batch"]
    assert priced["refusals"]


def test_flops_are_told_in_units_that_are_read() -> None:
    assert labels.about(1) == "≈ 1 B"
    assert "1.5 GFLOPs" in _work(1.5e9)
    assert "999 GFLOPs" in _work(9.99e11)
    assert "1e+03" not in _work(9.9999e11)


def _work(flops: float) -> str:
    from dataclasses import replace

    plan = fits()
    found = replace(plan.forecast, course=replace(COURSE, flops=flops))
    return text.render(foresight(replace(plan, here=replace(plan.here, forecast=found))))
